"""Environments: chooses the instance that a completion acts in, and adds to its prompt what `reset` returns.

Differs from TRL: `reset` has a time limit, and an environment with a call that never returned is not used again.
Called where a rollout begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import DataError, RolloutError, did_you_mean
from ..rewards.guard import CallTimeout, in_time
from .transcript import Messages, Transcript

Factories = Mapping[str | None, Callable[[], Any]]
Pools = dict[str | None, list[Any]]


class Environments:
    """The environments of a run.

    Args:
        factories: by name; a single factory has the name None. None: a run without environments. Where there are
            several, the column `environment` of a row chooses one, and `reset` does not get that column.
        pools: instances to reuse, by name; None: no instances yet.
        retired: instances that are no longer used, by `id`; kept alive so that an `id` is not reused.
    """

    def __init__(
        self, factories: Factories | None = None, pools: Pools | None = None, retired: dict[int, Any] | None = None
    ) -> None:
        self.factories = dict(factories or {})
        self.several = None not in self.factories
        self.pools: Pools = {} if pools is None else pools
        self.retired: dict[int, Any] = {} if retired is None else retired

    def begin(self, transcripts: Sequence[Transcript], seconds: float | None = None) -> None:
        """Give each transcript its environment, after a reset, and its prompt with the observation.

        Without environments the prompt is the row's. With environments a row need not have a prompt.

        Raises:
            DataError: a row names an unknown environment.
            RolloutError: a `reset` raised, took more than `seconds`, or returned what cannot be added to a prompt.
        """
        if not self.factories:
            for t in transcripts:
                t.prompt = t.row["prompt"]
            return
        in_use: Counter[str | None] = Counter()
        for t in transcripts:
            t.prompt = t.row.get("prompt", [{"role": "user", "content": ""}])
            t.environment_name = t.row.get("environment") if self.several else None
            _check_name(t.environment_name, self.factories)
            pool = self.pools.setdefault(t.environment_name, [])
            if in_use[t.environment_name] == len(pool):
                pool.append(self.factories[t.environment_name]())
            t.environment = pool[in_use[t.environment_name]]
            in_use[t.environment_name] += 1
        for t in transcripts:
            columns = {name: value for name, value in t.row.items() if not (self.several and name == "environment")}
            try:
                observation = in_time(partial(t.environment.reset, **columns), seconds, "tool_timeout")
                t.prompt = _with_observation(t.prompt, observation)
            except Exception as error:
                cause = str(error) if isinstance(error, CallTimeout) else f"{type(error).__name__}: {error}"
                raise RolloutError(
                    f"`reset` of environment {type(t.environment).__name__}: {cause}; a rollout needs what `reset` "
                    "returns: a text, a list of content parts, or None."
                ) from error

    def uses(self, environment: Any) -> bool:
        return id(environment) not in self.retired

    def retire(self, environment: Any) -> None:
        """Stop using an environment whose call hangs: its thread may still change it. Its reward is None."""
        self.retired[id(environment)] = environment
        for pool in self.pools.values():
            pool[:] = filter(self.uses, pool)


def check_names(datasets: Sequence[Any], factories: Any) -> None:
    for dataset in datasets if isinstance(factories, dict) else ():
        for name in set(dataset["environment"]) if "environment" in dataset.column_names else {None}:
            _check_name(name, factories)


def _check_name(name: str | None, factories: Mapping[str | None, Any]) -> None:
    if name not in factories:
        names = [str(known) for known in factories]
        remedy = did_you_mean(str(name), names, f"it makes {', '.join(map(repr, names))}.")
        raise DataError(
            f"a row has environment={name!r}, by its column 'environment', which environment_factory does not make; "
            f"{remedy}"
        )


def _with_observation(prompt: Messages, observation: str | list[Any] | None) -> Messages:
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
