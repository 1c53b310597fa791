"""What a run replays: the records of sampling that every later forward uses."""

from __future__ import annotations

from typing import NamedTuple

from .errors import ConfigError


class Replay(NamedTuple):
    """What is recorded while sampling and replayed in every later forward."""

    masks: bool = False  # the tokens that each token was sampled from (`sampling_mask="replay"`)
    experts: bool = False  # the experts of each token (`routing_replay`)

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        settings = ("sampling_mask='replay'", "routing_replay=True")
        return " and ".join(setting for setting, replays in zip(settings, self) if replays)

    def refuse_other_tokens(self, problem: str) -> None:
        """Raise a ConfigError for a forward of tokens without a record; `problem`: a clause about these tokens."""
        if self:
            raise ConfigError(
                f"{self}: {problem}, and there is no record of these; pass on the same tensors, or turn replay off."
            )


NO_REPLAY = Replay()
