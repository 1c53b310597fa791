"""The three forms of a forward: packed, prefix and padded.

Differs from TRL, whose forward repeats a prompt for each of its completions and pads. In a pack a prompt runs once,
followed by its completions, without padding. In the prefix form the prompts run once and fill a cache, from which their
padded completions continue: this also works for linear attention and convolutions, whose state is in the cache. The
padded form is TRL's batch, as wide as its own longest row, with `position_ids`, so that absolute positions are right
under left padding. In every form only positions that predict a completion token go through the head.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..batching.micro_batches import Form
from ..batching.packing import Pack, build_pack, rows_by_run
from ..runtime.sequence_group import SequenceGroup
from ..runtime.transfer import to_device
from .architecture import base_model_of, experts_per_token, layer_kinds
from .attention import LAYOUT, PACKED, SUPPORTED, PackRefused, joint_parts_by_window, packed_attention, plain_attention
from .columns import ATTENDED, DROPOUT, EXPERTS, KEPT_COUNTS, KEPT_IDS
from .images import TOKEN_TYPES, Prepared
from .lm_head import PREFIX, TARGETS, LogProbs, RouterOutput, Targets
from .prefix_cache import Continuation, cached_under_checkpointing, unknown_layers, why_own_cache
from .rope import rope_of_pack
from .routing import BY_ROUTER, Routing
from .rows import TokenRows
from .sampling_masks import SamplingMasks
from .shared_prefix import Part
from .token_slice import TokenSlice

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_Inputs = dict[str, Any]  # arguments of a model
# these, `Targets.predictor_S`, `FormBatch.counts_BL` and `FormBatch.source_N`, on the CPU
_Layout = tuple[_Inputs, torch.Tensor, torch.Tensor, torch.Tensor]


def why_not_packed(policy: Any) -> str | None:
    """The reason why a model's class or configuration cannot run packs, as a clause."""
    config = policy.config.get_text_config()
    name = getattr(config, "_attn_implementation", None)
    if name == PACKED:
        name = config.grpo_ext_attention
    layers = set(layer_kinds(config))
    if not getattr(policy, "_supports_attention_backend", False):
        return f"{type(policy).__name__} does not use transformers' attention interface"
    if name not in SUPPORTED:
        return f"attn_implementation={name!r} does not support packs (supported: {', '.join(SUPPORTED)})"
    if getattr(policy, "_is_stateful", False) or not layers <= _KNOWN_LAYERS:
        kinds = ", ".join(sorted(layers - _KNOWN_LAYERS)) or "recurrent"
        return f"{type(policy).__name__} has layers that packs do not support ({kinds})"
    backbone = policy.base_model
    if not accepts_positions(backbone):
        return f"{type(policy).__name__} does not take position_ids"
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(backbone).forward).parameters.values()):
        return f"{type(policy).__name__} does not pass further arguments to its layers"
    return None


def why_no_prefix(policy: Any, reentrant: bool = False) -> str | None:
    """The reason why a model's class or configuration cannot run the prefix form, as a clause."""
    if reentrant and policy.supports_gradient_checkpointing:
        return "gradient checkpointing with use_reentrant=True passes no gradient through a cache"
    if (reason := why_own_cache(policy)) is not None:
        return reason
    if unknown := unknown_layers(policy.config.get_text_config(decoder=True)):
        return f"{type(policy).__name__} has cache layers that the prefix form does not support ({', '.join(unknown)})"
    return None


@dataclass(frozen=True)
class FormBatch:
    form: Form
    inputs: _Inputs
    targets: Targets  # positions refer to the flattened batch: in the prefix form the prompts', then the completions'
    counts_BL: torch.Tensor  # how often the padded batch would have computed each token
    # on the CPU: the place of each token of the flattened batch among the tokens of all rows; -1 for padding
    source_N: torch.Tensor
    slice: TokenSlice | None  # of a pack over several processes: tensors above are of this process's tokens


def lay_out(
    form: Form,
    policy: Any,
    rows: TokenRows,
    device: torch.device | str = "cpu",
    with_router: bool = False,
    with_entropy: bool = True,
    multiple: int = 1,
    suppressed: Sequence[torch.Tensor] = (),
    record_experts: bool = False,
    group: SequenceGroup | None = None,
    left: int = 0,
) -> FormBatch:
    """Lay completions out in a form, and move them to `device` in one copy.

    The length of a pack, or the widths of prompts and completions, are multiples of `multiple` tokens. Kept counts
    refer to `suppressed`. Experts are recorded where `rows` have none to replay. With a `group`, the batch of a pack
    holds this process's slice. `left`: columns of padding before all prompts, in the prefix and padded forms.
    """
    parts: dict[int | None, list[Part]] = {}
    tokens_S, share, among = rows.targets(), None, None
    if form == "packed":
        layout = _packed(rows, with_router, multiple if group is None else math.lcm(multiple, group.size))
        if group is not None:
            layout, share = _sliced(layout, group)
            tokens_S, among = tokens_S[share.targets], share.targets
        if torch.device(device).type == "cuda":
            parts = joint_parts_by_window(layout[0][LAYOUT], policy.config)
    elif form == "prefix":
        layout = _prefix(policy, rows, with_router, multiple, left)
    else:
        layout = _padded(policy, rows, multiple, left)
    counts_S, kept_K, experts_NC, keys_N = (rows.of(name) for name in (KEPT_COUNTS, KEPT_IDS, EXPERTS, DROPOUT))
    masks = None if counts_S is None or kept_K is None else SamplingMasks.of(counts_S, kept_K, suppressed, among)
    *on_device, source_N = layout
    if experts_NC is not None:
        experts_NC = torch.nn.functional.pad(experts_NC, (0, 0, 0, 1), value=BY_ROUTER)[source_N]  # -1: padding
    keys_N = None if keys_N is None else torch.nn.functional.pad(keys_N, (0, 1))[source_N]
    tensors = on_device, tokens_S, parts, masks, experts_NC, share, keys_N
    moved = to_device(tensors, device)
    (inputs, predictor_S, counts_BL), tokens_S, parts, masks, experts_NC, share, keys_N = moved
    routes = record_experts or experts_NC is not None
    routing = Routing(experts_NC, counts_BL.flatten(), group) if routes else None
    for window, calls in parts.items():
        inputs[LAYOUT].shared[window, predictor_S.device] = calls
    if form == "prefix":
        inputs[PREFIX] = Continuation(**inputs[PREFIX])
    wanted: dict[str, Any] = {"entropy": with_entropy, "router": with_router, "masks": masks, "routing": routing}
    targets = Targets(predictor_S=predictor_S, tokens_S=tokens_S, dropout_N=keys_N, **wanted)
    return FormBatch(form, inputs, targets, counts_BL, source_N, share)


def run_batch(model: Callable[..., Any], batch: FormBatch) -> LogProbs:
    """Run a model, as the loop calls it; raises PackRefused where it ignores the pack."""
    policy = base_model_of(model)
    rope = nullcontext() if batch.slice is None else rope_of_pack(policy, batch.slice.last_position)
    with in_form(policy, batch.form), rope:
        logps_S, entropies_S, routers = model(**batch.inputs, **{TARGETS: batch.targets})
    if batch.form == "packed" and not batch.inputs[LAYOUT].readers:
        raise PackRefused(f"{type(policy).__name__} does not attend through transformers' attention interface")
    group = None
    if batch.slice is not None:
        group, values = batch.slice.group, [logps_S] if entropies_S is None else [logps_S, entropies_S]
        logps_S, entropies_S = [*batch.slice.gathered(torch.stack(values, dim=1)).unbind(1), None][:2]
    routing = batch.targets.routing
    replayed = None if routing is None else routing.experts_NC
    top_k = experts_per_token(policy)
    router = RouterOutput(routers, batch.counts_BL, top_k, group, replayed) if routers else None
    return LogProbs(logps_S, logps_S.new_empty(0) if entropies_S is None else entropies_S, router, routing)


def run_rows(
    form: Form, model: Callable[..., Any], rows: TokenRows, device: torch.device | str = "cpu", **options: Any
) -> LogProbs:
    """Lay rows out and run them in a form; `options` are those of `lay_out`."""
    batch = lay_out(form, base_model_of(model), rows, device, **options)
    output = run_batch(model, batch)
    if output.routing is None or not options.get("record_experts"):
        return output
    recorded_NC = output.routing.pop_experts()
    source_N = batch.source_N.to(recorded_NC.device)
    real_N = source_N >= 0
    experts_NC = torch.zeros(len(rows.ids_N), recorded_NC.size(1), dtype=torch.int32, device=recorded_NC.device)
    experts_NC[source_N[real_N]] = recorded_NC[real_N].int() - BY_ROUTER  # 0 where none is known
    if batch.slice is not None:
        experts_NC = batch.slice.group.total(experts_NC)
    return replace(output, experts_NC=(experts_NC + BY_ROUTER).to("cpu", recorded_NC.dtype))


def in_form(policy: Any, form: Form) -> AbstractContextManager[None]:
    """Inside, a model runs in a form: forwards, and backward passes that recompute layers. May be nested."""
    contexts = {"packed": packed_attention, "prefix": cached_under_checkpointing, "padded": plain_attention}
    return contexts[form](policy)


def _packed(rows: TokenRows, with_router: bool, multiple: int) -> _Layout:
    runs = rows_by_run(rows.runs_B)
    contexts, lengths = [row.context for row in rows.rows_of], (rows.prompts_B, rows.completions_B)
    pack = build_pack(*lengths, runs, with_router, multiple, rows.group_lengths_B, contexts)
    ids = rows.ids_N[pack.source_N.clamp(min=0)].unsqueeze(0)  # filled up with the first token
    inputs: _Inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), LAYOUT: pack.layout}
    inputs["position_ids"] = pack.positions_N.unsqueeze(0)
    counts_N = pack.counts_N if rows.several is None else _counts_of_pack(rows, runs, pack)
    return inputs, pack.predictor_S, counts_N.unsqueeze(0), pack.source_N


def _counts_of_pack(rows: TokenRows, runs: Sequence[Sequence[int]], pack: Pack) -> torch.Tensor:
    """`Pack.counts_N` without what earlier rows of a completion have."""
    counts_N, counted, starts = torch.zeros_like(pack.counts_N), rows.counted_N, rows.starts_B
    for of_run, group in zip(runs, pack.layout.groups[: len(runs)], strict=True):  # without the filling
        for row, completion in zip(of_run, group.completions, strict=True):
            start = starts[row]
            for begin, end in (group.prompt, completion):
                counts_N[begin:end] += counted[start : start + end - begin]
                start += end - begin
    return counts_N


def _sliced(layout: _Layout, group: SequenceGroup) -> tuple[_Layout, TokenSlice]:
    """This process's tokens of a pack, whose layout stays that of the whole pack."""
    inputs, predictor_S, counts_BL, source_N = layout
    share = TokenSlice.of(group, predictor_S, inputs["position_ids"][0])
    inputs[LAYOUT].group = group
    ours = {name: value[:, share.tokens] if name != LAYOUT else value for name, value in inputs.items()}
    predictor_S = predictor_S[share.targets] - share.tokens.start
    return (ours, predictor_S, counts_BL[:, share.tokens], source_N[share.tokens]), share


def _prefix(policy: Any, rows: TokenRows, with_router: bool, multiple: int, left: int) -> _Layout:
    ids, mask, width = rows.padded(multiple, left)
    prompt = ids.size(1) - width
    firsts = [of_run[0] for of_run in rows_by_run(rows.runs_B)]
    first_G, prompt_B = torch.tensor(firsts), torch.tensor(rows.runs_B)
    # a completion's last token predicts nothing, but a router's statistics count it. Some layers take only one column
    # for a step of decoding, in which they change their cache
    columns = max(width if with_router else width - 1, 2)
    ids, mask = (torch.nn.functional.pad(values, (0, max(columns - width, 0))) for values in (ids, mask))
    attended = mask[:, : prompt + columns]
    places = rows.image_inputs(range(len(rows)), ids, pixels=False)
    position = positions_of(policy, ids, mask, places)
    inputs: _Inputs = {"input_ids": ids[first_G, :prompt], "attention_mask": mask[first_G, :prompt]}
    images = rows.image_inputs(firsts, inputs["input_ids"])
    inputs |= images
    if position is not None:
        inputs["position_ids"] = position[..., first_G, :prompt]
        position = position[..., prompt : prompt + columns]
    after = ids[:, prompt : prompt + columns]
    types = {name: torch.zeros_like(after) for name in TOKEN_TYPES if name in images}
    inputs[PREFIX] = {"input_ids": after, "attention_mask": attended, "position_ids": position, "prompt_B": prompt_B}
    inputs[PREFIX]["instead"] = dict.fromkeys(images) | types
    # the last token of the prompt predicts the first of a completion; each other token is predicted by the one before
    before_BT = torch.arange(-1, width - 1) + torch.arange(len(rows))[:, None] * columns
    before_BT += len(firsts) * prompt
    before_BT[:, 0] = prompt_B * prompt + prompt - 1
    targets = _scored(rows, mask[:, prompt : prompt + width])
    counted = mask.masked_scatter(mask.bool(), rows.counted_N)
    # a prompt counts once for each of its completions
    of_prompts = torch.zeros_like(inputs["attention_mask"]).index_add_(0, prompt_B, counted[:, :prompt])
    counts = [of_prompts, counted[:, prompt : prompt + columns]]
    source_BL = _sources(mask)
    source = [source_BL[first_G, :prompt], source_BL[:, prompt : prompt + columns]]
    flat_counts, source_N = (torch.cat([part.flatten() for part in parts]) for parts in (counts, source))
    return inputs, before_BT[targets], flat_counts[None], source_N


def _padded(policy: Any, rows: TokenRows, multiple: int, left: int) -> _Layout:
    ids, mask, width = rows.padded(multiple, left)
    images = rows.image_inputs(range(len(rows)), ids)
    attended_N = rows.of(ATTENDED)
    attended = mask if attended_N is None else mask.masked_scatter(mask.bool(), attended_N.to(mask.dtype))
    inputs: _Inputs = {"input_ids": ids, "attention_mask": attended, **images}
    if (positions := positions_of(policy, ids, mask, images)) is not None:
        inputs["position_ids"] = positions
    targets = torch.zeros_like(attended, dtype=torch.bool)
    targets[:, -width:] = _scored(rows, attended[:, -width:])
    counts = attended * mask.masked_scatter(mask.bool(), rows.counted_N)
    return inputs, targets.reshape(-1).nonzero().squeeze(1) - 1, counts, _sources(mask).flatten()


def _scored(rows: TokenRows, attended_BT: torch.Tensor) -> torch.Tensor:
    """True, (B, T), on the tokens after prompts that get log-probabilities."""
    contexts_B1 = torch.tensor([[row.context] for row in rows.rows_of])
    return attended_BT.bool() & (torch.arange(attended_BT.size(1)) >= contexts_B1)


def _sources(mask_BL: torch.Tensor) -> torch.Tensor:
    return torch.full_like(mask_BL, -1).masked_scatter(mask_BL.bool(), torch.arange(int(mask_BL.sum())))


def accepts_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def positions_of(model: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, images: Prepared) -> torch.Tensor | None:
    """Count real tokens only: (B, L), or (3, B, L) where images have rows and columns; pixels are optional."""
    if not accepts_positions(model):
        return None
    counted_BL = mask_BL.long().cumsum(-1).sub(1).clamp(min=0)
    index: Callable[..., Any] | None = getattr(getattr(model, "base_model", model), "get_rope_index", None)
    if index is None:
        return counted_BL
    known = {name: value for name, value in images.items() if name in inspect.signature(index).parameters}
    if "image_grid_thw" not in known:
        return counted_BL.expand(3, *counted_BL.shape)
    return index(ids_BL, attention_mask=mask_BL, **known)[0]
