"""Checks of a teacher before it is loaded, and the reward of a run that has a teacher and no reward function.

Differs from TRL's GKD trainer, which compares the sizes of vocabularies: a teacher may have more tokens, and the others
have the same ids.
"""

from typing import Any, cast

from transformers import AutoTokenizer, ProcessorMixin

from ..algorithms.policy_losses import POLICY_LOSSES, check_policy_loss
from ..config import GRPOConfig
from ..errors import ConfigError
from ..forward.snapshot import refuse_replaced_forward
from ..runtime.messages import logger
from ..settings import refuse_excluded
from ..upstream.argument_checks import check_causal_lm, find_model


def no_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def check_teacher(
    config: GRPOConfig, policy: Any, teacher: Any, processing_class: Any, reward_funcs: Any, environments: Any
) -> Any:
    """Refuse what does not fit together. Returns the rewards for TRL, which needs one and writes to a list of them."""
    rewarded = environments is not None or reward_funcs not in (None, [])
    reward_funcs = list(reward_funcs) if isinstance(reward_funcs, list) else reward_funcs
    name, load = config.teacher_model, cast(dict[str, Any], config.teacher_model_init_kwargs or {})
    if teacher is None and name is None:
        if config.teacher_kl_coef is not None or load:
            raise ConfigError(
                f"teacher_kl_coef={config.teacher_kl_coef}, teacher_model_init_kwargs={load} without a teacher; set "
                "teacher_model, or pass a model to the trainer as teacher_model."
            )
        return reward_funcs
    if teacher is None:
        find_model(str(name), load)
    else:
        check_causal_lm(teacher)
    weights = [] if teacher is None or isinstance(policy, str) else [*teacher.parameters(), *policy.parameters()]
    facts = {
        "loaded_teacher": teacher is not None and bool(name or load),
        "shared_weights": len(set(weights)) < len(weights),
        "alone": rewarded and config.num_generations == 1,
        "torch_dtype": "torch_dtype" in load,
        "takes_images": isinstance(processing_class, ProcessorMixin),
    }
    refuse_excluded("teacher_model", "a teacher", facts, "Leave one of the two out.")
    if config.loss_type in POLICY_LOSSES:
        check_policy_loss(config.loss_type, per_token=True)
    if teacher is not None and config.rollout_lag:
        refuse_replaced_forward(teacher, by_user=True)
    _check_tokens(name or str(teacher.config._name_or_path), config, load, processing_class)
    return reward_funcs if rewarded else [no_reward]


def _check_tokens(source: str, config: GRPOConfig, load: dict[str, Any], tokenizer: Any) -> None:
    """Refuse a teacher whose tokenizer lacks a token of the policy's, or has it under another id."""
    try:
        trusted = load.get("trust_remote_code", getattr(config, "trust_remote_code", False))
        theirs = AutoTokenizer.from_pretrained(source, revision=load.get("revision"), trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        why = str(error).split("\n")[0] if source else "the model has no name"
        logger.warning(f"The teacher's token ids are taken to be the policy's; its tokenizer did not load: {why}")
        return
    known = theirs.get_vocab()
    others = {token: i for token, i in tokenizer.get_vocab().items() if known.get(token) != i}
    if others:
        token, number = min(others.items(), key=lambda pair: pair[1])
        raise ConfigError(
            f"{len(others)} of {len(tokenizer)} tokens differ in the teacher's tokenizer, the first of them "
            f"{token!r} (id {number}; the teacher's: {known.get(token)}). The teacher scores the token ids that the "
            "policy samples; use a teacher of the same family, with the same vocabulary."
        )
