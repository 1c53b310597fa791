"""The process behind `make bench`: one trainer, ours or stock TRL's, that runs a step for each line on its input.

Completions and rewards are fixed, so both trainers train on the same tokens; only the shapes about sampling sample.
Answers each line with one JSON line: seconds by phase, memory, tokens.
"""

import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from grpo_ext.run.log import peak_memory_mib
from grpo_ext.runtime.quiet import quiet_libraries
from grpo_ext.sampling.turn import Turn
from grpo_ext.tools.stock import OURS, stock_config

from .shapes import PHASES, Shape

_END_SHARE = 3.0  # ragged answers end after a third of the longest on average: this many expected ends in the longest


def _words(vocabulary: int) -> Any:
    """A tokenizer whose token i is the word `w{i}`."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **ends)


def _model(spec: dict[str, Any], quantization: Any) -> Any:
    torch.manual_seed(0)
    dtype, load = getattr(torch, spec["dtype"]), spec["options"].get("model_init_kwargs") or {}
    if isinstance(spec["model"], str):
        load = {"dtype": dtype, "quantization_config": quantization, **load}
        return AutoModelForCausalLM.from_pretrained(spec["model"], **load)
    config = AutoConfig.for_model(**spec["model"])
    attention = load.get("attn_implementation")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # half a billion random numbers take a while
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)


class FixedRollouts:
    """The rollouts of a shape: prompts, completions and rewards, the same for every trainer."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        source = random.Random(0)

        def tokens(count: int) -> list[int]:
            return [source.randrange(2, vocabulary) for _ in range(count)]

        self.prompts = [tokens(shape.prompt) for _ in range(shape.groups)]
        self.completions = [[tokens(n) for n in lengths] for lengths in shape.lengths()]
        even = round(shape.without_variance * shape.groups)
        self.rewards = {
            tuple(completion): 1.0 if g < even else float(source.random())
            for g, group in enumerate(self.completions)
            for completion in group
        }
        self.trained = [group for g, group in enumerate(self.completions) if g >= even]
        self.shape = shape

    def generate(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        used: dict[int, int] = defaultdict(int)
        result = []
        for ids in prompt_ids:
            group = self.prompts.index(list(ids))
            result.append(self.completions[group][used[group]])
            used[group] += 1
        return result, None

    def turns(self, transcripts: Sequence[Any], *args: Any) -> list[Turn]:
        """What an engine of ours returns; an override of `_generate_single_turn` is refused in bitwise mode."""
        return [Turn(ids) for ids in self.generate([row.prompt_ids for row in transcripts])[0]]

    def reward(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [self.rewards.get(tuple(ids), float(len(ids))) for ids in completion_ids]

    def flops(self, width: int, body: int, head: int) -> float:
        """Forward and backward of the tokens that are trained on, each once.

        Frozen weights (LoRA) need no gradient of their own; checkpointing runs the layers' forward again.
        """
        prompt, total = self.shape.prompt, 0.0
        weights, again = 4 if self.shape.lora else 6, 2 if self.shape.checkpointing else 0
        for group in self.trained:
            lengths = [len(completion) for completion in group]
            pairs = prompt**2 / 2 + sum(n * (prompt + n / 2) for n in lengths)
            total += (weights + again) * body * (prompt + sum(lengths)) + weights * head * sum(lengths)
            total += (12 + 2 * again) * width * pairs
        return total

    @property
    def tokens(self) -> int:
        return sum(self.shape.prompt + sum(map(len, group)) for group in self.trained)


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # not Linux: the peak is that of the whole run
        Path("/proc/self/clear_refs").write_text("5")


def _now_and_peak() -> tuple[float, float]:
    """Memory now and its peak since `_reset_peak`, MiB: the accelerator's tensors, or this process's resident set."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20
    now = psutil.Process().memory_info().rss / 2**20
    try:  # unlike getrusage's peak, this one can be reset
        status = Path("/proc/self/status").read_text().splitlines()
        return now, next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return now, peak_memory_mib(torch.device("cpu")) or now


def _reserved_peak() -> dict[str, float]:
    """The peak of what the allocator holds of an accelerator, MiB: free blocks too, so more than its tensors."""
    return {"peak_reserved_mib": torch.cuda.max_memory_reserved() / 2**20} if torch.cuda.is_available() else {}


def _in_use() -> dict[str, float]:
    """The memory of an accelerator that is in use, MiB, by this process's context and by all other processes."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"in_use_mib": (total - free) / 2**20}


def _now() -> float:
    """Seconds, when the device has done the work it has been given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def bitwise(spec: dict[str, Any]) -> bool:
    return bool(spec["options"].get("bitwise_invariant"))


def make_trainer(spec: dict[str, Any], shape: Shape, folder: str, callback: Any) -> tuple[Any, FixedRollouts]:
    import trl
    from datasets import Dataset

    import grpo_ext
    from grpo_ext.tools.options import fields_of

    asked = {"use_peft": shape.lora, "lora_target_modules": "all-linear", "lora_dropout": 0.0, **spec["options"]}
    of_model = trl.ModelConfig(**fields_of(asked, trl.ModelConfig))
    model = _model(spec, trl.get_quantization_config(of_model))
    vocabulary = model.config.get_text_config().vocab_size
    rollouts = FixedRollouts(shape, vocabulary)
    if shape.samples:  # a random model says each token alike; enough of them end an answer, or hardly any
        share = 0.0 if shape.shortest == shape.longest else _END_SHARE
        ends = max(1, round(share * vocabulary / shape.longest))
        model.generation_config.eos_token_id = list(range(1, 1 + ends))
    quiet = {"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    settings = {
        "output_dir": folder,
        "global_batch_size": shape.groups * shape.group,
        "per_device_train_batch_size": spec["micro"],
        "num_generations": shape.group,
        "max_completion_length": shape.longest,
        "max_steps": 10**6,
        "learning_rate": 1e-6,
        "shuffle_dataset": False,
        "gradient_checkpointing": shape.checkpointing,
        "bf16": spec["dtype"] == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        **quiet,
        **fields_of(spec["options"], grpo_ext.GRPOConfig),
        "model_init_kwargs": None,  # the model is loaded by now
    }
    ours = spec["who"] == OURS
    args = grpo_ext.GRPOConfig(**settings) if ours else trl.GRPOConfig(**stock_config(settings, processes=1))
    trainer = (grpo_ext if ours else trl).GRPOTrainer(
        model=model,
        reward_funcs=rollouts.reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in p) for p in rollouts.prompts]}),
        processing_class=_words(vocabulary),
        peft_config=trl.get_peft_config(of_model),
        callbacks=[callback],
    )
    if bitwise(spec):
        trainer._rollouts.worker.engine.generate = rollouts.turns
    elif not shape.samples:
        trainer._generate_single_turn = rollouts.generate
    return trainer, rollouts


class _Server(TrainerCallback):
    """Answers the benchmark: does one optimizer step for each request, says what it took."""

    tokens: Callable[[], float]  # of a step

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.seconds: dict[str, float] = defaultdict(float)
        self.base = 0.0  # MiB of the process with its model loaded
        self.layout: Callable[[], dict[str, Any]] = dict  # form of completions, and how many of them fit in a forward
        self.numerics: dict[str, str] = {}  # of sampling: attention, and the type of the weights

    def time(self, owner: Any, method: str, phase: Callable[[], str | None]) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            name = phase()
            start = _now()
            result = inner(*args, **kwargs)
            if name:
                self.seconds[name] += _now() - start
            return result

        setattr(owner, method, timed)

    def answer(self, content: dict[str, Any]) -> None:
        self.answers.write(json.dumps(content) + "\n")
        self.answers.flush()

    def wait(self) -> None:
        if sys.stdin.readline().strip() != "step":
            os._exit(0)
        self.seconds.clear()
        _reset_peak()
        self.began = _now()

    def report(self, tokens: float) -> None:
        """Answer with the step: `wall` is all of it, and `seconds` its phases, which leave out what is between them."""
        wall = _now() - self.began
        peak = _now_and_peak()[1]
        seconds = {phase: self.seconds[phase] for phase in PHASES}
        seconds["forward/backward"] = max(self.seconds["step"] - self.seconds["prepare"], 0.0)
        memory = {"working_mib": peak - self.base, "peak_mib": peak, **_reserved_peak()}
        self.answer({"wall": wall, "seconds": seconds, "tokens": tokens, **memory, **self.layout(), **self.numerics})

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.wait()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.start = _now()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.seconds["optimizer"] = _now() - self.start

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.report(self.tokens())


def main() -> None:
    """Read the specification from the command line, then serve steps."""
    server = _Server(os.fdopen(os.dup(1), "w"))
    # standard output is for answers: the plan and what libraries print go nowhere
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    quiet_libraries()
    from grpo_ext.forward.architecture import attention_sizes, base_model_of, weight_sizes

    spec = json.loads(sys.argv[1])
    shape, in_use = Shape(**spec["shape"]), _in_use()
    with tempfile.TemporaryDirectory() as folder:
        trainer, rollouts = make_trainer(spec, shape, folder, server)
        server.tokens = _counting(trainer) if shape.whole else lambda: rollouts.tokens
        if not bitwise(spec):  # these are overrides too
            server.time(trainer, "_generate_single_turn", lambda: "rollout")
            scoring = "_get_per_token_logps_and_entropies"
            server.time(trainer, scoring, lambda: None if torch.is_grad_enabled() else "log-probs")
        server.time(trainer, "_prepare_inputs", lambda: "prepare")
        server.time(trainer, "training_step", lambda: "step")
        model = base_model_of(trainer.model)
        (body, head), (width, _) = weight_sizes(model), attention_sizes(model.config)
        adapters = sum(p.numel() for n, p in model.named_parameters() if "lora" in n)
        server.answer({"flops": rollouts.flops(width, body - adapters, head), **in_use})
        if spec["who"] == OURS:
            runner = trainer._step_planner  # cuts a micro-batch that does not fit
            server.layout = lambda: {"form": runner.forwards.choice.form(model), "micro": runner.limits.rows}
        server.base = _now_and_peak()[0]
        if shape.sample:
            _serve_sampling(trainer, server, spec.get("warm_up_tokens"))
        trainer.train()


def _counting(trainer: Any) -> Callable[[], float]:
    """How many tokens were sampled since the last call of what this returns."""
    sampled: list[int] = []
    generate = trainer._generate_single_turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        if len(result[0]) != len(args[0]):  # continuous batching logs its errors, and returns what it has
            raise RuntimeError(f"sampling returned {len(result[0])} of {len(args[0])} completions")
        sampled.append(sum(map(len, result[0])))
        return result

    def count() -> float:
        total = sum(sampled)
        sampled.clear()
        return total

    trainer._generate_single_turn = counted
    return count


def _serve_sampling(trainer: Any, server: _Server, warm_up_tokens: int | None) -> None:
    """Sample the first rollout again and again; ours under another seed each time, as stock TRL does by itself.

    The first time completions have at most `warm_up_tokens`.
    """
    item = next(iter(trainer.get_train_dataloader()))
    sampled = _counting(trainer)
    trainer.model.train()

    def note(model: Any, *_: Any) -> None:
        attention, dtype = model.config._attn_implementation, next(model.parameters()).dtype
        server.numerics = {"attention": attention, "weights": str(dtype).removeprefix("torch.")}

    note(trainer.model)
    if not hasattr(trainer, "_rollouts"):  # stock TRL; continuous batching changes both, the attention only meanwhile
        trainer.model.register_forward_pre_hook(note)
    longest = trainer.generation_config.max_new_tokens
    trainer.generation_config.max_new_tokens = warm_up_tokens or longest
    while True:
        server.wait()
        trainer.args.seed += 1
        trainer._buffered_inputs = None
        if hasattr(trainer, "_rollouts"):  # ours
            trainer._rollouts.current = None
        trainer._prepare_inputs(item)
        server.report(sampled())
        trainer.generation_config.max_new_tokens = longest


if __name__ == "__main__":
    main()
