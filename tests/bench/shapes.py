"""What a step of `make bench` trains on: the reference shapes, and shapes of a text."""

import random
from dataclasses import dataclass
from typing import Any

from grpo_ext.errors import ConfigError

PHASES = ("rollout", "log-probs", "forward/backward", "optimizer")


@dataclass(frozen=True)
class Shape:
    """What one optimizer step trains on."""

    name: str
    prompt: int  # tokens of each prompt
    shortest: int  # tokens of the completions
    longest: int
    skewed: bool = False  # exponential lengths (many short, few long) instead of uniform ones
    groups: int = 4  # prompts per step
    group: int = 8  # completions per prompt
    without_variance: float = 0.0  # share of the groups whose rewards are all equal
    lora: bool = False
    checkpointing: bool = False
    sample: bool = False  # time the sampling of completions instead of training on given ones
    whole: bool = False  # sample, and train on what was sampled
    model: str = "reference"  # name of the model in `MODELS`, where none is asked for
    mean: int | None = None  # of the exponential, where it is not a quarter of the longest

    @property
    def samples(self) -> bool:
        """Whether completions are sampled, and so end where they end."""
        return self.sample or self.whole

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES if self.whole else PHASES[:1] if self.sample else PHASES[1:]

    def lengths(self) -> list[list[int]]:
        """Completion lengths of every group, the same on every call."""
        source, mean = random.Random(f"{self.name}:{self.longest}"), self.mean or self.longest / 4

        def one() -> int:
            if not self.skewed:
                return source.randint(self.shortest, self.longest)
            return min(self.longest, self.shortest + int(source.expovariate(1 / mean)))

        return [[one() for _ in range(self.group)] for _ in range(self.groups)]


REFERENCE = (
    Shape("long prompt", 512, 32, 256),
    Shape("ragged answers", 64, 64, 768, skewed=True),
    Shape("half without variance", 512, 32, 256, without_variance=0.5),
    Shape("short everything", 16, 8, 16),
    Shape("long prompt, LoRA + checkpointing", 512, 32, 256, lora=True, checkpointing=True),
    Shape("rollout, ragged answers", 64, 1, 768, skewed=True, sample=True),
    Shape("real vocabulary, whole step", 40, 1, 45, groups=8, whole=True, model="smollm2-135m"),
)

# a quarter of an hour: half the groups, one phase each, and the micro-batches that were fastest in the long form, of
# stock TRL and of ours
SHORT = {
    Shape("long prompt, 2 groups", 512, 32, 256, groups=2): (2, 8),
    Shape("ragged answers, 2 groups", 64, 64, 768, skewed=True, groups=2): (1, 4),
    Shape("short everything", 16, 8, 16): (32, 32),
    Shape("rollout, ragged answers, 2 groups", 64, 1, 384, skewed=True, groups=2, sample=True): (16, 16),
    Shape("real vocabulary, 2 groups", 40, 1, 45, groups=2, whole=True, model="smollm2-135m"): (8, 16),
}


def decoder(
    kind: str, vocabulary: int, width: int, inner: int, layers: int, heads: int, key_heads: int, positions: int = 4096
) -> dict[str, Any]:
    """The configuration of a language model, for random weights."""
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
    }


MODELS = {
    "reference": decoder("qwen2", 8192, 512, 1280, 8, 8, 8),  # 28 million weights
    "smollm2-135m": decoder("llama", 49152, 576, 1536, 30, 9, 3, positions=8192),
    "qwen2.5-0.5b": decoder("qwen2", 151936, 896, 4864, 24, 14, 2),
}


def parse_shape(text: str) -> Shape:
    """A shape from text like `prompt=512,completions=32-256,group=8,groups=4,skewed,lora,checkpointing,sample`."""
    values: dict[str, Any] = {"name": text}
    kinds = {"prompt": int, "group": int, "groups": int, "without_variance": float, "name": str}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = word.partition("=")
        try:
            if key == "completions":
                low, _, high = value.partition("-")
                values |= {"shortest": int(low), "longest": int(high or low)}
            elif key in ("skewed", "lora", "checkpointing", "sample", "whole") and not value:
                values[key] = True
            else:
                values[key] = kinds[key](value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{word!r} in the shape {text!r} is unknown; use prompt=N, completions=N-N, group=N, groups=N, "
                "without_variance=0.5, name=..., skewed, lora, checkpointing, sample, whole."
            ) from None
    if not {"prompt", "shortest"} <= values.keys():
        raise ConfigError(f"the shape {text!r} needs prompt=N and completions=N-N.")
    return Shape(**values)
