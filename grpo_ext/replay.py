"""What a run replays: which of what sampling recorded is used again in every later forward."""

from __future__ import annotations

from typing import NamedTuple

from .errors import ConfigError


class Replay(NamedTuple):
    """What is recorded while sampling and replayed in every later forward.

    Attributes:
        masks: the tokens that each token was sampled from (`sampling_mask="replay"`).
        experts: the experts of each token (`routing_replay`).
    """

    masks: bool = False
    experts: bool = False

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        settings = ("sampling_mask='replay'", "routing_replay=True")
        return " and ".join(setting for setting, replays in zip(settings, self) if replays)

    def refuse_other_tokens(self, problem: str) -> None:
        """Raise a ConfigError for a forward of tokens without a record, where something is replayed.

        Args:
            problem: where the tokens come from, as a sentence.
        """
        if self:
            raise ConfigError(
                f"{self}: {problem}, and what was recorded of these is not known; pass on the same tensors, or leave "
                "replay out."
            )


NO_REPLAY = Replay()
