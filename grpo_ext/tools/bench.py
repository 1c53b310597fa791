"""`grpo-ext bench`: seconds per optimizer step, ours and stock TRL, interleaved in one process at equal settings.

Both trainers sample, score and train on the same model, data and sizes; the rounds alternate, the first step of a round
is left out as warm-up, and the medians are compared.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Shape:
    """What is trained: a random Qwen2-type model, fixed lengths, no early end.

    Attributes:
        prompt, completion: tokens.
        batch: completions per optimizer step, in groups of `group`.
        micro: completions per forward.
    """

    name: str
    hidden: int
    layers: int
    vocabulary: int
    prompt: int
    completion: int
    batch: int = 32
    group: int = 8
    micro: int = 8


SHAPES = (
    Shape("tiny (0.4M)", hidden=128, layers=2, vocabulary=64, prompt=8, completion=8, batch=64, micro=16),
    Shape("small (5M)", hidden=256, layers=4, vocabulary=4096, prompt=64, completion=32),
)


@dataclass(frozen=True)
class Timing:
    """Median seconds per step of a shape, and how many steps they are medians of."""

    shape: Shape
    ours: float
    stock: float
    steps: int

    @property
    def speed_up(self) -> float:
        """Stock TRL's seconds over ours; above 1 we are faster."""
        return self.stock / self.ours


def _timer() -> Any:
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps.append(time.perf_counter() - self.start)

    return Timer()


def _train(shape: Shape, ours: bool, steps: int, folder: str) -> list[float]:
    """Seconds of each step but the first."""
    import torch
    import trl
    from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM

    import grpo_ext

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    tokenizer, dataset = _words(shape)
    package = grpo_ext if ours else trl
    layout = {"global_batch_size": shape.batch} if ours else {"gradient_accumulation_steps": shape.batch // shape.micro}
    args = package.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=shape.micro,
        num_generations=shape.group,
        max_completion_length=shape.completion,
        max_steps=steps,
        generation_kwargs={"min_new_tokens": shape.completion},
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **layout,
    )
    timer = _timer()
    trainer = package.GRPOTrainer(
        model=Qwen2ForCausalLM(config),
        reward_funcs=lambda completions, **kwargs: [float(hash(c) % 7) for c in completions],
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[timer],
    )
    trainer.remove_callback(PrinterCallback)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return timer.steps[1:]


def _words(shape: Shape) -> tuple[Any, Any]:
    """A tokenizer with one token a word, and prompts of exactly `shape.prompt` words."""
    import random

    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, shape.vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    source = random.Random(0)
    rows = [" ".join(f"w{source.randrange(2, shape.vocabulary)}" for _ in range(shape.prompt)) for _ in range(256)]
    return fast, Dataset.from_dict({"prompt": rows})


def bench(
    shapes: tuple[Shape, ...] = SHAPES,
    rounds: int = 5,
    steps: int = 5,
    progress: Callable[[str], Any] | None = None,
) -> list[Timing]:
    """Time every shape in `rounds` interleaved rounds of `steps` optimizer steps each."""
    timings = []
    for shape in shapes:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        with tempfile.TemporaryDirectory() as folder:
            for number in range(rounds):
                if progress is not None:
                    progress(f"{shape.name}: round {number + 1} of {rounds}")
                for ours in (number % 2 == 0, number % 2 != 0):
                    seconds[ours] += _train(shape, ours, steps, folder)
        ours_median, stock_median = (statistics.median(seconds[key]) for key in (True, False))
        timings.append(Timing(shape, ours_median, stock_median, len(seconds[True])))
    return timings


def as_table(timings: list[Timing]) -> Table:
    """The timings for people."""
    table = Table(title="Seconds per optimizer step (median), sampling and scoring included")
    for name in ("model", "prompt + completion", "completions", "stock TRL", "grpo_ext", "speed-up"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for t in timings:
        s = t.shape
        sizes = (f"{s.prompt} + {s.completion}", f"{s.batch} as {s.micro}s")
        table.add_row(s.name, *sizes, f"{t.stock:.3f}", f"{t.ours:.3f}", f"{t.speed_up:.2f}x")
    return table
