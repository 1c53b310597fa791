"""Rotary positions that depend on the length of a forward: one length for a whole run, or a refusal; never silence."""

from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_ext.checks import data as checks
from grpo_ext.errors import DataError, SplitDependentError
from grpo_ext.forward.rope import covered_length
from tests.support.selection import few_of
from tests.support.tiny import prompts, tiny_model
from tests.support.trainers import change, error, far
from tests.tolerances import DIFFERENT, UPDATE

SWITCH = 16  # tokens; prompts have 3 to 10 here, completions up to 12
_THETA = {"rope_theta": 1e4}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **_THETA}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": SWITCH,
    **_THETA,
}
_MIXED = {"sliding_attention": {"rope_type": "default", **_THETA}, "full_attention": _DYNAMIC}
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {"kind": "phi3", "original_max_position_embeddings": SWITCH, "rope_parameters": _LONG},
    "dynamic": {"kind": "qwen2", "max_position_embeddings": SWITCH, "rope_parameters": _DYNAMIC},
    "per_layer_type": {
        **{"kind": "gemma3_text", "max_position_embeddings": SWITCH, "head_dim": 8, "rope_parameters": _MIXED},
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
PHIMOE = {
    **{"kind": "phimoe", "num_local_experts": 2, "router_jitter_noise": 0.0},
    "rope_parameters": {**_LONG, "short_mscale": 1.0, "long_mscale": 1.3},
}


def of_kind(kind: str, **changes: Any) -> Any:
    return tiny_model(**{**KINDS[kind], **changes})


def make(folder, model, data=None, **settings):
    return far(folder, model, 0.1, data=data, **settings)


def update(folder, kind, size, **settings) -> torch.Tensor:
    return change(make(folder, of_kind(kind), per_device_train_batch_size=size, **settings))


# the full attention of "per_layer_type" is dynamic
@pytest.mark.parametrize("kind", few_of(KINDS, ("longrope",)))
def test_the_update_does_not_depend_on_the_length_of_a_forward(tmp_path, kind):
    whole, rows = (update(tmp_path, kind, size, beta=0.05, max_steps=2) for size in (16, 3))
    assert error(whole, rows) <= UPDATE


def test_left_alone_the_update_would_depend_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "fix_rope_frequencies", lambda models, longest: None)
    # padded: before its first pack a model is compared in both forms, which notices some of these
    whole, rows = (update(tmp_path, "longrope", size, forward="padded") for size in (16, 1))
    assert error(whole, rows) > DIFFERENT


def logits_while_sampling(model: Any, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of `new` tokens as they are decoded with a cache, and of one forward over all of them."""
    model.eval()
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)
        whole = model(found.sequences).logits[:, ids.size(1) - 1 : -1]
    return torch.stack(found.logits, dim=1), whole


@pytest.mark.parametrize("kind", ["dynamic", "per_layer_type"])
def test_sampling_scores_what_training_scores(tmp_path, kind):
    ids = torch.randint(3, 30, (2, 8), generator=torch.Generator().manual_seed(0))
    trainer = make(tmp_path, of_kind(kind))
    sampled, scored = logits_while_sampling(trainer.model, ids, 12)  # up to 20 tokens, over the switch
    assert torch.allclose(sampled, scored, atol=1e-4)
    sampled, scored = logits_while_sampling(of_kind(kind), ids, 12)
    assert not torch.allclose(sampled, scored, atol=1e-2)


@pytest.mark.parametrize("kind", ["stream", "no limit"])
def test_a_run_whose_lengths_are_not_known_is_refused(tmp_path, kind):
    rows, settings = prompts(), {}
    if kind == "stream":
        rows = rows.to_iterable_dataset()
    else:
        settings["max_completion_length"] = None
    with pytest.raises(SplitDependentError, match=r"longrope\) depend on .* is not known .* use a data set"):
        make(tmp_path, of_kind("longrope"), rows, **settings)
    make(tmp_path, of_kind("longrope"), rows, allow_split_dependent=True, **settings)
    make(tmp_path, tiny_model(), rows, **settings)  # nothing to know there


def test_what_cannot_be_set_is_refused_where_the_run_reaches_it(tmp_path):
    with pytest.raises(SplitDependentError, match=r"Phimoe.* reach 22 tokens, beyond where they change"):
        make(tmp_path, tiny_model(**PHIMOE))
    make(tmp_path, tiny_model(**PHIMOE), max_completion_length=SWITCH - 10)


def test_prompts_may_be_as_long_as_the_scaling_covers(tmp_path):
    scaled = {"rope_type": "yarn", "factor": 4.0, **_THETA}
    model, short = tiny_model("llama", rope_parameters=scaled), ["ab"] * 3
    assert covered_length(model.config) == 512
    make(tmp_path, model, Dataset.from_dict({"prompt": [*short, "a" * 500]}))
    with pytest.raises(DataError, match=r"row 3 has 513 tokens, .* room for 512"):
        make(tmp_path, model, Dataset.from_dict({"prompt": [*short, "a" * 513]}))
    with pytest.raises(DataError, match=r"row 3 has 500 tokens, .* room for 128"):
        make(tmp_path, tiny_model("llama"), Dataset.from_dict({"prompt": [*short, "a" * 500]}))
    linear = {**_MIXED, "full_attention": {"rope_type": "linear", "factor": 8.0, **_THETA}}
    assert covered_length(of_kind("per_layer_type", rope_parameters=linear).config) == 8 * SWITCH
    assert covered_length(of_kind("dynamic").config) is None
    assert covered_length(of_kind("longrope").config) == 128
    make(tmp_path, of_kind("dynamic"), Dataset.from_dict({"prompt": [*short, "a" * 500]}))
