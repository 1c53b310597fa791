"""Keyed sampling: the random number of a token depends only on the key of its row and on its position.

Differs from transformers' sampling, which draws from one generator for the whole batch, and returns neither the tokens
that the filters kept nor experts. Used by sampling.engine. Shapes: B rows, P prompts, T tokens, N tokens of all rows, V
vocabulary, K kept ids, C choices of all routers (forward.routing).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList

from ..algorithms.keyed_random import choose, uniform
from ..config import Replay
from ..forward.architecture import base_model_of
from ..forward.columns import EXPERTS, KEPT_COUNTS, KEPT_IDS, KEPT_MASS, SAMPLER_LOGPS, TokenColumns, first_tokens
from ..forward.routing import BY_ROUTER, Routing
from ..settings import most_kept, named, truncating
from .turn import Context

FILTERS = ("temperature", *named("truncates"), "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Settings under which a row depends only on its key and its own tokens (tests sample at several widths of padding), and
# settings that sampling does not read. Any other, and any new one of transformers, may make it depend on more.
COVERED = {
    *(*FILTERS, "bad_words_ids", "begin_suppress_tokens", "do_sample", "eos_token_id", "forced_eos_token_id"),
    *("exponential_decay_length_penalty", "max_new_tokens", "min_length", "min_new_tokens", "no_repeat_ngram_size"),
    *("pad_token_id", "prefill_chunk_size", "remove_invalid_values", "renormalize_logits", "repetition_penalty"),
    *("sequence_bias", "stop_strings", "suppress_tokens", "use_cache"),
    *("_from_model_config", "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("bos_token_id", "cache_config", "compile_config", "continuous_batching_config", "decoder_start_token_id"),
    *("disable_compile", "diversity_penalty", "early_stopping", "length_penalty", "low_memory", "max_cache_len"),
    *("max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions"),
    *("output_hidden_states", "output_logits", "output_scores", "speculation_type", "target_lookbehind"),
    "transformers_version",
}
_NEUTRAL: dict[str, set[Any]] = {
    **{name: {1} for name in ("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale")},
    **{"encoder_repetition_penalty": {1}, "encoder_no_repeat_ngram_size": {0}},
    "cache_implementation": {"dynamic", "static", "offloaded", "offloaded_static", "hybrid"},
}
# settings that read all tokens of a row, padding included
_READ_ALL = ("repetition_penalty", "no_repeat_ngram_size", "min_length", "sequence_bias", "bad_words_ids")
# filters that sum probabilities up
_ADD_UP = (transformers.TopHLogitsWarper, transformers.TopPLogitsWarper, transformers.TypicalLogitsWarper)
_AT_ONCE = 64  # tokens whose records are brought to the host together
_DRAW = 16  # tokens whose random numbers are drawn at once
NEW_TOKENS = 20  # of a row by default, as in transformers

# settings that change scores by earlier tokens, or at single positions, and their values without effect
_NOT_REPLAYED: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **{name: [] for name in ("sequence_bias", "bad_words_ids", "begin_suppress_tokens")},
}


@dataclass
class Recorder(LogitsProcessor):
    """Records the tokens of a `generate` call; as the first of the filters it sees the scores before them."""

    temperature: float | None = None  # the filters divide scores by it; None: nothing is truncated, so all mass is kept
    bound: int | None = None  # the most ids that a token keeps; None: no ids are recorded
    kinds: Sequence[int] = (0,)  # without ids: the kept counts of the first positions; the last one holds for the rest
    routing: Routing | None = (
        None  # records experts (`forward.carried.carrying` is around the call); None: not recorded
    )
    _before_B: torch.Tensor | None = None  # log-sum of the scores before the filters
    _bounded: tuple[torch.Tensor, ...] = ()  # counts and ids of the scores that are drawn from
    _position: int = 0  # of the token that is drawn next
    _numbers_B: torch.Tensor | None = None  # of the rows that are left, among all
    _prompts_NC: torch.Tensor | None = None  # experts of the first forward's tokens
    # row numbers and the columns of `add`; columns that are equal for all rows stay on the CPU, without a launch
    _steps: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    _parts: dict[int, list[TokenColumns]] = field(default_factory=dict)  # of each row, on the host

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.temperature is not None:
            self._before_B = (scores / self.temperature).logsumexp(1)
        return scores

    def bounded(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """The scores with at most `bound` tokens left (filters keep more at equal scores); precedes each `add`."""
        if self.bound is None:
            kind = self.kinds[min(self._position, len(self.kinds) - 1)]
            counts_B = torch.full((len(scores_BV),), kind, dtype=torch.int32)
            self._bounded = counts_B, counts_B.new_empty(len(counts_B), 0)
            return scores_BV
        values_BN, ids_BN = scores_BV.topk(min(self.bound, scores_BV.size(1)), dim=1)
        self._bounded = (values_BN > -torch.inf).sum(1, dtype=torch.int32), ids_BN.int()
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, ids_BN, values_BN)

    def add(self, scores_BV: torch.Tensor, tokens_B: torch.Tensor, probabilities_BV: torch.Tensor) -> None:
        tokens_B1 = tokens_B[:, None]
        probabilities_B = probabilities_BV.gather(1, tokens_B1).squeeze(1)
        mass_B = torch.ones(len(tokens_B))
        if self._before_B is not None:
            mass_B = (scores_BV.gather(1, tokens_B1).squeeze(1) - self._before_B).exp() / probabilities_B
        if self._numbers_B is None:
            self._numbers_B = torch.arange(len(tokens_B), device=tokens_B.device)
        self._steps.append((self._numbers_B, probabilities_B, mass_B, *self._bounded, self._newest(tokens_B)))
        self._position += 1
        if len(self._steps) == _AT_ONCE:
            self._flush()

    def _newest(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """The experts (B, C) of the token before each of these; `BY_ROUTER` after the forward of the prompts."""
        if self.routing is None:
            return torch.empty(len(tokens_B), 0)
        experts_NC = self.routing.pop_experts()
        if self._prompts_NC is None:
            self._prompts_NC = experts_NC.cpu()
            return experts_NC.new_full((len(tokens_B), experts_NC.size(1)), BY_ROUTER)
        # without a cache, every forward runs all tokens
        return experts_NC.view(len(tokens_B), -1, experts_NC.size(1))[:, -1]

    def keep(self, index: torch.Tensor) -> None:
        assert self._numbers_B is not None
        self._numbers_B = self._numbers_B[index]

    def _flush(self) -> None:
        """Copy the latest steps to the host, without the ids that were not kept."""
        if not self._steps:
            return
        numbers_N, *columns = (torch.cat(column).cpu() for column in zip(*self._steps, strict=True))
        self._steps.clear()
        order_N, lengths = numbers_N.argsort(stable=True), numbers_N.bincount().tolist()
        rows = zip(*(column[order_N].split(lengths) for column in columns), strict=True)
        for row, (probabilities_T, mass_T, counts_T, ids_TK, experts_TC) in enumerate(rows):
            ids_K = ids_TK[torch.arange(ids_TK.size(1)) < counts_T[:, None]]
            logps_T = probabilities_T.log().float()
            recorded = {SAMPLER_LOGPS: logps_T, KEPT_MASS: mass_T.float(), KEPT_COUNTS: counts_T, KEPT_IDS: ids_K}
            self._parts.setdefault(row, []).append(recorded | {EXPERTS: experts_TC})

    def columns(
        self, contexts: Sequence[int], prompts_B: Sequence[int], lengths: Sequence[int]
    ) -> Sequence[TokenColumns]:
        """The columns of the first tokens of each row; the experts of its prompt too, `BY_ROUTER` for the last token.

        `contexts` are the tokens of each prompt of the first forward, `prompts_B` for every row the number of its
        prompt.
        """
        self._flush()
        found = []
        for row, (prompt, length) in enumerate(zip(prompts_B, lengths, strict=True)):
            whole = {name: torch.cat([part[name] for part in self._parts[row]]) for name in self._parts[row][0]}
            experts_TC = whole.pop(EXPERTS)
            found.append(first_tokens(whole, 0, length))
            if self._prompts_NC is not None:
                context_NC = self._prompts_NC.view(len(contexts), -1, self._prompts_NC.size(1))[prompt]
                context_NC = context_NC[len(context_NC) - contexts[prompt] :]
                never_ran_1C = experts_TC.new_full((1, experts_TC.size(1)), BY_ROUTER)
                found[-1][EXPERTS] = torch.cat([context_NC, experts_TC[1:length], never_ran_1C])
        return found


class KeyedChoice(LogitsProcessor):
    """Samples the token of each row by its key.

    As the last processor of a greedy `generate` it leaves only that token. With `do_sample=False` the processors passed
    to `generate` run after the model's, in their order, so the filters run before this one. sampling.decoding calls
    `tokens` instead.
    """

    def __init__(self, rows: Sequence[Context], prompt_width: int, recorder: Recorder, device: torch.device) -> None:
        self.keys_B = torch.tensor([row.key for row in rows], device=device)
        self.offsets_B = torch.tensor([len(row.ids) for row in rows], device=device)
        self.prompt_width, self.recorder = prompt_width, recorder
        self._uniforms_BT, self._drawn = self.keys_B[:, None], range(0)  # of these positions
        self._largest = torch.zeros((), dtype=torch.int64, device=device)
        self._vocabulary = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens_B = self.tokens(input_ids, scores)
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(1, tokens_B[:, None], 0.0)  # type: ignore[return-value]

    def tokens(self, input_ids: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        """Token ids (B,) after `input_ids` (B, tokens so far); arbitrary where the scores are not a distribution."""
        scores_BV = self.recorder.bounded(scores_BV)
        position = input_ids.size(1) - self.prompt_width
        if position not in self._drawn:
            self._drawn = range(position, position + _DRAW)
            steps_T = torch.arange(position, position + _DRAW, device=self.keys_B.device)
            self._uniforms_BT = uniform(self.keys_B[:, None], self.offsets_B[:, None] + steps_T)
        tokens_B, probabilities_BV = choose(scores_BV, self._uniforms_BT[:, position - self._drawn.start])
        self._vocabulary = scores_BV.size(1)
        self._largest = torch.maximum(self._largest, tokens_B.max())
        tokens_B = tokens_B.clamp(max=self._vocabulary - 1)
        self.recorder.add(scores_BV, tokens_B, probabilities_BV)
        return tokens_B

    def keep(self, index: torch.Tensor) -> None:
        self.keys_B, self.offsets_B = self.keys_B[index], self.offsets_B[index]
        self._uniforms_BT = self._uniforms_BT[index]
        self.recorder.keep(index)

    def was_broken(self) -> bool:
        """Whether scores were not a distribution; the host waits for the device."""
        return bool(self._largest == self._vocabulary)


def setting_of(model: Any, config: GenerationConfig, name: str) -> Any:
    """A setting of sampling: the configuration's, or else the model's, as in `generate`."""
    value = getattr(config, name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def own_generate(model: Any) -> str | None:
    """The name of the model's own `generate` (of its class, or assigned to it); None where it is transformers'."""
    function = getattr(model.generate, "__func__", model.generate)
    if getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.distributed."):
        function = function.__wrapped__  # FSDP2 wraps it to gather weights
        function = getattr(function, "__func__", function)
    module = getattr(function, "__module__", None) or type(function).__module__
    name = f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    # PEFT's wrappers call the model inside, so that model decides
    if module.split(".")[0] == "peft" and hasattr(model, "get_base_model"):
        return own_generate(model.get_base_model())
    # compares the name too, because a library may have replaced the method of the class
    plain = function is GenerationMixin.generate and name == "transformers.generation.utils.GenerationMixin.generate"
    return None if plain else name


def why_not_by_key(model: Any, config: GenerationConfig) -> str | None:
    """Why a row may depend on more than its key and its own tokens; None where it does not."""
    if (name := own_generate(model)) is not None:
        return name
    policy = base_model_of(model)
    for name in ("_get_logits_processor", "_get_stopping_criteria", "_sample", "_prefill"):
        if getattr(getattr(policy, name), "__func__", None) is not getattr(GenerationMixin, name):
            return f"{type(policy).__name__}.{name}"
    values = {name: setting_of(model, config, name) for name in sorted(vars(GenerationConfig()).keys() - COVERED)}
    if setting_of(model, config, "max_new_tokens") is not None:
        del values["max_length"]  # it is not read
    used = [
        f"{n}={v!r}" for n, v in values.items() if v is not None and v is not False and v not in _NEUTRAL.get(n, ())
    ]
    return ", ".join(used if config.do_sample else ["do_sample=False", *used]) or None


def filter_values(model: Any, config: GenerationConfig) -> dict[str, Any]:
    values = {name: setting_of(model, config, name) for name in FILTERS}
    if values["top_k"] is None:
        values["top_k"] = 50  # transformers' default
    return values


def sampling_filters(model: Any, config: GenerationConfig, replay: Replay) -> tuple[LogitsProcessorList, Recorder]:
    """transformers' filters in the order of `generate(do_sample=True)`, and the recorder of what they leave."""
    values = filter_values(model, config)
    leaving_out = truncating(values)
    recorder = Recorder(temperature=(values["temperature"] or 1.0) if leaving_out else None)
    if replay.experts:
        recorder.routing = Routing()
    if replay.masks:
        values["top_k"] = recorder.bound = most_kept(leaving_out)
        recorder.kinds = kinds_of(model, config)
    filters = model._get_logits_processor(GenerationConfig(do_sample=True, **values))
    if torch.are_deterministic_algorithms_enabled():
        filters = [_OnCpu(filter) if isinstance(filter, _ADD_UP) else filter for filter in filters]
    return LogitsProcessorList([recorder, *filters]), recorder


def not_replayed(model: Any, config: GenerationConfig, temperature: float) -> dict[str, bool]:
    """Settings of sampling that replayed masks do not describe, and whether they are set, for `refuse_excluded`."""
    others, reason = {}, "it changes scores by more than leaving some out"
    for name, neutral in _NOT_REPLAYED.items():
        value = setting_of(model, config, name)
        others[f"{name}={value!r} ({reason})"] = value not in (None, neutral)
    value = setting_of(model, config, "temperature")
    reason = f"training divides by {temperature!r}: set GRPOConfig(temperature={value!r}) instead"
    others[f"temperature={value!r} in generation_kwargs ({reason})"] = value not in (None, temperature)
    return others


def suppressed_tokens(model: Any, config: GenerationConfig, eos_token_ids: Sequence[int]) -> list[torch.Tensor]:
    """The sets of ids that sampling suppresses: always, and before `min_new_tokens`."""
    always = set(setting_of(model, config, "suppress_tokens") or ())
    sets = [always] if always else []
    if setting_of(model, config, "min_new_tokens"):
        sets.append(always | set(eos_token_ids))
    return [torch.tensor(sorted(ids)) for ids in sets]


def kinds_of(model: Any, config: GenerationConfig) -> list[int]:
    """The set of `suppressed_tokens` at each of the first positions, and at all further ones, as kept counts."""
    always = 1 if setting_of(model, config, "suppress_tokens") else 0
    return [*[-always - 1] * (setting_of(model, config, "min_new_tokens") or 0), -always]


class _OnCpu(LogitsProcessor):
    """Runs a filter on the CPU, because CUDA has no deterministic running sum of floats."""

    def __init__(self, filter: LogitsProcessor) -> None:
        self.filter = filter

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.filter(input_ids.cpu(), scores.cpu()).to(scores.device)


def greedy_config(model: Any, config: GenerationConfig) -> GenerationConfig:
    greedy = copy.deepcopy(config)
    for name in FILTERS:
        setattr(greedy, name, None)
    greedy.max_new_tokens = setting_of(model, config, "max_new_tokens") or NEW_TOKENS
    greedy.do_sample, greedy.renormalize_logits = False, False  # renormalizing changes no probability
    return greedy


def reads_padding(model: Any, config: GenerationConfig) -> bool:
    """Whether a setting reads all tokens of a row, so that padding would change it."""
    used = (setting_of(model, config, name) not in (None, _NOT_REPLAYED[name]) for name in _READ_ALL)
    return bool(config.stop_strings) or any(used)
