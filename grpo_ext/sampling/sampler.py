"""A sampler: what samples the completions of a rollout batch, as a value that says what it can do.

Differs from TRL, which asks its settings (`use_vllm`, `rollout_func`, ...) wherever it matters. `sampler_of` asks them
here, when a rollout batch begins; checks before training, replay, the lag, bitwise mode and the log read the answers.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from ..batching.sizes import ChunkSizes
from ..settings import truncating
from ..view import TrainerView
from . import keyed
from .by_user import UserRollouts, UserTurns
from .decoding import end_tokens
from .engine import Engine
from .equal_shares import why_equal
from .keyed import filter_values, not_replayed, own_generate, setting_of, suppressed_tokens
from .turn import Context, Turn
from .vllm import other_scores, vllm_filters

_COVERS = "{} may sample in its own way; only the update is covered"
_OTHER_STATES = (
    ". A resumed run continues with the completions of its checkpoint, and with the random numbers of Python, NumPy "
    "and torch where it has as many processes; other random states that rollout_func uses are not restored"
)
_UNSEEDED = (
    "vllm_seeds=False: completions depend on the split and on what was sampled before, and a resumed run samples "
    "others; only the update is covered"
)
_ROUNDED = "vLLM's rounding depends on its batches, so now and then a completion differs"
_LOGPS = "vllm_importance_sampling_correction=True compares them with the trainer's; return them, or set it to False"


@dataclass(frozen=True, kw_only=True)
class Sampler:
    engine: Engine
    config: GenerationConfig | None = None  # transformers', with all that ends a row; None: it is not transformers
    ends: frozenset[int]  # a completion known only by its ids is truncated unless it ends in one of these tokens
    filters: Mapping[str, Any]  # that leave out tokens, with their settings
    # what runs instead of vLLM and this trainer's own sampling, which have the same bits in every split and can run on
    # copies of the weights
    other: str | None
    uncovered: str | None  # how completions may depend on the split, as a clause; None: they do not
    returns: frozenset[str]  # "masks", "experts", "logps": what it records of each token
    # settings by which it samples from other scores than those that training uses; masks do not describe transformers'
    changed: Sequence[str] = ()
    several: tuple[str, Any] = ("", None)  # the setting that makes several rows of a prompt, and its value
    stop_strings: Any = None
    pads: bool = True  # prompts are padded, and cut into chunks; else it batches by itself
    steps: bool = True  # all rows of a call are decoded step by step
    context: int | None = None  # tokens of a prompt and its completion that fit; None: the model says
    by_user: str | None = None  # the user's own function
    inner: "Sampler | None" = None  # which that function may call
    whole: bool = False  # it makes whole completions from prompts, not turns from tokens

    @property
    def turns(self) -> "Sampler":
        """What samples later turns, and in a `rollout_func` for its calls of the trainer's `generate`."""
        return (self.whole and self.inner) or self

    @property
    def own(self) -> "Sampler":
        """This package's."""
        return self if self.inner is None else self.inner.own

    def sample(self, rows: Sequence[Context], sizes: ChunkSizes) -> list[Turn]:
        return self.engine.generate(rows, self.config, sizes)


def sampler_of(view: TrainerView, engine: Any) -> Sampler:
    """What samples now; `engine` is this package's."""
    # not `use_vllm`, which a user may have changed: that is refused by name
    sampler = _of_transformers(view, engine) if view.vllm_generation is None else _of_vllm(view, engine)
    hook, name = view.override_of("_generate_single_turn"), view.overridden("_generate_single_turn")
    if hook is not None:
        sampler = replace(
            sampler,
            engine=UserTurns(hook, view.accelerator, view.sharded),
            inner=sampler,
            by_user=name,
            other=name,
            uncovered=_COVERS.format(name),
            returns=sampler.returns - {"experts"},
        )
    if view.rollout_func is None:
        return sampler
    unequal = why_equal(view.args, view.sharded, rollout_func=True)
    needs_logps = _LOGPS if view.corrects_sampling else None
    return replace(
        sampler,
        engine=UserRollouts(view.call_rollout_func, unequal, needs_logps, view.args.replay.masks, why_one_row(view)),
        inner=sampler,
        whole=True,
        by_user="rollout_func",
        other="rollout_func",
        uncovered=_COVERS.format("rollout_func") + _OTHER_STATES,
        returns=sampler.returns - {"experts"} | {"masks"},
        changed=sampler.changed if view.use_vllm else (),
    )


def why_one_row(view: TrainerView) -> str | None:
    """Why each rollout of a `rollout_func` has one row, as a clause; None where it may have several."""
    names = "compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies", "_generate_and_score_completions"
    if (name := view.overridden(*names)) is not None:
        return f"{name} is overridden: TRL's dictionary, which it is given, has one row for each completion"
    if view.takes_images:
        return f"{type(view.policy).__name__} takes images, which belong to the one row of a completion"
    if view.tools:
        return "tools append to a completion's only row; call them inside rollout_func instead"
    return None


def suppressed_in(view: TrainerView) -> list[torch.Tensor]:
    """The sets of ids that are suppressed, where this trainer's own sampling records masks to replay."""
    if view.vllm_generation is not None or not view.args.replay.masks:
        return []
    return suppressed_tokens(view.policy, view.generation_config, _ends_of(view))


def _ends_of(view: TrainerView) -> list[int]:
    return list(dict.fromkeys([*view.eos_token_ids, *end_tokens(view.generation_config)]))


def _of_transformers(view: TrainerView, engine: Engine) -> Sampler:
    policy, continuous = view.policy, view.use_transformers_continuous_batching
    config = copy.deepcopy(view.generation_config)
    ends = config.eos_token_id = _ends_of(view)
    config.stop_strings = setting_of(policy, config, "stop_strings") or None  # the model's own too
    not_keyed = None if continuous else keyed.why_not_by_key(policy, view.generation_config)
    not_keyed = "transformers' continuous batching" if continuous else not_keyed
    settings = not_replayed(policy, view.generation_config, view.temperature)
    changed, name = [text for text, applies in settings.items() if applies], "num_return_sequences"
    return Sampler(
        engine=engine,
        config=config,
        ends=frozenset((*ends, view.tokenizer.pad_token_id)),
        filters=truncating(filter_values(policy, view.generation_config)),
        steps=not continuous,
        other=not_keyed,
        uncovered=not_keyed and f"{not_keyed}: completions are not sampled by key; only the update is covered",
        returns=frozenset({"masks", "experts"} if not_keyed is None else ()),
        changed=changed,
        several=(name, setting_of(policy, view.generation_config, name)),
        stop_strings=None if own_generate(policy) else config.stop_strings,
    )


def _of_vllm(view: TrainerView, engine: Any) -> Sampler:
    args = view.args
    uncovered = None if args.bitwise_invariant else _ROUNDED
    further = view.generation_settings.get("stop_token_ids") or []
    return Sampler(
        engine=engine,
        ends=frozenset((*view.eos_token_ids, *further, view.tokenizer.pad_token_id)),
        filters=vllm_filters(args),
        other=None,
        uncovered=uncovered if args.vllm_seeds else _UNSEEDED,
        returns=frozenset({"masks", "logps", *(["experts"] if engine.routers else [])}),
        changed=other_scores(args),
        several=("n", view.generation_settings.get("n")),
        pads=False,
        steps=False,
        context=view.vllm_generation.llm.llm_engine.model_config.max_model_len
        if view.vllm_mode == "colocate"
        else None,
    )
