"""Settings of `generate`: with those that are covered, a row depends on its key and on its own tokens alone."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from grpo_ext.algorithms.keyed_random import TRAIN_STREAM, completion_keys
from grpo_ext.batching.sizes import ChunkSizes
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.runtime.out_of_memory import Halving
from grpo_ext.sampling import engine
from grpo_ext.sampling.decoding import decodes_compactly
from grpo_ext.sampling.engine import EngineSettings, TransformersEngine
from grpo_ext.sampling.keyed import COVERED, why_not_by_key
from tests.support.decoding import decoding
from tests.support.selection import few_of
from tests.support.tiny import tiny_model

VOCABULARY, END, NEW = 12, 1, 12  # the end is the padding too
LONG = [3, 4, 5, 6, 7, 8, 9, 10, 11, 2, 3, 5, 7, 9]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 2, 3, END, 4], [5, 6, 7], [3, 4], [END, 5, END], [2, 2, 2], [END]]

# what each covered setting is set to; those that are set in every case stand at the top of `sampling`
CASES: dict[str, Any] = {
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "top_h": {"top_h": 0.5},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.8},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "temperature": {"temperature": 0.7},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "sequence_bias": {"sequence_bias": [[[END, 3, 4, 2], 9.0], [[END, END, 8], 9.0], [[7], 2.0]]},
    "bad_words_ids": {"bad_words_ids": [[END, 3, 4, 8], [3], [END, 5, 6]]},
    "min_length": {"min_length": 10},
    "min_new_tokens": {"min_new_tokens": 5},
    "both lengths": {"min_new_tokens": 5, "min_length": 10},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5)},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "begin_suppress_tokens": {"begin_suppress_tokens": [2, 3, 4, 5, 6]},
    "suppress_tokens": {"suppress_tokens": [2, 3, END]},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "use_cache": {"use_cache": False},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "cache_implementation": {"cache_implementation": "static"},
    "eos_token_id": {"eos_token_id": [END, 9]},
    "filters": {
        **{"top_k": 8, "top_p": 0.9, "top_h": 0.8, "min_p": 0.02, "typical_p": 0.95},
        **{"epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "temperature": 0.7},
    },
    "together": {"no_repeat_ngram_size": 3, "repetition_penalty": 1.5, "min_length": 8, "top_p": 0.9},
}
# each of them is in "filters", in "together" or in "both lengths"
FULL = {
    *("top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "temperature"),
    *("repetition_penalty", "no_repeat_ngram_size", "min_length", "min_new_tokens"),
}
OWN_TOKENS = {name for options in CASES.values() for name in options} - {"cache_implementation"}
OWN_TOKENS |= {"do_sample", "max_new_tokens", "pad_token_id", "stop_strings"}
# Settings that sampling does not read: of beams, assistants, outputs, compilation and records.
UNREAD = {
    *("_from_model_config", "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("bos_token_id", "cache_config", "compile_config", "continuous_batching_config", "decoder_start_token_id"),
    *("disable_compile", "diversity_penalty", "early_stopping", "length_penalty", "low_memory", "max_cache_len"),
    *("max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions"),
    *("output_hidden_states", "output_logits", "output_scores", "speculation_type", "target_lookbehind"),
    "transformers_version",
}
# Settings that are not known to leave rows apart, which the trainer warns of or refuses.
OTHERS = {
    *("assistant_early_exit", "cache_implementation", "constraints", "dola_layers", "encoder_no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "force_words_ids", "forced_bos_token_id", "guidance_scale", "is_assistant"),
    *("max_length", "max_time", "num_beam_groups", "num_beams", "num_return_sequences", "penalty_alpha"),
    *("prompt_lookup_num_tokens", "return_dict_in_generate", "token_healing", "use_mtp", "watermarking_config"),
}


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model(vocab_size=VOCABULARY, initializer_range=0.3, **sizes).eval()


def sampling(**options: Any) -> GenerationConfig:
    plain = {"do_sample": True, "pad_token_id": END, "eos_token_id": END, "max_new_tokens": NEW, "top_k": 0}
    return GenerationConfig(**{**plain, "disable_compile": True, **options})


def sample(
    model: Any, prompts: list[list[int]], config: GenerationConfig, compact: bool, first: int = 0, multiple: Any = None
) -> list[list[int]]:
    index = torch.arange(len(prompts)) + first
    keys_B = completion_keys(0, TRAIN_STREAM, 0, 0, index, 0 * index)
    rows = [Transcript(key, place, prompt_ids=ids) for place, (key, ids) in enumerate(zip(keys_B.tolist(), prompts))]
    settings = EngineSettings(torch.device("cpu"), None, filler=END, pad=END, multiple=multiple)
    of_engine = lambda: model, lambda: nullcontext(model), settings, lambda rows: None, Halving("generation", "", True)
    with torch.no_grad(), decoding(compact):
        return [turn.ids for turn in TransformersEngine(*of_engine).generate(rows, config, ChunkSizes(1, None, None))]


def alone(model: Any, config: GenerationConfig, compact: bool) -> list[list[int]]:
    """The last four rows, by calls of their own and without padding."""
    return [sample(model, [PROMPTS[row]], config, compact, first=row)[0] for row in range(4, 8)]


@pytest.mark.parametrize("name", few_of(CASES, CASES.keys() - FULL))
def test_a_row_is_the_same_at_two_widths_of_padding_in_either_loop(model, name):
    config = sampling(**CASES[name])
    assert why_not_by_key(model, config) is None
    rows = sample(model, PROMPTS, config, compact=False)
    for compact in (True, False) if decodes_compactly(model, config) else (False,):
        assert sample(model, [*PROMPTS, LONG], config, compact)[:-1] == rows
        assert sample(model, PROMPTS, config, compact, multiple=16) == rows
        assert alone(model, config, compact) == rows[-4:]
    moves_nothing = {"remove_invalid_values", "renormalize_logits", "use_cache", "prefill_chunk_size"}
    if name not in (*moves_nothing, "cache_implementation"):
        assert rows != sample(model, PROMPTS, sampling(), compact=False)  # the setting is in force


@pytest.mark.parametrize("name", ["no_repeat_ngram_size", "sequence_bias", "bad_words_ids", "min_length"])
def test_a_row_is_another_where_processors_read_its_padding(model, monkeypatch, name):
    monkeypatch.setattr(engine, "reads_padding", lambda model, config: False)
    config = sampling(**CASES[name])
    assert sample(model, [*PROMPTS, LONG], config, compact=True)[4:8] != alone(model, config, compact=True)


def test_every_setting_of_transformers_is_in_one_class():
    classes, names = (OWN_TOKENS, UNREAD, OTHERS), set(vars(GenerationConfig()))
    assert sum(map(len, classes)) == len(set().union(*classes))
    assert names <= set().union(*classes), "what may this setting change? see COVERED"
    assert COVERED == OWN_TOKENS | UNREAD


@pytest.mark.parametrize("own", [False, True], ids=["config", "model"])
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_other_setting_is_named(model, monkeypatch, name, own):
    config, value = sampling(), 0.5 if name == "max_time" else 2
    if name == "max_length":
        config.max_new_tokens = None
    monkeypatch.setattr(model.generation_config if own else config, name, value)
    assert why_not_by_key(model, config) == f"{name}={value!r}"


def test_processors_of_a_models_own_are_not_covered(model, monkeypatch):
    monkeypatch.setattr(type(model), "_get_logits_processor", lambda self, *args, **kwargs: [], raising=False)
    assert why_not_by_key(model, sampling()) == "Qwen2ForCausalLM._get_logits_processor"
