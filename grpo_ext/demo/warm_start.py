"""The demo's model and tokenizer, taught a little by a careless teacher whose worked examples are mostly wrong.
Unlike TRL's examples nothing is downloaded: a short supervised run on the CPU, cached under a hash of its recipe.
Stands before the flow: `demo.task` calls `warm_started_model`, the trainer loads the folder like any model."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from .cache import cached_folder

LETTERS = "abcdefgh"
SEPARATOR = ">"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

# Everything that shapes the model; a change of any value, or of the words, makes a new folder in the cache.
RECIPE: dict[str, Any] = {
    "version": 1,
    "seed": 0,
    "letters": LETTERS,
    # Share of correct worked examples by number of letters. Right as a rule only for three letters, so greedy decoding
    # solves little more than those words; for longer ones the right answer is rare but within reach of sampling.
    "right_share": {3: 0.65, 4: 0.2, 5: 0.08},
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "steps": 400,
    "warmup_steps": 20,
    "batch_size": 64,  # worked examples
    "learning_rate": 3e-3,
}


def build_tokenizer(symbols: str = SEPARATOR + LETTERS, positions: int = 64) -> PreTrainedTokenizerFast:
    """One token per character; no token is added to a prompt by itself; padding on the left, as generation needs it."""
    vocabulary = {symbol: i for i, symbol in enumerate([PAD, EOS, UNK, *symbols])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, positions: int = 64) -> LlamaForCausalLM:
    """A Llama of about half a million float32 parameters without dropout; the caller's random state stays as it was."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=RECIPE["hidden_size"],
        intermediate_size=RECIPE["intermediate_size"],
        num_hidden_layers=RECIPE["num_hidden_layers"],
        num_attention_heads=RECIPE["num_attention_heads"],
        num_key_value_heads=RECIPE["num_attention_heads"],
        max_position_embeddings=positions,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def careless_answer(word: str, rng: random.Random) -> str:
    """The teacher's answer: sorted, or (mostly) the letters as they stand or in falling order."""
    if rng.random() < RECIPE["right_share"][len(word)]:
        return "".join(sorted(word))
    return word if rng.random() < 0.5 else "".join(sorted(word, reverse=True))


def _worked_examples(words: list[str], tokenizer: Any, rng: random.Random) -> dict[str, torch.Tensor]:
    """A batch of prompts with careless answers, padded on the left; the loss counts the answer and its end alone."""
    chosen = rng.choices(words, k=RECIPE["batch_size"])
    texts = [word + SEPARATOR + careless_answer(word, rng) + EOS for word in chosen]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    width = batch["input_ids"].shape[1]
    # an answer has as many tokens as its word has letters, and one more for the end
    first_answer_column = torch.tensor([width - len(word) - 1 for word in chosen])[:, None]
    labels = batch["input_ids"].masked_fill(torch.arange(width) < first_answer_column, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def train_warm_start(words: list[str], seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The supervised run over careless answers to `words`."""
    tokenizer = build_tokenizer()
    model, rng = build_model(tokenizer, seed), random.Random(seed)
    return fit(model, lambda: _worked_examples(words, tokenizer, rng), RECIPE["steps"]), tokenizer


def fit(model: LlamaForCausalLM, batch: Callable[[], dict[str, torch.Tensor]], steps: int) -> LlamaForCausalLM:
    """A supervised run: AdamW, linear decay, cross-entropy, a progress bar; the model, for evaluation."""
    threads = torch.get_num_threads()
    # these tensors are too small to split, and on busy cores waiting threads cost ten times more
    torch.set_num_threads(1)
    try:
        return _fit(model.train(), batch, steps)
    finally:
        torch.set_num_threads(threads)


def _fit(model: LlamaForCausalLM, batch: Callable[[], dict[str, torch.Tensor]], steps: int) -> LlamaForCausalLM:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE["learning_rate"], weight_decay=0.0)
    # disable=None: no bar where the output is a file
    bar = tqdm(range(steps), desc="warm start, once, then cached", unit="step", leave=False, disable=None)
    for step in bar:
        for group in optimizer.param_groups:
            rise = min(1.0, (step + 1) / RECIPE["warmup_steps"])
            group["lr"] = RECIPE["learning_rate"] * rise * (1 - step / steps)
        loss = model(**batch()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval()


def recipe_key(words: list[str]) -> str:
    """Twelve hexadecimal digits that change with any value of the recipe and with the words."""
    text = json.dumps([RECIPE, words], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def warm_started_model(words: list[str], cache_dir: Path | None = None) -> Path:
    """The folder of the warm-started model and its tokenizer; built on the first call, found on the next."""
    return built_once(f"demo-{recipe_key(words)}", lambda: train_warm_start(words, RECIPE["seed"]), cache_dir)


def built_once(name: str, build: Callable[[], tuple[Any, Any]], cache_dir: Path | None = None) -> Path:
    """The folder `name` of the cache, with the model and the tokenizer that `build` returns where there is none yet."""

    def make(folder: Path) -> None:
        model, tokenizer = build()
        _save_quietly(model, tokenizer, folder)

    return cached_folder(name, make, cache_dir)


def _save_quietly(model: Any, tokenizer: Any, folder: Path) -> None:
    """save_pretrained without its own progress bar, which says nothing about a model of two megabytes."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
