"""The bench trains both on the same tokens; its figures follow from what was measured."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from grpo_ext.errors import ConfigError, GrpoExtError
from grpo_ext.tools.stock import OURS, STOCK
from tests.bench import measuring
from tests.bench.__main__ import app
from tests.bench.measuring import Result, as_tables, fastest_micro, run_shape
from tests.bench.shapes import PHASES, Shape, decoder, parse_shape
from tests.bench.worker import FixedRollouts
from tests.support.tiny import stock_scores
from tests.support.toy_recipe import CONFIGS, toy_model

TINY = decoder("qwen2", 64, 32, 64, 1, 2, 2, positions=128)


def test_a_shape_is_read_from_text():
    shape = parse_shape("prompt=16,completions=8-12,group=4,groups=2,lora,without_variance=0.5,name=mine")
    assert shape == Shape("mine", 16, 8, 12, groups=2, group=4, lora=True, without_variance=0.5)
    assert parse_shape("prompt=5,completions=7").shortest == parse_shape("prompt=5,completions=7").longest == 7


@pytest.mark.parametrize("text", ["prompt=16", "prompt=x,completions=1-2", "lora=1"])
def test_a_shape_that_is_none_names_the_word(text):
    with pytest.raises(ConfigError, match="shape"):
        parse_shape(text)


def test_flops_and_tokens_count_each_prompt_once_and_leave_out_groups_without_variance():
    def fixed(**changes):
        return FixedRollouts(Shape("a", 10, 4, 4, groups=2, group=3, **changes), vocabulary=50)

    half, whole = fixed(without_variance=0.5), fixed()
    assert (half.tokens, whole.tokens) == (22, 44)
    assert whole.flops(8, 100, 10) == 2 * half.flops(8, 100, 10)
    assert half.flops(0, 1, 0) == 6 * 22
    assert half.flops(0, 0, 1) == 6 * 12
    assert fixed(without_variance=0.5, lora=True).flops(0, 1, 0) == 4 * 22
    assert fixed(without_variance=0.5, checkpointing=True).flops(0, 1, 0) == 8 * 22
    assert len({half.rewards[tuple(c)] for c in half.completions[0]}) == 1
    assert len({half.rewards[tuple(c)] for c in half.completions[1]}) == 3


def test_the_speed_up_is_per_token_and_of_the_phases_in_question():
    seconds = {OURS: dict(zip(PHASES, (9.0, 0.0, 2.0, 0.5))), STOCK: dict(zip(PHASES, (1.0, 0.0, 9.0, 1.0)))}
    both = {OURS: 1.0, STOCK: 1.0}
    result = Result(Shape("x", 1, 1, 1), {}, seconds, both, both, {OURS: 100.0, STOCK: 100.0}, 6.0, 30.0, 1)
    assert result.speed_up == 4.0
    assert result.matmul_share(OURS) == 0.1
    sampled = dataclasses.replace(result, shape=Shape("x", 1, 1, 1, sample=True), tokens={OURS: 180.0, STOCK: 10.0})
    assert sampled.speed_up == pytest.approx(2.0)


def test_the_smallest_micro_batch_that_is_as_good_as_the_fastest_is_chosen(monkeypatch):
    class Timed:
        def __init__(self, spec):
            self.seconds = {4: 1.02, 8: 1.0, 16: 0.995, 2: 1.2}[spec["micro"]]

        def step(self):
            return {"seconds": {"forward/backward": self.seconds}}

        def close(self):
            pass

    def fastest(who, sizes, prompt=4, longest=2):
        return fastest_micro(Shape("x", prompt, 2, longest), who, sizes, TINY, "float32", print, {})

    monkeypatch.setattr(measuring, "Worker", Timed)
    assert fastest(STOCK, [16, 8, 4, 2, 5]) == 4  # 5 does not divide
    with pytest.raises(ConfigError, match="divides them; add one of 1, 2, 4, 8, 16, 32"):
        fastest(STOCK, [5])
    assert fastest(OURS, [5]) == 5
    assert fastest(STOCK, [2, 8], 4000, 100) == 2  # 8 of them are too many tokens


@pytest.mark.full
@pytest.mark.parametrize("what", ["sample", "whole"])
def test_both_trainers_run_a_shape_end_to_end(what):
    shape = Shape("small", 6, 2, 8, groups=2, group=4, sample=what == "sample", whole=what == "whole")
    lines: list[str] = []
    result = run_shape(shape, TINY, 1, {OURS: [4], STOCK: [4]}, "float32", lines.append, {})
    for who in (OURS, STOCK):
        assert all(result.seconds[who][phase] > 0 for phase in shape.phases if phase != "log-probs")
        assert result.peak_mib[who] > 0
        assert 0 < result.tokens[who] < 2 * 4 * (6 + 8)
    assert result.matmul > 0
    assert any("round 1 of 1" in text for text in lines)
    assert [table.row_count for table in as_tables([result])] == [2, 1]


def benched(monkeypatch, *words):
    """`make bench` without measuring: what would be measured, and what was said."""
    measured = []
    monkeypatch.setattr(measuring, "run_shape", lambda *what: measured.append(what) or 1 / 0)
    return measured, CliRunner().invoke(app, [*map(str, words)])


def test_a_bench_of_a_run_takes_what_decides_its_speed_and_names_what_it_leaves_out(monkeypatch, tmp_path):
    model = toy_model(tmp_path / "model")
    of_run = ["--model_name_or_path", model, "--dataset_name", "rows.jsonl", "--bf16", "False", "--prompt_length", "7"]
    sizes = ["--num_generations", "4", "--global_batch_size", "12", "--per_device_train_batch_size", "5"]
    load = ["--attn_implementation", "eager", "--model_init_kwargs", '{"dtype": "bfloat16", "subfolder": "a"}']
    speed = ["--entropy_coef", "0.1", "--cast_lm_head_to_fp32", "False", "--trust_remote_code", "True"]
    left = ["--max_steps", "2", "--reward_weights", "1.0", "--logging_steps", "1"]
    measured, result = benched(monkeypatch, *of_run, *sizes, *load, *speed, *left)
    ((shape, source, _, micro, dtype, _, options),) = measured
    assert (shape.prompt, shape.groups, shape.group, shape.checkpointing) == (7, 3, 4, True)
    assert micro == {STOCK: [4], OURS: [5]}  # of 12, which 5 does not divide
    assert (source, dtype) == (str(model), "bfloat16")
    loaded = {"revision": "main", "trust_remote_code": True, "attn_implementation": "eager", "subfolder": "a"}
    assert options.pop("model_init_kwargs") == loaded
    expected = {"entropy_coef": 0.1, "cast_lm_head_to_fp32": False, "trust_remote_code": True, "bf16": False}
    assert {name: options[name] for name in expected} == expected
    assert not options.keys() & {"max_steps", "reward_weights", "logging_steps", "num_generations", "dataset_name"}
    assert "without logging_steps, max_steps, reward_weights" in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num_generations", "4"], "--num_generations: a bench of shapes has sizes and data of its own"),
        (["--max_completion_length", "64", "--entropy_coef", "0.1"], "--max_completion_length: a bench of shapes"),
        (["--demo", "sums"], "--demo sums: a bench has no demos"),
        (["--loss_aggregation", "prompt_mean"], "stock TRL has no such setting"),
        (["--dtype", "float16"], "use one of them"),
        (["--model_name_or_path", "none.json"], "cannot be read as a configuration"),
    ],
)
def test_a_bench_that_would_measure_something_else_is_refused(monkeypatch, words, says):
    measured, result = benched(monkeypatch, *words)
    assert not measured
    assert isinstance(result.exception, GrpoExtError)
    assert says in str(result.exception)


@pytest.mark.full
@stock_scores
def test_a_run_is_benched_end_to_end(tmp_path):
    model = toy_model(tmp_path / "model")
    of_run = f"--config {CONFIGS / 'gsm8k_lora.yaml'} --model_name_or_path {model} --fp16 False"
    sizes = "--num_generations 4 --global_batch_size 8 --max_completion_length 8 --prompt_length 20 --rounds 1"
    words = [*of_run.split(), *sizes.split(), "--json", str(tmp_path / "new.json")]
    assert CliRunner().invoke(app, words).exit_code == 0
    written = json.loads((tmp_path / "new.json").read_text())
    (result,) = written["results"]
    assert result["shape"]["lora"]
    assert result["tokens"][OURS] == result["tokens"][STOCK] > 0
    assert result["speed_up"] > 0
    assert {"cpu", "cores", "threads", "memory_gib"} <= written["machine"].keys()
    assert {"torch", "trl"} <= written["versions"].keys()
    assert (written["settings"]["rounds"], written["settings"]["options"]["lora_r"]) == (1, 16)
