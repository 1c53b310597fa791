"""The benchmark trains both on the same tokens; its figures follow from what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from grpo_ext.errors import ConfigError, GrpoExtError
from grpo_ext.tools.stock import OURS, STOCK
from tests.bench import shapes as bench
from tests.bench.__main__ import app
from tests.bench.shapes import (
    PHASES,
    REFERENCE,
    SHORT,
    Result,
    Shape,
    _best_micro,
    as_tables,
    parse_shape,
    record_of,
    run_shape,
)
from tests.bench.worker import FixedRollouts
from tests.support.tiny import stock_scores

TINY = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def test_a_shape_is_read_from_text():
    shape = parse_shape("prompt=16,completions=8-12,group=4,groups=2,lora,without_variance=0.5,name=mine")
    assert shape == Shape("mine", 16, 8, 12, groups=2, group=4, lora=True, without_variance=0.5)
    assert parse_shape("prompt=5,completions=7").shortest == parse_shape("prompt=5,completions=7").longest == 7


@pytest.mark.parametrize("text", ["prompt=16", "prompt=x,completions=1-2", "prompt=1,completions=2,fast", "lora=1"])
def test_a_shape_that_is_none_names_the_word(text):
    with pytest.raises(ConfigError, match="shape"):
        parse_shape(text)


def test_flops_and_tokens_count_each_prompt_once_and_leave_out_groups_without_variance():
    half = FixedRollouts(Shape("a", 10, 4, 4, groups=2, group=3, without_variance=0.5), vocabulary=50)
    whole = FixedRollouts(Shape("a", 10, 4, 4, groups=2, group=3), vocabulary=50)
    assert (half.tokens, whole.tokens) == (22, 44)
    assert whole.flops(8, 100, 10) == 2 * half.flops(8, 100, 10)
    assert half.flops(0, 1, 0) == 6 * 22
    assert half.flops(0, 0, 1) == 6 * 12
    lora = FixedRollouts(Shape("a", 10, 4, 4, groups=2, group=3, without_variance=0.5, lora=True), vocabulary=50)
    again = FixedRollouts(
        Shape("a", 10, 4, 4, groups=2, group=3, without_variance=0.5, checkpointing=True), vocabulary=50
    )
    assert (lora.flops(0, 1, 0), again.flops(0, 1, 0)) == (4 * 22, 8 * 22)
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

    monkeypatch.setattr(bench, "Worker", Timed)
    shape = Shape("x", 4, 2, 2)
    assert _best_micro(shape, STOCK, [16, 8, 4, 2, 5], TINY, "float32", lambda text: None) == 4  # 5 does not divide
    with pytest.raises(ConfigError, match="divides them; add one of 1, 2, 4, 8, 16, 32"):
        _best_micro(shape, STOCK, [5], TINY, "float32", lambda text: None)
    assert _best_micro(shape, OURS, [5], TINY, "float32", lambda text: None) == 5
    long = Shape("x", 4000, 2, 100)
    assert _best_micro(long, STOCK, [2, 8], TINY, "float32", lambda text: None) == 2  # 8 of them are too many tokens


@pytest.mark.full
@pytest.mark.parametrize("what", [pytest.param("train", marks=stock_scores), "sample", "whole"])
def test_both_trainers_run_a_shape_end_to_end(what):
    shape = Shape("small", 6, 2, 8, groups=2, group=4, sample=what == "sample", whole=what == "whole")
    said: list[str] = []
    result = run_shape(shape, TINY, 1, {OURS: [4], STOCK: [4]}, "float32", said.append)
    for who in (OURS, STOCK):
        assert all(result.seconds[who][phase] > 0 for phase in shape.phases if phase != "log-probs")
        assert result.peak_mib[who] > 0
        assert 0 < result.tokens[who] < 2 * 4 * (6 + 8)
    if what == "train":
        assert result.tokens[OURS] == result.tokens[STOCK] == FixedRollouts(shape, 64).tokens
    assert result.matmul > 0
    assert any("round 1 of 1" in text for text in said)
    assert record_of([result], {})["results"][0]["speed_up"] == result.speed_up
    assert [table.row_count for table in as_tables([result])] == [2, 1]


def test_the_short_form_is_of_the_same_kind_as_the_long_one_and_names_its_micro_batches():
    for shape in SHORT:
        rows = shape.groups * shape.group
        assert rows % min(SHORT[shape][0], rows) == 0, "stock TRL's has to divide"
        assert shape.phases in [s.phases for s in REFERENCE]


@pytest.fixture
def benched(monkeypatch):
    """Runs `make bench` without measuring: what would be measured, and what was said."""

    def run(*words):
        seen = []
        monkeypatch.setattr(bench, "run_shape", lambda *what: seen.append(what) or 1 / 0)
        return seen, CliRunner().invoke(app, [*map(str, words)])

    return run


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num_generations", "4"], "--num_generations: a bench has sizes and data of its own"),
        (["--demo", "sums"], "--demo: a bench has sizes and data of its own"),
        (["--loss_aggregation", "prompt_mean"], "stock TRL has no such setting"),
        (["--dtype", "float16"], "use one of them"),
        (["--model_name_or_path", "none.json"], "cannot be read as a configuration"),
    ],
)
def test_a_bench_that_would_measure_something_else_is_refused(benched, words, says):
    seen, result = benched(*words)
    assert not seen
    assert isinstance(result.exception, GrpoExtError)
    assert says in str(result.exception)


def test_the_shapes_take_another_model_and_settings_of_speed(benched, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = ["--model_name_or_path", tmp_path / "config.json", "--entropy_coef", "0.1", "--shape", "short everything"]
    ((shape, model, _, micro, dtype, _, options),) = benched(*words)[0]
    assert (shape.name, model, dtype) == ("short everything", TINY, "float32")
    assert micro == {STOCK: [32], OURS: [32]}
    assert (options["entropy_coef"], "bf16" in options) == (0.1, False)
