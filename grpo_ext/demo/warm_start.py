"""The demo's model and tokenizer, taught a little by a careless teacher whose worked examples are mostly wrong.

Unlike in TRL's examples nothing is downloaded: a short supervised run on the CPU makes the model, which is then cached.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
SEPARATOR = ">"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

VERSION = 2  # part of the cached folder's name; raise it when a value below or the words change
SEED = 0
# Share of correct worked examples by number of letters. Most are correct for three letters only, so greedy decoding
# solves little more than those words; for longer words the right answer is rare, but sampling finds it.
RIGHT_SHARE = {3: 0.65, 4: 0.2, 5: 0.08}
STEPS = 400
WARMUP_STEPS = 20
BATCH_SIZE = 64  # worked examples
LEARNING_RATE = 3e-3


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
    """Train a model on careless answers to `words`, and return it with its tokenizer."""
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


def built_once(name: str, build: Callable[[], tuple[Any, Any]]) -> Path:
    """Return the folder `name` in the cache; the first call saves the model and tokenizer that `build` returns there.

    The cache is `$GRPO_EXT_CACHE`, or `~/.cache/grpo_ext`. The folder is complete or absent at any time.
    """
    cache = Path(os.environ.get("GRPO_EXT_CACHE") or "~/.cache/grpo_ext").expanduser()
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
