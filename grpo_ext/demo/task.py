"""The demo problem: put three to five letters in order, "dbca>" -> "abcd"; a program verifies the answers.

Unlike in TRL's examples nothing is downloaded: a short supervised run on the CPU makes the model, which is then cached.
Its teacher is careless, so that there is something to learn. Held-out words are never trained.
"""

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..errors import ConfigError
from ..loading import load_named
from . import EMBEDDED

DATA_SEED = 0
WARM_START_WORDS = 8192
TRAIN_PROMPTS = 4096
EVAL_PROMPTS = 256
LENGTH_SHARE = {3: 0.30, 4: 0.32, 5: 0.38}  # number of letters: share of the words
MAX_COMPLETION_LENGTH = 8  # tokens; the longest answer is five letters and the end token

LETTERS = "abcdefgh"
SEPARATOR = ">"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

VERSION = 2  # part of the cached folder's name; raise it when a value here or the words change
SEED = 0
# Share of correct worked examples by number of letters. Most are correct for three letters only, so greedy decoding
# solves little more than those words; for longer words the right answer is rare, but sampling finds it.
RIGHT_SHARE = {3: 0.65, 4: 0.2, 5: 0.08}
STEPS = 400
WARMUP_STEPS = 20
BATCH_SIZE = 64  # worked examples
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class DemoTask:
    """The arguments of a trainer: a model with its tokenizer, data with `prompt` and `answer`, reward functions."""

    about: str  # the problem and the initial weights
    model_path: Path | str  # folder or id
    train_dataset: Dataset
    eval_dataset: Dataset
    reward_funcs: list[Callable[..., Any]]  # the first returns 1.0 for right answers


@dataclass(frozen=True)
class Demo:
    # makes or downloads the model once, or takes the id or folder of another model
    load: Callable[[str | None], DemoTask]
    settings: Mapping[str, Any]  # known before anything is loaded: fields of `GRPOConfig`, and `rewards` by name


def sorted_letters_reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 1.0 if the completion is the answer, letter for letter, else 0.0."""
    return [float(completion == gold) for completion, gold in zip(completions, answer, strict=True)]


def _words(rng: random.Random) -> Iterator[str]:
    """An endless stream of words; short ones repeat, since there are only a few hundred of them."""
    while True:
        length = rng.choices(list(LENGTH_SHARE), list(LENGTH_SHARE.values()))[0]
        yield "".join(rng.sample(LETTERS, length))


def demo_words() -> tuple[list[str], list[str], list[str]]:
    """Return (warm start, train, held out) words, the same on every machine; no held-out word is in the other two."""
    words = _words(random.Random(DATA_SEED))
    held_out: dict[str, None] = {}
    while len(held_out) < EVAL_PROMPTS:
        held_out[next(words)] = None
    others = (word for word in words if word not in held_out)
    warm_start, train = (list(islice(others, count)) for count in (WARM_START_WORDS, TRAIN_PROMPTS))
    return warm_start, train, list(held_out)


def _dataset(words: list[str]) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [word + SEPARATOR for word in words], "answer": ["".join(sorted(word)) for word in words]}
    )


def load_demo() -> DemoTask:
    """Load the demo; the first call builds the model (seconds) and caches it."""
    warm_start, train, held_out = demo_words()
    return DemoTask(
        about='put letters in order ("dbca>" -> "abcd"); a tiny model, warm-started by a careless teacher',
        model_path=built_once(f"demo-{VERSION}", lambda: train_warm_start(warm_start)),
        train_dataset=_dataset(train),
        eval_dataset=_dataset(held_out),
        reward_funcs=[sorted_letters_reward],
    )


def demo_config_defaults() -> dict[str, Any]:
    """Keyword arguments of `grpo_ext.GRPOConfig` for the demo run: 16 prompts of 8 completions per step."""
    return {
        "max_steps": 150,
        "global_batch_size": 128,  # completions, over all processes
        "per_device_train_batch_size": 128,  # completions, per device; any other number learns the same
        "num_generations": 8,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "linear",
        # Adam's first updates have full size whatever the gradient; without a warm-up they can undo the warm start
        "warmup_steps": 10,
        # larger than the rounding noise of a gradient element: Adam's default of 1e-8 moves such an element by a whole
        # learning rate, and in float32 the split then shows
        "adam_epsilon": 1e-6,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 5,
        "ddp_find_unused_parameters": False,
    }


def demo_named(name: str) -> Demo:
    """The embedded demo, or the `Demo` in a file, `path/to/file.py:name`; a ConfigError if there is none."""
    if name == EMBEDDED:
        reward = f"{__name__}.{sorted_letters_reward.__name__}"
        return Demo(lambda model: load_demo(), {**demo_config_defaults(), "rewards": [reward], "demo": EMBEDDED})
    if ".py:" not in name:
        raise ConfigError(
            f"--demo {name} is not a demo; use {EMBEDDED}, or path/to/file.py:name of a Demo. recipes/grpo.py also "
            "takes sums and last_word."
        )
    return load_named(name, f"--demo {name}", Demo)


def build_tokenizer(symbols: str = SEPARATOR + LETTERS, positions: int = 64) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, no automatic special tokens, and padding on the left."""
    vocabulary = {symbol: i for i, symbol in enumerate([PAD, EOS, UNK, *symbols])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
    layout = {"padding_side": "left", "model_max_length": positions, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special, **layout)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, positions: int = 64) -> LlamaForCausalLM:
    """Build a Llama of about half a million float32 parameters without dropout; keeps the caller's random state."""
    shape: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    ends: Any = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=positions, **shape, **ends)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def careless_answer(word: str, rng: random.Random) -> str:
    """The teacher's answer: the sorted letters, or (mostly) the letters as they are or in descending order."""
    if rng.random() < RIGHT_SHARE[len(word)]:
        return "".join(sorted(word))
    return word if rng.random() < 0.5 else "".join(sorted(word, reverse=True))


def _worked_examples(words: list[str], tokenizer: Any, rng: random.Random) -> dict[str, torch.Tensor]:
    """A batch of prompts with careless answers, padded on the left; only the answer and its end are in the loss."""
    chosen = rng.choices(words, k=BATCH_SIZE)
    texts = [word + SEPARATOR + careless_answer(word, rng) + EOS for word in chosen]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    width = batch["input_ids"].shape[1]
    # an answer has one token per letter of its word, and one for the end
    first_answer_column = torch.tensor([width - len(word) - 1 for word in chosen])[:, None]
    labels = batch["input_ids"].masked_fill(torch.arange(width) < first_answer_column, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def train_warm_start(words: list[str]) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    tokenizer = build_tokenizer()
    model, rng = build_model(tokenizer, SEED), random.Random(SEED)
    return fit(model, lambda: _worked_examples(words, tokenizer, rng), STEPS), tokenizer


def fit(model: LlamaForCausalLM, batch: Callable[[], dict[str, torch.Tensor]], steps: int) -> LlamaForCausalLM:
    """Train with AdamW, linear decay, cross-entropy and a progress bar; returns the model in evaluation mode."""
    threads = torch.get_num_threads()
    # the tensors are too small to split, and on busy cores waiting threads make it ten times slower
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    # disable=None: no bar if the output is a file
    for step in tqdm(range(steps), desc="warm start, once, then cached", unit="step", leave=False, disable=None):
        for group in optimizer.param_groups:
            rise = min(1.0, (step + 1) / WARMUP_STEPS)
            group["lr"] = LEARNING_RATE * rise * (1 - step / steps)
        loss = model(**batch()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.set_num_threads(threads)
    return model.eval()


def cache_folder() -> Path:
    """Return `$GRPO_EXT_CACHE`, or `~/.cache/grpo_ext`."""
    return Path(os.environ.get("GRPO_EXT_CACHE") or "~/.cache/grpo_ext").expanduser()


def built_once(name: str, build: Callable[[], tuple[Any, Any]]) -> Path:
    """Return the folder `name` in the cache; the first call saves the model and tokenizer that `build` returns there.

    The folder is complete or absent at any time.
    """
    cache = cache_folder()
    if (cache / name).is_dir():  # before the lock: a filled cache may be read-only
        return cache / name
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if not (cache / name).is_dir():
            with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as temporary:
                folder = Path(temporary) / name
                for part in build():
                    part.save_pretrained(folder)
                folder.rename(cache / name)
    return cache / name
