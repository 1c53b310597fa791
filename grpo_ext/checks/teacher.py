"""Checks of a teacher before it is loaded, and the reward of a run that has a teacher and no reward function.

TRL's GKD trainer asks for the same size of the vocabulary; here the ids of the tokens are compared, and a teacher may
have more. `forward.reference` loads the teacher.
"""

from typing import Any, cast

from accelerate.logging import get_logger
from transformers import AutoTokenizer, ProcessorMixin

from ..config import GRPOConfig
from ..errors import ConfigError, ModelError
from ..forward.snapshot import refuse_replaced_forward
from .model import check_causal_lm, find_model

logger = get_logger(__name__)


def no_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def reward_sources(reward_funcs: Any, environments: Any, teacher: Any) -> Any:
    """The reward functions for TRL's constructor, which needs one and writes to a list of them."""
    if teacher is not None and not (reward_funcs or environments):
        return [no_reward]
    return list(reward_funcs) if isinstance(reward_funcs, list) else reward_funcs


def check_teacher(config: GRPOConfig, policy: Any, teacher: Any, processing_class: Any, rewarded: bool) -> None:
    """Refuse settings and arguments that do not fit together; `rewarded`: there is a reward function or environment."""
    name, load = config.teacher_model, cast(dict[str, Any], config.teacher_model_init_kwargs or {})
    if teacher is None and name is None:
        if config.teacher_kl_coef is not None:
            raise ConfigError(
                f"teacher_kl_coef={config.teacher_kl_coef:g} without a teacher; set teacher_model, or pass a model to "
                "the trainer as teacher_model."
            )
        return
    if teacher is not None and (name is not None or load or isinstance(teacher, str)):
        raise ConfigError(
            "the trainer's argument teacher_model is a model object, and GRPOConfig has teacher_model (a path or id) "
            "and teacher_model_init_kwargs for one that is loaded; use one of the two."
        )
    if config.num_generations == 1 and rewarded:
        raise ConfigError(
            "num_generations=1 with reward functions: the advantage of a completion without others in its group is 0; "
            "use 2 or more, or leave out the reward functions, so that the teacher alone trains."
        )
    if isinstance(processing_class, ProcessorMixin):
        raise ConfigError(
            "a teacher of a model that takes images is not implemented: train without a teacher, or on text with the "
            "model's tokenizer as processing_class."
        )
    if teacher is None:
        assert name is not None
        find_model(name, load)
    else:
        check_causal_lm(teacher)
        parameters = [] if isinstance(policy, str) else policy.parameters()
        if {id(p) for p in teacher.parameters()}.intersection(map(id, parameters)):
            raise ModelError("the teacher shares weights with the policy, and would move with it; pass a copy.")
        if config.rollout_lag:
            refuse_replaced_forward(teacher, by_user=True)
        name = str(teacher.config._name_or_path)
    _check_tokens(name, config, load, processing_class)


def _check_tokens(source: str, config: GRPOConfig, load: dict[str, Any], tokenizer: Any) -> None:
    """Refuse a teacher whose tokenizer lacks a token of the policy's, or has it under another id."""
    try:
        trusted = load.get("trust_remote_code", getattr(config, "trust_remote_code", False))
        theirs = AutoTokenizer.from_pretrained(source, revision=load.get("revision"), trust_remote_code=trusted)
    except (OSError, ValueError):  # none is saved with it
        logger.warning("The teacher comes without a tokenizer, so its token ids are taken to be the policy's.")
        return
    known = theirs.get_vocab()
    others = {token: i for token, i in tokenizer.get_vocab().items() if known.get(token) != i}
    if others:
        token, number = min(others.items(), key=lambda pair: pair[1])
        raise ConfigError(
            f"{len(others)} of {len(tokenizer)} tokens are others in the teacher's tokenizer, the first of them "
            f"{token!r} (id {number}; the teacher's: {known.get(token)}). The teacher scores the token ids that the "
            "policy samples; use a teacher of the same family, with the same vocabulary."
        )
