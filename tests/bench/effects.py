"""What parts of the trainer bring, where `make bench` does not show it: medians of interleaved runs, a Markdown table.

    python -m tests.bench.effects ahead     seconds per step with `rollout_lag`; some minutes
    python -m tests.bench.effects rewards   seconds per step with `reward_workers`; two minutes
    python -m tests.bench.effects routing   what `routing_replay` keeps in bfloat16; a minute
    python -m tests.bench.effects half      what micro-batch sizes differ by in bfloat16; a minute a round
    python -m tests.bench.effects chunks    what `rollout_chunk_size` takes in bfloat16; seven minutes a round

`ahead` and `rewards` simulate other devices: what runs there waits as long as training takes, and returns random tokens
(sampling) or a constant (old log-probabilities, which no run without a lag needs here). `chunks` samples from
SmolLM2-135M, which is downloaded once. A decode step launches the same kernels for any number of completions.
"""

import argparse
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_ext.forward.runner import ForwardRunner
from grpo_ext.precision.half import half_weights
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.sampling import engine
from grpo_ext.sampling.turn import Turn
from tests.support.tiny import letter_reward, prompts, tiny_model
from tests.support.toy_recipe import load_recipe
from tests.support.trainers import change, error, far, make, on

Run = Callable[[int], dict[str, float]]  # takes the number of the round
STEPS, FIRST = 14, 2  # of a timed run; those before it is timed
LENGTH = 48


def print_medians(cases: dict[str, Run], rounds: int) -> None:
    """Run the cases in turn, every other round in reverse, and print the median of each value."""
    turns = list(cases.items())
    results = [{name: run(number) for name, run in turns[:: -1 if number % 2 else 1]} for number in range(rounds)]
    columns = {column: None for result in results[0].values() for column in result}
    print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for name in cases:
        values = [[result[name].get(column, float("nan")) for result in results] for column in columns]
        print(f"| {name} | " + " | ".join(f"{statistics.median(value):.2g}" for value in values) + " |")


def seconds_per_step(model: Any, reward: Callable[..., list[float]], **settings: Any) -> dict[str, float]:
    sizes = {"global_batch_size": 32, "per_device_train_batch_size": 16, "num_generations": 8}
    ends: list[float] = []
    clock = on("on_step_end", lambda state: ends.append(time.perf_counter()))
    with tempfile.TemporaryDirectory() as folder:
        parts = {"train_dataset": prompts(64), "callbacks": [clock]}
        # nothing is learned, so that all steps take the same time
        make(folder, model, reward, **parts, **sizes, max_steps=STEPS, learning_rate=1e-6, **settings).train()
    return {"seconds per step": (ends[-1] - ends[FIRST - 1]) / (STEPS - FIRST)}


def waiting_sampler(seconds: Iterator[float]) -> Any:
    tokens = random.Random(1)

    def sample(model: Any, rows: Any, *args: Any) -> list[Turn]:
        time.sleep(next(seconds))
        return [Turn([tokens.randrange(3, 30) for _ in range(LENGTH)]) for _ in rows]

    return sample


def scored_elsewhere(forwards: Any, model: Any, rows: Any, *args: Any) -> tuple[torch.Tensor, None]:
    """Log-probabilities that another device has computed, and the wait for them is in that for the sampler."""
    return torch.full((sum(rows.completions_B),), -3.0), None


def with_lag(
    lag: int, number: int, sampling: list[float] | None = None, reward_s: float = 0.0, scores_here: bool = True
) -> dict[str, float]:
    """A run where sampling takes these times (None: is done here), and a reward waits."""

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        time.sleep(reward_s)
        return letter_reward(prompts, completions)

    sampler = engine.sample_chunk if sampling is None else waiting_sampler(iter(sampling))
    forwards = ForwardRunner.rollout_log_probs if scores_here else scored_elsewhere
    model = tiny_model(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    sizes = {"rollout_chunk_size": 32, "max_completion_length": LENGTH}
    replaced = mock.patch.object(ForwardRunner, "rollout_log_probs", forwards)
    with mock.patch.object(engine, "sample_chunk", sampler), replaced:
        return seconds_per_step(model, reward, rollout_lag=lag, **sizes)


def ahead() -> dict[str, Run]:
    instant = [0.0] * (STEPS + 3)
    times = [with_lag(0, number, instant)["seconds per step"] for number in range(4)]
    training = statistics.median(times[1:])  # after a warm-up
    print(f"training takes {training:.2f} s a step, and what waits as long\n")
    draw = random.Random(2)
    ragged = [training * draw.lognormvariate(-0.32, 0.8) for _ in instant]  # a mean of about one training step
    equal = [training for _ in instant]
    shapes: dict[str, dict[str, Any]] = {
        "a reward waits, sampling takes no time": {"sampling": instant, "reward_s": training, "scores_here": False},
        "a device of its own": {"sampling": equal, "scores_here": False},
        "a server, old log-probabilities here": {"sampling": equal},
        "a device of its own, ragged": {"sampling": ragged, "scores_here": False},
        "the same cores": {},
        "a reward waits, the same cores": {"reward_s": training},
    }
    return {
        f"{name}, lag {lag}": partial(with_lag, lag, **shape)
        for name, shape in shapes.items()
        for lag in ((0, 1, 2) if "device" in name else (0, 1))
    }


def with_workers(workers: int, milliseconds: float, computes: bool, number: int) -> dict[str, float]:
    """A run with a reward that computes (processor time) or waits for so long for each completion."""

    def reward(completions: list[str], **columns: Any) -> list[float]:
        seconds = len(completions) * milliseconds / 1000
        end = time.thread_time() + seconds
        if not computes:
            time.sleep(seconds)
        while computes and time.thread_time() < end:
            pass
        return [float(len(text) % 5) for text in completions]

    sizes = {"rollout_chunk_size": 8, "max_completion_length": 16}
    return seconds_per_step(tiny_model(), reward, reward_workers=workers, **sizes)


def rewards() -> dict[str, Run]:
    no_reward = partial(with_workers, 0, 0.0, True)
    no_reward(0)  # warm-up
    cases: dict[str, Run] = {
        f"{kind}, {workers} workers": partial(with_workers, workers, 20.0, kind == "computes")
        for kind in ("computes", "waits")
        for workers in (0, 1, 2)
    }
    return {**cases, "no reward": no_reward}


def with_experts(kind: str, replay: bool, seed: int) -> dict[str, float]:
    """One rollout batch of 64 completions in micro-batches of 16 and of 3; the scores of experts lie close."""
    changes, log = [], {}
    for size in (16, 3):
        model = tiny_model(kind, seed, **({"num_experts": 16, "num_experts_per_tok": 4} if kind == "moe" else {}))
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # those of a router differ little from their mean
                weight.data = weight.data.mean(0) + 0.03 * (weight.data - weight.data.mean(0))
        sizes = {"global_batch_size": 64, "per_device_train_batch_size": size, "max_completion_length": 32}
        terms = {"bf16": True, "router_aux_loss_coef": 0.0, "routing_replay": replay}
        parts = {"train_dataset": prompts(24, seed), "seed": seed, "max_steps": 1}
        with tempfile.TemporaryDirectory() as folder:
            trainer = make(folder, model, **sizes, **terms, **parts)
            changes.append(change(trainer))
        log = trainer.state.log_history[0]
    logged = {name: log[name] for name in ("sampling/logp_difference", "routing/changed_share") if name in log}
    return {"update error of two splits": error(*changes), **logged}


def routing() -> dict[str, Run]:
    cases = {"dense": ("qwen2", False), "MoE": ("moe", False), "MoE, replayed": ("moe", True)}
    return {name: partial(with_experts, *case) for name, case in cases.items()}


def of_sizes(float32: bool, settings: dict[str, Any], number: int) -> dict[str, float]:
    """One step of SGD from the same 32 completions, in groups of 8; micro-batches against one of all."""

    def step(size: int, **changes: Any) -> torch.Tensor:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "initializer_range": 0.02}
        parts = {"global_batch_size": 32, "num_generations": 8, "per_device_train_batch_size": size, "seed": number}
        parts |= {"max_completion_length": 24, "bf16": True, "rollout_chunk_size": 8}
        parts |= {"float32_weight_gradients": float32, **settings, **changes}
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model("qwen2", number, **sizes)
            return change(far(Path(folder), model, 10.0, data=prompts(8, number), **parts))

    whole, packed = step(32), step(32, forward="packed")
    errors = {f"micro-batches of {size}": error(whole, step(size)) for size in (16, 8, 3)}
    return {**errors, "against packs": error(packed, whole)}


def half() -> dict[str, Run]:
    forms: dict[str, dict[str, Any]] = {form: {"forward": form} for form in ("packed", "prefix", "padded")}
    terms = {"packed, KL": {"beta": 0.1}, "packed, entropy quantile": {"top_entropy_quantile": 0.5}}
    return {
        f"{name}, {'float32' if float32 else 'rounded'}": partial(of_sizes, float32, settings)
        for name, settings in {**forms, **terms}.items()
        for float32 in (False, True)
    }


def in_calls(
    groups: int, of_a_call: int, model: Any, rows: list[Transcript], config: GenerationConfig, number: int
) -> dict[str, float]:
    """What one process takes to sample the first `groups` groups of 8."""
    settings = engine.EngineSettings(torch.device("cpu"), None, filler=0, pad=int(config.pad_token_id))
    half = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    steps, begin = [], time.process_time()
    with torch.no_grad(), half, half_weights(model, torch.bfloat16):
        for start in range(0, groups, of_a_call):
            chunk = rows[start * 8 : (start + of_a_call) * 8]
            sampled = engine.sample_chunk(model, chunk, config, settings)
            steps.append(max(len(row.ids) for row in sampled))
    return {"CPU seconds": time.process_time() - begin, "decode steps / longest completion": sum(steps) / max(steps)}


def chunks() -> dict[str, Run]:
    folder, _ = load_recipe("smollm2").smollm2()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    questions = (
        "What is {} + {}?",
        "Write one short sentence about the number {}.",
        "Which is larger, {} or {}? Answer with one number.",
        "Why is the sky blue? Use at most {} words.",
    )
    texts = [questions[i % 4].format(3 + i, 5 + i % 9) for i in range(32)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids: Any = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    rows = [Transcript(8 * i + j, prompt_ids=prompt) for i, prompt in enumerate(ids) for j in range(8)]
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    config = GenerationConfig(max_new_tokens=LENGTH, do_sample=True, top_k=0, **ends)
    return {
        f"{groups} groups, {size} a call": partial(in_calls, groups, size, model, rows, config)
        for groups in (8, 16, 32)
        for size in sorted({groups, 8, groups // 8, 1}, reverse=True)
    }


CASES = {"ahead": ahead, "rewards": rewards, "routing": routing, "half": half, "chunks": chunks}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case; with routing, each of another seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("grpo_ext").setLevel(logging.WARNING)  # no plans between the rows
    print_medians(CASES[options.what](), options.rounds)
