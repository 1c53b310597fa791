"""Log-probabilities of completions under the policy and the reference, for a rollout or a micro-batch.

Differs from TRL, where one method serves both: a rollout runs without gradients, in chunks that fit into memory; a
micro-batch runs in one forward, with gradients.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator

from ..batching.micro_batches import Form, RowBatching, StepSizes, canonical_units, filled
from ..batching.sizes import group_numbers
from ..compat import checkpointing_layers, checkpoints_layers, images_among
from ..config import GRPOConfig, forms_of
from ..errors import ConfigError, refuse_split_dependence
from ..precision.weight_gradients import float32_weight_gradients
from ..runtime.attributes import left_as_it_was, temporarily_set
from ..runtime.collectives import gather_in_group, gather_lists, max_over_processes, raise_on_all, shards_parameters
from ..runtime.messages import logger
from ..runtime.out_of_memory import Halving
from ..runtime.sequence_group import SequenceGroup
from ..runtime.transfer import to_device
from .architecture import base_model_of
from .choice import ForwardChoice
from .columns import ATTENDED, TrlBatch
from .draws import drawing_modules, drawn_in, generator_states
from .dropout import is_keyed, keyed_dropout
from .forms import in_form, run_rows
from .images import RowImages
from .lm_head import LogProbs
from .moving_buffers import differ, moving_buffers
from .rows import TokenRows, unpadded
from .token_slice import refuse_other_forms


@dataclass(frozen=True)
class ForwardLimits:
    """The most that one forward of a rollout holds; None: no limit."""

    completions: int | None
    tokens: int | None = None
    group_size: int | None = None  # completions per group, in which canonical units are cut; None: no units


# log-probabilities, entropies and auxiliary loss: what TRL's `_get_per_token_logps_and_entropies` returns
TrlLogProbs = tuple[torch.Tensor, Any, Any]


class ForwardRunner:
    def __init__(
        self,
        accelerator: Accelerator,
        args: GRPOConfig,
        refused: Mapping[Form, str],  # forms that no model of this run takes, with the reason
        suppressed: Sequence[torch.Tensor],  # sets of token ids that sampling suppresses
        make_rows: Callable[..., Sequence[TokenRows]],  # on which a model is compared
        override: Callable[[], Callable[..., Any] | None],  # a user's log-probabilities
    ) -> None:
        self.override = override
        self.accelerator, self.args, self.suppressed, self.make_rows = accelerator, args, suppressed, make_rows
        multiple: Any = args.pad_to_multiple_of
        self.multiple: int = multiple or 1
        self.sharded = shards_parameters(accelerator)
        size = args.sequence_parallel_size
        # whose members share the tokens of a pack
        self.group = SequenceGroup(accelerator, size, args.ddp_timeout) if size > 1 else None
        # steps are planned for groups; the first member of each counts values of the step
        self.groups, self.group_number = accelerator.num_processes // size, accelerator.process_index // size
        self.is_first = accelerator.process_index % size == 0
        self.collective_forward = self.sharded or size > 1  # who fails in a forward leaves others waiting
        self.float32_weight_gradients = args.float32_weight_gradients and accelerator.native_amp and not self.sharded
        may_cut = not (self.collective_forward or args.bitwise_invariant)
        remedy = "lower max_completion_length, or canonical_unit_size in bitwise mode"
        if size > 1:
            remedy = f"lower max_completion_length, or raise sequence_parallel_size (now {size})"
        self.memory = Halving("computing log-probabilities", remedy, may_cut)
        kwargs: Any = args.gradient_checkpointing_kwargs or {}
        checkpointing = {"use_reentrant": False, **kwargs} if args.gradient_checkpointing else None
        forms: Any = ("packed",) if self.group is not None else forms_of(args.forward)
        self.choice = ForwardChoice(
            forms, accelerator.device, self.collective_forward, checkpointing, refused, self.group
        )
        self.watches = not args.allow_split_dependent  # training forwards, for random numbers
        self._in_form: Any = None  # the model whose backward passes run in its form

    def copy(self, accelerator: Accelerator, twins: Sequence[tuple[Any, Any]]) -> "ForwardRunner":
        """A runner for another thread; the second of each twin runs there, in the form of the first."""
        runner = copy.copy(self)
        runner.accelerator, runner._in_form = accelerator, None
        for model, twin in twins:
            self.choice.use_form_of(model, twin)
        return runner

    def choose_forms(self, models: Sequence[Any]) -> None:
        """Choose the forms of models that have none yet (they pad), with real weights; all processes together.

        The first model is the one that is trained: it is compared with dropout, and checked for what its forward draws
        and for buffers that it moves.
        """
        for number, model in enumerate(models):
            if self.choice.is_compared(model):
                continue
            policy = base_model_of(model)
            # a user's module may be compiled
            with torch.compiler.set_stance("force_eager"), self.without_gradients(model), left_as_it_was(policy):
                if number:
                    self.choice.compare(model, self.make_rows)
                else:
                    with keyed_dropout(policy, strict=not self.args.allow_split_dependent):
                        self._check_training_forward(model)
                        self.choice.compare(model, self._rows_with_dropout)
            self.refuse_other_than_packs(model, self.choice.form(model))

    def _rows_with_dropout(self, policy: Any, **options: Any) -> list[TokenRows]:
        batches = self.make_rows(policy, **options)
        if not any(map(is_keyed, policy.modules())):
            return list(batches)
        return [rows.with_dropout(0, rows.runs_B, range(len(rows))) for rows in batches]

    def _check_training_forward(self, model: Any) -> None:
        policy, meeting = base_model_of(model), raise_on_all("the check of a training forward", self.sharded)
        with torch.random.fork_rng([]), meeting:
            rows = self._rows_with_dropout(policy, processor=None)[0]  # text alone, also where the model takes images

            def run() -> torch.Tensor:
                return self._forward(model, rows).logps_S

            moving = moving_buffers(policy, run, not self.sharded)
            policy.train()
            noise = self._noise_in(policy, run, lambda items: sorted({*gather_lists(items)}))
        reasons = [drawn_in(noise)] if noise else []
        if names := sorted({*gather_lists(moving)}):
            reasons.append(
                f"a training forward moves the buffer {', '.join(names[:3])}, which later forwards read; train without "
                "the module, or let it keep its buffers while it trains (its eval() does so for spectral_norm)"
            )
        for reason in refuse_split_dependence(reasons, self.args.allow_split_dependent):
            logger.warning(f"The promise that the split does not matter does not cover this run: {reason}.")

    def _noise_in(
        self, policy: Any, run: Callable[[], torch.Tensor], gather: Callable[[list[Any]], list[Any]] = list
    ) -> list[str]:
        """The modules that draw random numbers, if these change log-probabilities; `gather`: from all processes.

        PEFT's LoHa and LoKr draw at rate 0, and hooks of users may: where it has no effect, nothing is watched later.
        """

        def seeded(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return run()

        device = self.accelerator.device
        devices = [] if device.type == "cpu" else [device.index or 0]
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
            names = gather(drawing_modules(policy, device, run))
            if names and not any(gather([differ(seeded(0), seeded(0), seeded(1))])):
                self.watches = False
                return []
        return names

    def refuse_other_than_packs(self, model: Any, form: Form) -> None:
        refuse_other_forms(self.args.sequence_parallel_size, form, self.choice.described(model))

    @contextmanager
    def in_form_of(self, model: Any) -> Iterator[None]:
        policy = base_model_of(model)
        exact = float32_weight_gradients(policy) if self.float32_weight_gradients else nullcontext()
        with in_form(policy, self.choice.form(model)), temporarily_set(self, _in_form=policy), exact:
            yield

    @contextmanager
    def without_gradients(self, model: Any) -> Iterator[None]:
        """Inside, `model` runs in its training precision, without gradients and without checkpointing its layers."""
        with checkpointing_layers(model, None), torch.no_grad(), self.accelerator.autocast():
            yield

    def rollout_log_probs(
        self, model: Any, rows: TokenRows, limits: ForwardLimits, record_experts: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores of this process's part of a rollout batch, (S,), and recorded experts as in `LogProbs.experts_NC`."""
        if (override := self.override()) is not None:
            ids, mask, width = rows.padded(self.multiple)
            logps_BT, _, _ = self._by_user(
                override, model, (ids, mask), width, rows.images, limits, {}, batch_size=limits.completions
            )
            return unpadded(logps_BT, rows.completions_B), None
        shares, everyone, mine = [rows], rows, 0
        if (group := self.group) is not None:  # members run the rows of all of them together, and each keeps its own
            shares, mine = gather_in_group(rows, group.handle, group.size), group.member
            everyone = TokenRows.joined(shares)
        parts = self._run_chunks(
            model, everyone, limits, with_entropy=False, record_experts=record_experts, group=group
        )
        experts = [part.experts_NC for part in parts if part.experts_NC is not None]
        logps_S = torch.cat([part.logps_S for part in parts]).split([sum(share.scored_B) for share in shares])
        tokens = [len(share.ids_N) for share in shares]
        return logps_S[mine], torch.cat(experts).split(tokens)[mine] if experts else None

    def micro_batch_log_probs(
        self, model: Any, rows: TokenRows, with_router: bool, given: TrlBatch, alone: bool = False
    ) -> LogProbs:
        """Log-probabilities of rows, 0 where attention does not see the token.

        A user's override gets the rows as the padded dictionary that is `given`. `alone`: not of a sequence-parallel
        group.
        """
        if (override := self.override()) is not None:
            ids_and_mask, width = padded_ids_and_mask(given), given["completion_ids"].size(1)
            *scores, aux_loss = self._by_user(
                override,
                model,
                ids_and_mask,
                width,
                rows.images,
                None,
                images_among(given),
                compute_entropy=True,
                compute_aux_loss=with_router,
            )
            logps_S, entropies_S = (unpadded(score_BT, rows.completions_B) for score_BT in scores)
            return LogProbs(logps_S, entropies_S, getattr(aux_loss, "grpo_ext_router", None))
        output = self._forward(model, rows, with_router=with_router, group=None if alone else self.group)
        logps_S, entropies_S = map(rows.with_unseen, (output.logps_S, output.entropies_S))
        return replace(output, logps_S=logps_S, entropies_S=entropies_S)

    def batching(self, model: Any, form: Form) -> tuple[RowBatching, int]:
        """The rows that a batch of a form may hold together, and the multiple of tokens that it is filled up to."""
        batching = self.choice.batching(model) if form == "padded" else "any"
        return batching, self.multiple if batching == "any" else 1

    def _cut(self, model: Any, rows: TokenRows, limits: ForwardLimits) -> list[list[int]]:
        """The rows of each forward; canonical units of a rollout in bitwise mode."""
        form = self.choice.form(model) if ATTENDED not in rows.columns else "padded"
        batching, multiple = self.batching(model, form)
        if limits.group_size is not None and (unit := self.args.unit_rows) is not None:
            completions = list(accumulate(rows.by_completion([1] * len(rows)), initial=0))  # where each begins
            sizes = StepSizes(group_numbers(len(completions) - 1, limits.group_size), [], [])
            units = canonical_units(sizes, range(len(completions) - 1), unit if batching == "any" else 1)
            chunks = [list(range(completions[unit[0]], completions[unit[-1] + 1])) for unit in units]
            return chunks if batching == "any" else [[row] for chunk in chunks for row in chunk]
        sizes = StepSizes(rows.runs_B, rows.prompts_B, rows.completions_B, multiple)
        most = limits.completions or len(rows), limits.tokens, form
        parts = sizes.joinable(range(len(rows)), batching)
        return [chunk for part in parts for chunk in filled(sizes, [[row] for row in part], *most)]

    def _run_chunks(self, model: Any, rows: TokenRows, limits: ForwardLimits, **options: Any) -> list[LogProbs]:
        """Run a rollout in chunks that fit into memory."""
        chunks = self._cut(model, rows, limits)
        # where a forward is a collective, every process runs as many; a process with fewer chunks repeats its last one
        forwards = max_over_processes(len(chunks)) if self.sharded else len(chunks)
        outputs: list[LogProbs] = []
        for number in range(forwards):
            chunk = chunks[min(number, len(chunks) - 1)]
            parts = self.memory.run(chunk, lambda piece: self._forward(model, rows.part(piece), **options))
            outputs += parts if number < len(chunks) else []
        return outputs

    def _forward(self, model: Any, rows: TokenRows, **options: Any) -> LogProbs:
        """Run rows in one forward, with gradients where they are on; `options` are those of `lay_out`."""
        form, policy = self.choice.form(model), base_model_of(model)
        # outside `in_form_of`, a backward pass under gradient checkpointing would run the layers again in another form
        again = torch.is_grad_enabled() and checkpoints_layers(policy) and self._in_form is not policy
        if again or ATTENDED in rows.columns:
            form = "padded"
        if options.get("group") is not None:
            if ATTENDED in rows.columns:
                raise ConfigError(
                    f"sequence_parallel_size={self.args.sequence_parallel_size}, and a completion_mask that leaves out "
                    "tokens between others, which packs cannot; use tool_mask, or sequence_parallel_size=1."
                )
            self.refuse_other_than_packs(model, form)
        device = self.accelerator.device
        options |= {"multiple": self.batching(model, form)[1], "suppressed": self.suppressed}
        run = functools.partial(run_rows, form, model, rows, device, **options)
        with self.accelerator.autocast():
            if not (torch.is_grad_enabled() and self.watches):
                return run()
            # on the thread that samples ahead users' functions may draw too, on the CPU
            states = functools.partial(generator_states, device, not self.args.rollout_lag)
            before, output = states(), run()
            if before != states():
                # where a forward is a collective, others may not run it again
                named = [type(policy).__name__]
                names = named if self.collective_forward else self._noise_in(policy, lambda: run().logps_S)
                refuse_split_dependence([drawn_in(names)] if names else [], allow=False)
        return output

    # ---- TRL's `_get_per_token_logps_and_entropies`, where a user overrides or calls it -----------------------------

    def _by_user(
        self,
        override: Callable[..., Any],
        model: Any,
        padded_2BL: tuple[torch.Tensor, torch.Tensor],
        width: int,
        images: RowImages | None,
        limits: ForwardLimits | None,
        given: TrlBatch,
        **options: Any,
    ) -> TrlLogProbs:
        """What a user's override returns for padded ids and mask; `given` are the images of TRL's dictionary.

        TRL's method, which it may call, finds the images, and the limits of a rollout, with the ids.
        """
        ids, mask = to_device(padded_2BL, self.accelerator.device)
        if images is not None:
            given = given or to_device(images.as_trl(ids), self.accelerator.device)
        ids.grpo_ext_known = (images, limits)
        return override(model, ids, mask, width, **options, **given)

    def trl_log_probs(
        self, model: Any, rows: TokenRows, limits: ForwardLimits, width: int, with_entropy: bool, with_router: bool
    ) -> TrlLogProbs:
        """What TRL's method returns for rows, in forwards of at most `limits.completions` of them.

        With `limits.group_size` the rows are those of a rollout. An `aux_loss` of one forward has its `RouterOutput` as
        an attribute: the loss of a step needs more than the value.
        """
        options = {"with_entropy": with_entropy, "with_router": with_router}
        if limits.group_size is not None:
            parts = self._run_chunks(model, rows, limits, **options)
        else:
            parts = [self._forward(model, rows.part(part), **options) for part in self._cut(model, rows, limits)]
        routers = [part.router for part in parts if part.router is not None]
        aux_loss = torch.stack([router.aux_loss() for router in routers]).mean() if routers else None
        if aux_loss is not None and len(parts) == 1:
            aux_loss.grpo_ext_router = routers[0]  # type: ignore[attr-defined]
        logps_BT = rows.in_columns(torch.cat([part.logps_S for part in parts]), width)
        entropies_S = torch.cat([part.entropies_S for part in parts])
        return logps_BT, rows.in_columns(entropies_S, width) if with_entropy else None, aux_loss


def padded_ids_and_mask(inputs: TrlBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask (B, L) of prompts and completions, from TRL's dictionary."""
    ids, mask = (torch.cat([inputs[f"prompt_{n}"], inputs[f"completion_{n}"]], dim=1) for n in ("ids", "mask"))
    return ids, mask


def known_of(ids_BL: torch.Tensor) -> tuple[RowImages | None, ForwardLimits | None]:
    """The images of padded ids that were made here, and the limits of a rollout; neither of tensors of a user's own."""
    return getattr(ids_BL, "grpo_ext_known", (None, None))
