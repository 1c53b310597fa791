"""FSDP2, ZeRO-2 and ZeRO-3 on real CPU processes: the update of one process, checkpoints, resume."""

import dataclasses
import functools
import importlib.util
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils.other import get_free_port
from safetensors.torch import load_file

from grpo_ext.errors import CheckpointError, ConfigError
from grpo_ext.run.record import STEP
from grpo_ext.tools.export import export
from grpo_ext.upstream.loading import refuse_other_engine
from tests.support import forks
from tests.support.architectures import architecture
from tests.support.images import image_model
from tests.support.launch import ROOT, environment
from tests.support.tiny import config_kwargs, tiny_model, tiny_tokenizer
from tests.support.trainers import make
from tests.tolerances import ADAM_EPSILON, DIFFERENT, UPDATE

SCRIPT = Path(__file__).with_name("engine_run.py")
CONFIGS = ROOT / "recipes" / "accelerate"
DEVICE = {True: {"DS_ACCELERATOR": "cpu"}, False: {"ACCELERATE_USE_CPU": "true"}}  # of DeepSpeed, of the others
SIZES = {"rollout_batch_size": 32, "per_device_train_batch_size": 3, "max_completion_length": 8}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install '.[deepspeed]'"
)


@dataclass(frozen=True)
class Job:
    name: str
    config: dict[str, Any]
    prompts: int = 22
    lora: bool = False
    start: bool | str = True  # init_lora_weights
    dropout: float = 0.1  # of LoRA
    resume: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    changed: bool = False  # the model object has other weights than its files
    nameless: bool = False  # a model object that cannot be loaded again by name
    model: str = "model"
    teacher: str | None = None
    whole: bool = False  # gradients are not reduced before the last micro-batch
    tools: bool = False  # which processes are done with in different turns
    again: str | None = None  # the job whose third step runs again
    spoiled: bool = False  # the last process has a gradient that is not finite in the second step
    shared: bool = False  # two processes share each completion, where an engine on two processes takes that


# each process writes its part of the weights (under the other engines: as ever)
SHARDS = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "false"}
FEW_ROWS = {"global_batch_size": 4, "rollout_batch_size": 4, "max_steps": 2}
MODELS = {
    "model": tiny_model,
    "moe": functools.partial(tiny_model, "moe"),
    "hybrid": functools.partial(architecture, "lfm2"),  # convolutions beside attention
    **{family: functools.partial(image_model, family) for family in ("llava", "idefics3")},
}
TOOLS = {**FEW_ROWS, "global_batch_size": 8, "rollout_batch_size": 8, "rollout_chunk_size": 4}
TOOLS |= {"max_completion_length": 45, "max_tool_calling_iterations": 3, "max_steps": 3}
SAVED = {"save_strategy": "steps", "save_steps": 1}
LAST = {"save_strategy": "steps", "save_steps": 3}
FP16 = {"fp16": True, "per_device_train_batch_size": 4, "max_steps": 4}
REPLAYED = {"top_p": 0.8, "sampling_mask": "replay", "rollout_chunk_size": 8}  # two calls for each process
ROUTED = {"routing_replay": True, "gradient_checkpointing": True, "num_iterations": 2, "max_steps": 2}
IMAGES = {"beta": 0.1, "gradient_checkpointing": True, **SAVED, "max_steps": 2}
# what `make test` runs under FSDP2
FEW = [
    Job("saved", SAVED),
    Job("kl", {"beta": 0.1, "num_iterations": 2, "per_device_train_batch_size": 2, "max_steps": 2, **REPLAYED}),
    Job("few", FEW_ROWS),  # one group: others have none
    Job("whole", {"max_steps": 1}, whole=True),  # the control of FSDP2's gradients
    Job("lora_random", {**FEW_ROWS, "beta": 0.1}, lora=True, start=False, dropout=0.0),
    Job("seed", {**FEW_ROWS, "seed": 4}),  # the control: this one has to differ
    Job("spoiled", SAVED, spoiled=True),
    Job("fp16", FP16),  # with an overflow on the last process
    Job("shared", {"beta": 0.1, **ROUTED}, model="moe", shared=True),
    Job("resumed", {}, resume="saved/checkpoint-1"),
    Job("again", SAVED, again="saved"),
    Job("shards", LAST, env=SHARDS),  # last: the environment stays
]
FULL = ("lora_random", "spoiled", "shared", "again")  # of them, with --full alone
ALL = [
    Job("routed", ROUTED, model="moe"),
    Job("teacher", {**REPLAYED, "num_generations": 4, "max_steps": 2}, teacher="moe"),
    Job("lora_dropout", FEW_ROWS, lora=True, start=False),
    Job("budget", {"micro_batch_tokens": 60, "loss_type": "grpo"}),
    Job("images_few", FEW_ROWS, prompts=8, model="idefics3"),
    Job("changed", {**FEW_ROWS, "beta": 0.1}, changed=True),
    Job("kl_nameless", {"beta": 0.1}, nameless=True),
    Job("tools", TOOLS, tools=True),
    Job("hybrid", {"gradient_checkpointing": True, "beta": 0.1, "max_steps": 2}, model="hybrid"),
    Job("images_saved", IMAGES, prompts=8, model="llava"),
    Job("lora_saved", {"beta": 0.1, **SAVED}, lora=True),
    Job("lora_resumed", {"beta": 0.1, **SAVED}, lora=True, resume="lora_saved/checkpoint-1"),
    *FEW[:-1],
    Job("images_resumed", IMAGES, prompts=8, model="llava", resume="images_saved/checkpoint-1"),
    Job("lora_shards", {"beta": 0.1, **LAST}, lora=True, env=SHARDS),
    FEW[-1],
]


@dataclass
class Outcome:
    state: dict[str, torch.Tensor]
    log: list[dict[str, Any]]
    engine: str
    sharded: bool
    gradients: float
    error: str | None = None


def prepare(folder: Path, model: Path, jobs: list[Job], shares: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for job in jobs:
        resume = None if job.resume is None else str(folder / job.resume)
        settings = {"rollout_chunk_size": 16, "max_steps": 3, "adam_epsilon": ADAM_EPSILON, **SIZES, **job.config}
        if job.shared and shares:
            settings["sequence_parallel_size"] = 2
        if job.teacher is not None:
            settings["teacher_model"] = str(model.with_name(job.teacher))
        changes = {
            "config": config_kwargs(folder / (job.again or job.name), **settings),
            "model": str(model.with_name(job.model)),
        }
        runs.append({**dataclasses.asdict(job), **changes, "resume": resume})
    (folder / "job.json").write_text(json.dumps({"runs": runs}))


def outcomes(folder: Path, jobs: list[Job]) -> dict[str, Outcome]:
    return {
        job.name: Outcome(load_file(folder / f"{n}.safetensors"), **json.loads((folder / f"{n}.json").read_text()))
        for n, job in enumerate(jobs)
    }


def launcher(run: Path, engine: str, **changes: Any) -> list[str]:
    """Accelerate's launcher with the recipes' file of an engine, on the CPU."""
    config = yaml.safe_load((CONFIGS / f"{engine}.yaml").read_text())
    config |= {"use_cpu": True, "main_process_port": get_free_port(), **changes}
    (run / "accelerate.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(run / "accelerate.yaml")]


def launch(
    run: Path, model: Path, engine: str, processes: int, jobs: list[Job], fork: bool = True
) -> dict[str, Outcome]:
    """Through Accelerate's launcher, on forked processes where that can be."""
    prepare(run, model, jobs, shares=processes == 2 and engine in ("fsdp2", "ddp"))
    env = environment(**DEVICE[engine.startswith("zero")], PYTHONPATH=str(ROOT))
    fork, script = fork and forks.serves(env), [str(SCRIPT), str(run)]
    if engine == "single" and fork:
        status, *texts = forks.run(script, [env], 600)
        output = "".join(texts)
    elif fork:
        status, _, output = forks.run_forked_by(launcher(run, engine, num_processes=processes), script, env, 600)
    else:
        command = [*launcher(run, engine, num_processes=processes), *script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=ROOT)
        status, output = done.returncode, done.stderr
    assert status == 0, output[-4000:]
    return outcomes(run, jobs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    for name, model in MODELS.items():
        model().save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def launches(folder, request):
    full = request.config.getoption("--full")

    @functools.cache
    def outcome(engine: str, processes: int) -> dict[str, Outcome] | str:
        whole = processes == 3 or (engine == "single" and full)
        run = folder / f"{engine}_{processes}"
        jobs = [job for job in (ALL if whole else FEW) if engine == "fsdp2" or not job.whole]
        if engine == "zero3":  # refuses it
            jobs = [job for job in jobs if job.start is True]
        if not full:
            jobs = [job for job in jobs if job.name not in FULL]
        if engine.startswith("zero"):  # has a loss scale of its own
            jobs = [job for job in jobs if job.name != "fp16"]
        if engine == "single":
            jobs = [job for job in jobs if job.name in ALIKE]
        try:
            return launch(run, folder / "model", engine, processes, jobs, fork=engine != "fsdp2" or not whole)
        except AssertionError as error:  # for every test; launched once
            return str(error)

    def get(engine: str, processes: int) -> dict[str, Outcome]:
        answer = outcome(engine, processes)
        assert not isinstance(answer, str), answer
        return answer

    return get


def gap(one: Outcome, other: Outcome, model: str = "model") -> float:
    """Difference of two trained states, relative to what training moved; frozen weights cancel."""
    initial = dict(MODELS[model]().named_parameters())
    distance = moved = 0.0
    assert one.state.keys() == other.state.keys()
    for name, value in one.state.items():
        start = initial[name].detach().double() if name in initial else torch.zeros(()).double()
        if name not in initial and "lora" not in name:
            continue
        distance += float((value.double() - other.state[name].double()).pow(2).sum())
        moved += float((value.double() - start).pow(2).sum())
    return (distance / moved) ** 0.5


full = pytest.mark.full
WITH_ALL = [
    pytest.param("fsdp2", 3, marks=full),
    pytest.param("zero2", 3, marks=[needs_deepspeed, full]),
    pytest.param("zero3", 3, marks=[needs_deepspeed, full]),
]
ENGINES = [
    pytest.param("fsdp2", 2),
    pytest.param("zero2", 2, marks=[needs_deepspeed, full]),
    pytest.param("zero3", 2, marks=[needs_deepspeed, full]),
    pytest.param("ddp", 2, marks=full),  # on more processes: tests/invariance
    *WITH_ALL,
]
KIND = {"fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "ddp": "MULTI_CPU"}
MODEL_OF = {job.name: job.model for job in ALL}
ALIKE = [
    job.name
    for job in ALL
    if not (job.name in ("seed", "fp16") or job.spoiled or job.whole or job.env or job.resume or job.again)
]


@pytest.mark.parametrize(("engine", "processes"), ENGINES)
def test_the_update_and_the_log_are_those_of_one_process(launches, engine, processes):
    one, several = launches("single", 1), launches(engine, processes)
    assert several["saved"].engine == KIND[engine]
    assert several["saved"].sharded == (engine in ("fsdp2", "zero3"))
    errors = {name: gap(one[name], several[name], MODEL_OF[name]) for name in ALIKE if name in several}
    print(f"{engine} on {processes}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert max(errors.values()) <= UPDATE, errors
    assert gap(one["few"], several["seed"]) > DIFFERENT
    for name in errors:
        for line, other in zip(one[name].log, several[name].log, strict=True):
            for key in ("loss", "reward", "entropy", "kl", "teacher_kl", "grad_norm", "completions/mean_length"):
                if key in line:
                    assert line[key] == pytest.approx(other[key], rel=2e-5, abs=2e-6), (name, key)


@pytest.mark.parametrize(("engine", "processes"), ENGINES)
@full
def test_the_reference_is_the_policy_at_its_start(launches, engine, processes):
    several = launches(engine, processes)
    for name in several.keys() & {"changed", "lora_random", "kl_nameless"}:
        first, second = [line["kl"] for line in several[name].log if "kl" in line][:2]
        assert first == pytest.approx(0.0, abs=1e-9), name
        assert second > 1e-8, name


@pytest.mark.parametrize(("engine", "processes"), ENGINES)
def test_a_run_is_resumed_where_it_was(launches, engine, processes):
    several = launches(engine, processes)
    for name in [name for name in ("", "lora_", "images_") if f"{name}resumed" in several]:
        saved, resumed = several[f"{name}saved"], several[f"{name}resumed"]
        assert gap(saved, resumed, MODEL_OF[f"{name}saved"]) <= 1e-6, name  # the first step is not trained again
        assert resumed.log[-2]["step"] == saved.log[-2]["step"] >= 2
        assert resumed.log[-2]["loss"] == pytest.approx(saved.log[-2]["loss"], rel=1e-5)


@pytest.mark.parametrize(("engine", "processes"), ENGINES)
@full
def test_a_step_runs_again(launches, folder, engine, processes):
    several = launches(engine, processes)
    assert gap(several["saved"], several["again"]) <= 1e-6
    lines = (folder / f"{engine}_{processes}" / "saved" / "rerun" / "step-3" / STEP).read_text().splitlines()
    about, *rows = map(json.loads, lines)
    assert about["text"] == "step 3: the same bits"
    if engine in ("fsdp2", "ddp"):  # DeepSpeed holds no gradient by parameter
        assert math.hypot(*about["layers"].values()) == pytest.approx(about["grad_norm"], rel=1e-5)
    assert math.fsum(row["share"] or 0.0 for row in rows) == pytest.approx(about["loss"], abs=1e-6)


def test_fsdp_holds_its_part_of_the_gradients(launches):
    two = launches("fsdp2", 2)
    assert 0.4 < two["saved"].gradients < 0.6, two["saved"].gradients
    assert two["whole"].gradients > 0.9  # the control


FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
SHARD_KINDS = {"fsdp2": "FSDP shards", "zero3": "ZeRO shards"}


@pytest.mark.parametrize(("engine", "processes"), ENGINES)
def test_every_checkpoint_is_exported(launches, folder, tmp_path, engine, processes):
    launches(engine, processes)
    run = folder / f"{engine}_{processes}"
    final = {name: run / name / "checkpoint-3" for name in ("saved", "shards")}
    expected = launches(engine, processes)["saved"].state
    for name in ("saved", "shards"):
        kind = export(final[name], tmp_path / name, trust_shards=True)
        assert kind == ("full" if name == "saved" else SHARD_KINDS.get(engine, "full"))
        assert {path.name for path in (tmp_path / name).iterdir()} == FILES | {"tokenizer_config.json"}
        written = load_file(tmp_path / name / "model.safetensors")
        for key, value in written.items():
            assert torch.allclose(value, expected[key], atol=1e-7), key
    if engine in SHARD_KINDS:
        with pytest.raises(ConfigError, match="add --trust-shards"):
            export(final["shards"], tmp_path / "untrusted")


def test_the_checkpoint_of_another_engine_is_refused_with_a_remedy_that_works(launches, folder, tmp_path):
    launches("fsdp2", 2)
    plain = functools.partial(make, tmp_path / "plain", str(folder / "model"), **SIZES, max_steps=1)
    for name, kind in (("saved", "FULL_STATE_DICT"), ("shards", "SHARDED_STATE_DICT")):
        checkpoint = folder / "fsdp2_2" / name / "checkpoint-3"
        with pytest.raises(CheckpointError, match=rf"under FSDP with {kind}, .* under one process or DDP; .*export"):
            plain().train(str(checkpoint))
        export(checkpoint, tmp_path / name, trust_shards=True)
        make(tmp_path / "new", str(tmp_path / name), max_steps=1).train()
    (tmp_path / "zero" / "global_step1").mkdir(parents=True)  # whose optimizer transformers would silently leave out
    with pytest.raises(CheckpointError, match=r"under DeepSpeed, .* under one process or DDP;"):
        refuse_other_engine(tmp_path / "zero", plain().accelerator)


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("ddp", marks=full)])
def test_an_overflow_on_one_process_skips_the_step_on_all(launches, engine):
    result = launches(engine, 2)["fp16"]
    lines = [line for line in result.log if "fp16/loss_scale" in line]
    assert [line["fp16/loss_scale"] for line in lines] == [1024.0, 512.0, 512.0, 512.0]
    assert [line["fp16/overflows"] for line in lines] == [0.0, 1.0, 0.0, 0.0]
    assert lines[-1]["fp16/skipped_steps"] == 1.0
    rates = [line["learning_rate"] for line in lines]
    assert rates[1] == rates[2] or rates[0] == rates[1]  # the scheduler stood still once
    assert len(set(rates)) == 3
    assert all(bool(torch.isfinite(value).all()) for value in result.state.values())
    initial = dict(tiny_model().named_parameters())
    assert any(not torch.equal(value, initial[name]) for name, value in result.state.items() if name in initial)


@pytest.mark.parametrize(("engine", "processes"), ENGINES[:4])
@full
def test_a_gradient_that_is_not_finite_on_one_process_ends_the_run_on_all(launches, folder, engine, processes):
    result = launches(engine, processes)["spoiled"]
    assert re.match(r"the norm of the gradient of step 2 is (nan|inf|-1): it comes from the completions", result.error)
    assert "at the output of model.layers.0.mlp (Qwen2MLP)" in result.error
    assert all(bool(torch.isfinite(value).all()) for value in result.state.values())
    assert [path.name for path in (folder / f"{engine}_{processes}" / "spoiled").glob("checkpoint-*")] == [
        "checkpoint-1"
    ]


@pytest.mark.full
def test_two_machines_are_one_run(launches, folder):
    """Two rendezvous groups on loopback, started one by one as on two machines; each has a process."""
    jobs, run = [job for job in ALL if job.name in ("budget", "few")], folder / "two_machines"
    prepare(run, folder / "model", jobs)
    command = launcher(run, "multi_node", num_processes=2, main_process_ip="127.0.0.1")
    started = [
        subprocess.Popen(
            [*command, "--machine_rank", str(machine), str(SCRIPT), str(run)],
            env=environment(**DEVICE[False], PYTHONPATH=str(ROOT)),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for machine in (0, 1)
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors[0][-2000:] + errors[1][-2000:]
    one, two = launches("single", 1), outcomes(run, jobs)
    for job in jobs:
        assert two[job.name].engine == "MULTI_CPU"
        assert gap(one[job.name], two[job.name]) <= UPDATE
