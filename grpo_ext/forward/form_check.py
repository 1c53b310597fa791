"""Compares a form of the forward with rows that run alone: a few completions, on which modules have to agree.

Runs before training begins (forward.choice), on rows made for that. Log-probabilities are not enough: in
half precision a deep model amplifies rounding until it hides ignored positions. Where outputs differ by more than the
unit of the arithmetic, the rounding is measured: the rows run again with every module's output off by a unit in the
last place.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch

from ..batching.micro_batches import Form
from ..batching.sizes import ceil_div
from ..compat import checkpointing_layers
from ..errors import SplitDependentError
from ..runtime.out_of_memory import is_out_of_memory
from ..runtime.sequence_group import SequenceGroup
from .architecture import base_model_of
from .attention import PackRefused
from .forms import FormBatch, lay_out, run_batch
from .images import PromptProcessor, RowImages, images_in, messages_of
from .lm_head import PREFIX
from .quantised import EIGHT_BIT_UNIT, outlier_thresholds
from .rope import covered_length
from .rows import TokenRows

LIMIT = 4.0  # times the rounding; healthy models reach 0.4 on the rows made here, a planted fault 22 and more
_CHANNELS = 64  # of a module's output that are compared, at most
_BATCHES = {"packed": "a pack", "prefix": "completions after a cached prompt", "padded": "a padded batch"}
# perturbed runs that the rounding is estimated from: none where the unit of the arithmetic already covers it, and more
# before a refusal, as some routers rarely change an expert
DRAWS = (0, 2, 8)
PADDINGS = (1, 7, 64)  # columns before all prompts, in batches of short rows

# made rows: a further batch is longer than a window of attention up to this width. A model that makes the mask of a
# longer window itself is refused by forward.attention
_LONGEST_WINDOW = 1024
_WINDOW_NAMES = re.compile("(window|attention_chunk|local)(?!.*layers)")  # settings that hold a width of attention
_PROMPTS, _COMPLETIONS = (9, 7), ((18, 2, 12), (9, 14))  # tokens
_AFTER_LONG = (24, 9)  # tokens of the completions of a long prompt
_TEXT = "how many birds sit on the wall and which of them can be seen from here "
_Prompt = tuple[torch.Tensor, list[Any]]  # token ids, and the images

Outputs = dict[str, torch.Tensor]  # (tokens, channels), by module


class RowsAlone:
    """Rows that run one by one, without padding: what all forms are compared with."""

    def __init__(
        self,
        model: Callable[..., Any],  # as the loop calls it, without gradient checkpointing
        rows: TokenRows,
        device: torch.device | str = "cpu",
        paddings: Sequence[int] = PADDINGS,  # columns before all prompts, of a batch each
    ) -> None:
        self.model, self.policy, self.rows, self.device = model, base_model_of(model), rows, device
        self.paddings, self.name = paddings, type(self.policy).__name__
        self._drawn: list[dict[str, float]] = []

    @cached_property
    def outputs(self) -> tuple[Outputs, torch.Tensor]:
        """Outputs of modules by place, and the log-probabilities of all tokens."""
        return self._run()

    @cached_property
    def fault(self) -> str | None:
        """The reason why there is nothing to compare with, as a clause."""
        try:
            _, logps = self.outputs
        except Exception as error:
            if self.rows.images is None or is_out_of_memory(error) or isinstance(error, SplitDependentError):
                raise  # the model itself is at fault
            return f"{self.name} fails on an image made for the comparison ({_first_line(error)})"
        if not torch.isfinite(logps).all():
            return f"log-probabilities of {self.name} are not finite, so there is nothing to compare"
        return None

    def roundings(self, draws: int) -> dict[str, float]:
        """The rounding by place, at least the unit of the arithmetic."""
        outputs, unit = self.outputs[0], rounding_unit(self.policy, self.device)
        while len(self._drawn) < draws:
            with _perturbed(self.policy, unit, seed=len(self._drawn)):
                perturbed, _ = self._run()
            # perturbed values near the end of their type's range may overflow
            errors = ((place, values - outputs[place]) for place, values in perturbed.items())
            self._drawn.append({place: _size(error.nan_to_num(0, 0, 0)) for place, error in errors})
        return {
            place: max([unit * _size(values), *(sizes.get(place, 0.0) for sizes in self._drawn)])
            for place, values in outputs.items()
        }

    def pair(self) -> "RowsAlone":
        """Two rows of one length, which need no padding: the first row, and its tokens backwards."""
        one = self.rows.part([0])
        ids_N = torch.cat([one.ids_N, one.ids_N.flip(0)])
        rows = TokenRows(ids_N, [*one.prompts_B] * 2, [*one.completions_B] * 2, [False])
        return RowsAlone(self.model, rows, self.device, paddings=(0,))

    def _run(self) -> tuple[Outputs, torch.Tensor]:
        parts = [self.rows.part([row]) for row in range(len(self.rows))]
        model, policy = self.model, self.policy
        runs = [_outputs(model, policy, part, lay_out("padded", policy, part, self.device)) for part in parts]
        every = [outputs for outputs, _ in runs]
        outputs = {
            place: torch.cat([outputs[place] for outputs in every])
            for place, values in every[0].items()
            if all(place in outputs and outputs[place].size(1) == values.size(1) for outputs in every)
        }
        return outputs, torch.cat([logps for _, logps in runs])


@torch.no_grad()
def why_form_fails(
    form: Form,
    alone: RowsAlone,
    checkpointing_kwargs: dict[str, Any] | None = None,  # of the run's gradient checkpointing; None without it
    group: SequenceGroup | None = None,  # whose members share the tokens of a pack
    draws: int = DRAWS[1],
) -> str | None:
    """The reason why a model does not run a form, as a clause; None where its modules' outputs agree with rows alone.

    Padded batches run where there is nothing to compare with. Every process runs the same number of
    forwards, unless the model refuses or memory runs out. The first token of a completion shows no fault in a pack: its
    prompt alone predicts it.
    """
    if alone.fault is not None:
        return None if form == "padded" else alone.fault
    model, policy, name = alone.model, alone.policy, alone.name
    try:
        paddings = (0,) if form == "packed" else alone.paddings
        batches = [lay_out(form, policy, alone.rows, alone.device, group=group, left=width) for width in paddings]
        runs = [_outputs(model, policy, alone.rows, batch) for batch in batches]
        if form == "prefix" and checkpointing_kwargs is not None:
            with checkpointing_layers(policy, checkpointing_kwargs), torch.enable_grad():
                again_S = _log_probs(model, batches[-1]).detach()
            if not torch.allclose(again_S, runs[-1][1], rtol=1e-2, atol=1e-2, equal_nan=True):
                return f"{name} loses the cache under gradient checkpointing"
    except PackRefused as error:
        return str(error)
    except Exception as error:  # models fail in many ways on input that they do not expect
        if is_out_of_memory(error):
            raise
        return f"{name} fails on {_BATCHES[form]} ({_first_line(error)})"
    (truth, truth_logps), roundings = alone.outputs, alone.roundings(draws)
    for outputs, logps in runs:
        for place, expected in truth.items():
            ratio = _in_roundings(outputs.get(place, expected), expected, roundings[place])
            if not ratio <= LIMIT:
                gap = float((logps - truth_logps).abs().float().mean())
                return (
                    f"{form} log-probabilities of {name} differ by {gap:.1e} on average from those of each row alone, "
                    f"first at {place}: by {ratio:.0f} times the rounding, where up to {LIMIT:.0f} is rounding"
                )
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _outputs(model: Any, policy: Any, rows: TokenRows, batch: FormBatch) -> tuple[Outputs, torch.Tensor]:
    """Outputs of modules at the positions that predict later tokens of completions, and log-probabilities of all.

    In the padded form also outputs at all tokens: padding shows most at the beginning of a prompt.
    """
    after = batch.inputs.get(PREFIX)
    shape = batch.inputs["input_ids"].shape if after is None else after.input_ids.shape
    later_S = torch.cat([torch.arange(length) for length in rows.completions_B]) > 0
    predictor_S, outputs = batch.targets.predictor_S, Outputs()
    # in the prefix form the batch of the completions comes last, and a prompt predicts the first token of each
    index = (predictor_S - (batch.counts_BL.numel() - shape.numel())).clamp(min=0)
    everywhere = batch.counts_BL.flatten().nonzero()[:, 0]

    def record(module: Any, args: Any, output: Any, name: str) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if _is_numbers(value) and value.dim() > 2 and value.shape[:2] == shape:
            channels = value.flatten(0, 1).flatten(1)
            channels = channels[:, :: ceil_div(channels.size(1), _CHANNELS)]
            wide = torch.promote_types(channels.dtype, torch.float32)
            thin = channels[index.to(value.device)]
            thin = thin if batch.slice is None else batch.slice.gathered(thin)
            outputs[name] = thin[later_S.to(thin.device)].to(wide)
            if batch.form == "padded":
                outputs[f"{name} at the prompts"] = channels[everywhere.to(value.device)].to(wide)

    with ExitStack() as hooks:
        for name, module in _compared_modules(policy):
            hooks.callback(module.register_forward_hook(functools.partial(record, name=name)).remove)
        logps = _log_probs(model, batch)
    outputs["the head"] = logps[later_S.to(logps.device), None].float()
    return outputs, logps


def _log_probs(model: Any, batch: FormBatch) -> torch.Tensor:
    """Log-probabilities (S,); 1, as none is, for a token that the head bans, so that two forms agree on it."""
    logps_S = run_batch(model, batch).logps_S
    return logps_S.masked_fill(logps_S.isneginf(), 1.0)


def _compared_modules(policy: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields modules outside of layers, and the parts of every layer, such as its attention."""
    for path, module in policy.named_modules():
        parts = path.split(".")
        if path and [place for place, part in enumerate(parts) if part.isdigit()] in ([], [len(parts) - 2]):
            yield path, module


def _is_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _unit(kind: torch.dtype) -> float:
    """The rounding of one operation; a few units for float32 and float64, whose sums round every term."""
    eps = torch.finfo(kind).eps
    return eps / 2 if kind.itemsize <= 2 else eps * 8


def rounding_unit(policy: Any, device: torch.device | str) -> float:
    """The relative rounding of the coarsest arithmetic that a model uses."""
    kinds = {p.dtype for p in policy.parameters() if p.is_floating_point()}
    kinds |= {kind for m in policy.modules() if isinstance(kind := getattr(m, "compute_dtype", None), torch.dtype)}
    kind = torch.device(device).type
    if torch.is_autocast_enabled(kind):
        kinds.add(torch.get_autocast_dtype(kind))
    backends: tuple[Any, ...] = (torch.backends, torch.backends.cuda.matmul, cast(Any, torch.backends.mkldnn).matmul)
    products = {backend.fp32_precision for backend in backends}
    shortcuts = [size for name, size in (("tf32", 2.0**-11), ("bf16", 2.0**-9)) if name in products]
    if outlier_thresholds(policy):
        shortcuts.append(EIGHT_BIT_UNIT)
    return max([*map(_unit, kinds), *shortcuts])


@contextmanager
def _perturbed(policy: Any, unit: float, seed: int) -> Iterator[None]:
    """Inside, the output of every module without children is off by up to a unit in the last place."""
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(module: Any, args: Any, output: Any) -> Any:
        if not _is_numbers(output):
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(seed)
        wide = torch.promote_types(output.dtype, torch.float32)
        size = max(unit, _unit(output.dtype))
        try:
            draw = torch.rand(output.shape, generator=generators[output.device], device=output.device, dtype=wide)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return output  # under torch.vmap, which allows no random numbers
        return (output.to(wide) * (1 + size * (2 * draw - 1))).to(output.dtype)

    with ExitStack() as hooks:
        for module in policy.modules():
            if next(module.children(), None) is None:
                hooks.callback(module.register_forward_hook(disturb).remove)
        yield


def _size(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _in_roundings(values: torch.Tensor, alone: torch.Tensor, rounding: float) -> float:
    """The difference at one place, in units of the rounding there."""
    if values.shape != alone.shape or not math.isfinite(_size(alone)):
        return 0.0
    error = _size(values - alone)
    return error / rounding if rounding else math.inf if error else 0.0


def probe_rows(policy: Any, tokenizer: Any, processor: PromptProcessor | None = None) -> list[TokenRows]:
    """Batches of rows for a model without wrappers; `processor`: of a model that takes images.

    A generator of their own draws the tokens: no random state of the run moves, and every process has the same rows.
    """
    generator, limit = torch.Generator().manual_seed(0), _longest_row(policy.config)
    ids, window = torch.tensor(text_ids(policy.config, tokenizer)), _longest_window(policy.config)
    long = min(window + max(window // 8, 8), limit - max(_AFTER_LONG)) if window > min(_PROMPTS) else 0

    def drawn(length: int) -> torch.Tensor:
        return ids[torch.randint(len(ids), (min(length, limit // 2),), generator=generator)]

    def rows(prompts: list[_Prompt], lengths: Sequence[Sequence[int]]) -> TokenRows:
        groups = [number for number, group in enumerate(lengths) for _ in group]
        completions = [drawn(length) for group in lengths for length in group]
        parts = [part for n, ids in zip(groups, completions, strict=True) for part in (prompts[n][0], ids)]
        same = [before == after for before, after in pairwise(groups)]
        images = None if processor is None else RowImages(groups, lambda number: prompts[number][1], processor)
        return TokenRows(
            torch.cat(parts), [len(prompts[n][0]) for n in groups], list(map(len, completions)), same, images
        )

    if processor is None:
        prompts: list[_Prompt] = [(drawn(length), []) for length in _PROMPTS]
        long_prompt: _Prompt = ids[torch.randint(len(ids), (max(long, 0),), generator=generator)], []
    else:
        image = torch.randint(256, (32, 64, 3), generator=generator, dtype=torch.uint8)
        prompts = [_prepared(processor, _TEXT, image), _prepared(processor, _TEXT)]
        long_prompt = _prepared(processor, _TEXT * (1 + long // 15))
    batches = [rows(prompts, _COMPLETIONS)]
    return [*batches, rows([long_prompt], [_AFTER_LONG])] if long > max(_PROMPTS) else batches


def text_ids(config: Any, tokenizer: Any) -> list[int]:
    """Ids of text: no special tokens, added tokens or images."""
    text = config.get_text_config()
    settings = (vars(config) | vars(text)).items()
    special = {value for name, value in settings if re.search("_token_(id|index)$", name) and isinstance(value, int)}
    special |= {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    vocabulary = range(min(text.vocab_size, len(tokenizer)))
    return [token for token in vocabulary if token not in special] or list(vocabulary)


def _longest_row(config: Any) -> int:
    """The longest row whose rotary frequencies are those of shorter ones, in tokens."""
    original = getattr(config.get_text_config(), "original_max_position_embeddings", None)
    return min(limit for limit in (covered_length(config), original, 2 * _LONGEST_WINDOW) if isinstance(limit, int))


def _longest_window(config: Any) -> int:
    """The longest window of attention up to `_LONGEST_WINDOW` tokens; 0 without one."""
    settings = vars(config.get_text_config()).items()
    widths = [value for name, value in settings if _WINDOW_NAMES.search(name) and type(value) is int]
    return max((width for width in widths if width <= _LONGEST_WINDOW), default=0)


def _prepared(processor: PromptProcessor, text: str, image: torch.Tensor | None = None) -> _Prompt:
    row: dict[str, Any] = {"prompt": [{"role": "user", "content": text}]}
    if image is not None:
        from PIL import Image  # not installed where only text is trained on

        row["image"] = Image.fromarray(image.numpy())
    messages = messages_of(row)
    return processor.encoded(messages)["input_ids"][0], images_in(messages)
