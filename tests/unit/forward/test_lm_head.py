"""The language-model head: the logits of every model of transformers, and the forward that is installed."""

import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch._subclasses import FakeTensorMode
from transformers.models.auto import modeling_auto

from grpo_ext.errors import ModelError
from grpo_ext.forward import lm_head
from grpo_ext.forward.lm_head import TARGETS, Targets, install, refuse_unknown_head
from grpo_ext.forward.tiled_log_probs import LogitTransform
from grpo_ext.runtime.determinism import pinned
from tests.support.tiny import tiny_model

TEMPERATURE = 0.9


ODD = {
    "final_logit_softcapping": 1.5,
    "logits_soft_cap": 1.5,
    "output_logit_soft_cap": 1.5,
    "logit_scale": 0.7,
    "output_multiplier": 0.6,
    "lm_head_multiplier": 0.8,
    "logits_scaling": 1.7,
    "logits_mup_width_multiplier": 1.7,
    "unpadded_vocab_size": 50,
}
SMALL: dict[str, Any] = {"num_hidden_layers": 2}
FILLED = {  # what some configurations need that their defaults leave out
    "head_dim": 8,
    "num_kv_shared_layers": 0,
    "num_key_value_heads": 1,
    "n_routed_experts": 4,
    "layer_types": ["full_attention"] * 2,
}
NOT_BUILT = {  # by the reason
    "audio codebooks, one head each": ("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"),
    "predicts several tokens at once": ("ProphetNetForCausalLM",),
    "robot actions, no tokens": ("PI0ForConditionalGeneration",),
    "diffusion, no next token": ("DiffusionGemmaForBlockDiffusion",),
    "drafts for another model": ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    "needs timm": tuple(f"{name}ForConditionalGeneration" for name in ("FastVlm", "PerceptionLM", "Gemma3n")),
    "default configuration not valid": (
        *("CohereCompassForCausalLM", "DbrxForCausalLM", "Dots1ForCausalLM", "ChameleonForConditionalGeneration"),
        *("AyaVisionForConditionalGeneration", "CohereCompassForConditionalGeneration"),
        *("DeepseekOcr2ForConditionalGeneration", "Emu3ForConditionalGeneration"),
        *("Granite4VisionForConditionalGeneration", "Qwen4ExpForConditionalGeneration"),
    ),
}


class _Hidden(dict):
    """What a backbone returns: hidden states, and None for all else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__(last_hidden_state=hidden)
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return () if isinstance(key, slice) else self.last_hidden_state if key in (0, "last_hidden_state") else None


def odd_config(config: Any) -> Any:
    """A copy in which every number with a fraction is another, so that none is neutral."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, float):
            setattr(text, name, value * 0.9)
    for name, value in ODD.items():
        if name in vars(text):
            setattr(text, name, value)
    return config


def headed(cls: Any, hidden: torch.Tensor, vocabulary: int) -> Any:
    """A model of a class whose backbone returns `hidden` and whose head is small; the rest has no memory."""
    tried: list[Exception] = []
    for settings in (SMALL, {}, SMALL | FILLED):
        try:
            config = odd_config(cls.config_class(**settings))
            if "is_decoder" in vars(config):
                config.is_decoder = True
            with torch.device("meta"):
                model = cls(config)
            break
        except Exception as error:  # a default configuration need not be a valid one
            tried.append(error)
    else:
        raise tried[0]
    refuse_unknown_head(model)
    backbone, head = lm_head._backbone(model), model.get_output_embeddings()
    for part in (backbone, *(m for name, m in backbone.named_children() if name in ("decoder", "text_model"))):
        part.forward = lambda *args, **kwargs: _Hidden(hidden)
    small = torch.nn.Linear(hidden.size(-1), vocabulary, bias=getattr(head, "bias", None) is not None)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is head:
            model.set_submodule(name, small)
    assert model.get_output_embeddings() is small
    return model


def outcome(name: str) -> str:
    """How the head serves a class of transformers: "right", "refused", or what is wrong."""
    hidden, ids = torch.randn(1, 5, 16), torch.randint(0, 49, (1, 5))
    try:
        model = headed(getattr(transformers, name), hidden, 60)
    except ModelError:
        return "refused"
    except Exception as error:
        return f"could not be built: {type(error).__name__} {str(error)[:80]}"
    with torch.no_grad():
        theirs = (model(input_ids=ids, use_cache=False).logits[0].float() / TEMPERATURE).log_softmax(-1)
        install(model, TEMPERATURE)
        ours = model(input_ids=ids, **{TARGETS: Targets(predictor_S=torch.arange(5), tokens_S=ids[0])})[0]
    error = (theirs.gather(1, ids.T)[:, 0] - ours).abs().max()
    transformed = lm_head.logit_transform(model.config) != LogitTransform()
    return ("right, transformed" if transformed else "right") if error < 1e-4 else f"off by {error:.1e}"


TRANSFORMED = {
    *("Gemma2ForCausalLM", "CohereForCausalLM", "GraniteForCausalLM", "FalconH1ForCausalLM"),
    *("HyperCLOVAXForCausalLM", "MiniCPM3ForCausalLM", "MuseSparkForConditionalGeneration"),
}


def test_the_logits_are_those_of_models_that_transform_them():
    torch.manual_seed(0)
    assert {outcome(name) for name in TRANSFORMED} == {"right, transformed"}
    assert {outcome(name) for name in ("Qwen2ForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel")} == {"right"}
    assert outcome("BertLMHeadModel") == "refused"


@pytest.mark.full
def test_the_logits_are_those_of_every_model_that_transformers_has():
    """Derived from the installed transformers: a model whose logits the head does not know fails here by name."""
    torch.manual_seed(0)
    both = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    values = [value for mapping in both for value in mapping.values()]
    names = {name for value in values for name in ((value,) if isinstance(value, str) else value)}
    outcomes = {name: outcome(name) for name in sorted(names.difference(*NOT_BUILT.values()))}
    wrong = {name: what for name, what in outcomes.items() if not what.startswith(("right", "refused"))}
    assert wrong == {}
    assert {name for name, what in outcomes.items() if what == "right, transformed"} >= TRANSFORMED
    assert outcomes["BertLMHeadModel"] == "refused"


def test_casting_the_head_to_float32_leaves_autocast():
    model = tiny_model("qwen2")
    install(model, TEMPERATURE, cast_to_fp32=True)
    ids = torch.randint(3, 50, (1, 9))
    targets = Targets(predictor_S=torch.arange(8), tokens_S=ids[0, 1:])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours = model(ids, **{TARGETS: targets})[0]
        hidden = model.model(ids).last_hidden_state[0, :-1].float()
    with torch.no_grad():
        logps = (model.lm_head(hidden) / TEMPERATURE).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert (ours - logps).abs().max() < 1e-5
    install(model, TEMPERATURE)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert (model(ids, **{TARGETS: targets})[0] - logps).abs().max() > 1e-4


@pytest.mark.parametrize(("deterministic", "head"), [(False, "Triton"), (True, "tiled")])
def test_bitwise_mode_does_not_use_trls_kernel(monkeypatch, deterministic, head):
    """On tensors that say they are on a CUDA device; both heads are stand-ins."""
    monkeypatch.setattr(lm_head, "triton_head", lambda: lambda *arguments: ("Triton", None, None))
    monkeypatch.setattr(lm_head.TiledLogProbs, "apply", lambda *arguments: ("tiled", None))
    with FakeTensorMode(), pinned(1 if deterministic else None):
        hidden, weight = torch.empty(3, 4, device="cuda"), torch.empty(9, 4, device="cuda")
        targets = torch.empty(3, device="cuda", dtype=torch.long)
        assert lm_head.log_probs(hidden, weight, None, targets, LogitTransform())[0] == head


def test_a_head_of_several_layers_and_an_adapter_on_it_are_refused():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertLMHeadModel(transformers.BertConfig(vocab_size=60, is_decoder=True, **sizes))
    with pytest.raises(ModelError, match=r"BertLMHeadModel has more than a linear layer .*cls\.predictions\.transform"):
        refuse_unknown_head(model)
    wrapped = get_peft_model(tiny_model("qwen2"), LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ModelError, match=r"the adapter reaches the language-model head .*modules_to_save"):
        refuse_unknown_head(wrapped.get_base_model())
    refuse_unknown_head(get_peft_model(tiny_model("qwen2"), LoraConfig(target_modules=["q_proj"])).get_base_model())


class CosineHead(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, torch.nn.functional.normalize(self.weight))


@pytest.mark.parametrize("head", [CosineHead(32, 60), torch.nn.Sequential(torch.nn.Linear(32, 60))], ids=repr)
def test_a_head_with_a_forward_of_its_own_is_refused(head):
    model = tiny_model("qwen2")
    model.set_output_embeddings(head)
    with pytest.raises(ModelError, match=f"is a {type(head).__name__} with a forward of its own"):
        refuse_unknown_head(model)
