"""What the package relies on in TRL, transformers, Accelerate and torch beyond the signatures of what it overrides.

Behaviour rather than signatures: how they call what is overridden, gather, accumulate and generate.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from functools import cache

import accelerate
import accelerate.utils
import pytest
import torch
import transformers
import trl
import trl.trainer.grpo_trainer as trl_module
from trl.trainer.base_trainer import _BaseTrainer

from grpo_ext import GRPOTrainer, compat
from grpo_ext.runtime.collectives import uneven_gathers


@cache
def tree_of(owner) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(owner)))


def calls_in(owner, name: str) -> list[ast.Call]:
    """Calls `self.name(...)` and `super().name(...)` in a class."""
    found = []
    for node in ast.walk(tree_of(owner)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            base = node.func.value
            is_super = isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super"
            if is_super or (isinstance(base, ast.Name) and base.id == "self"):
                found.append(node)
    return found


CALLERS = (trl.GRPOTrainer, _BaseTrainer, transformers.Trainer)


@pytest.mark.parametrize("name", sorted(set(compat.OVERRIDES) - {"__init__"}))
def test_every_call_in_trl_and_transformers_fits_the_override(name):
    signature = inspect.signature(getattr(GRPOTrainer, name))
    calls = [(owner, call) for owner in CALLERS for call in calls_in(owner, name)]
    if name not in ("train", "predict", "prediction_step", "training_step"):
        assert calls, f"{name} is not called any more"
    for owner, call in calls:
        positional = [None] * len([a for a in call.args if not isinstance(a, ast.Starred)])
        keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        try:
            signature.bind(None, *positional, **keywords)
        except TypeError as error:
            pytest.fail(f"{name}: {owner.__name__} calls {ast.unparse(call)}, which does not fit: {error}")


def test_the_constructor_reads_beta_for_the_reference_model_alone():
    # it is shown zero where our own reference follows: an adapter's copy, the attribute, two checks
    tree = tree_of(trl.GRPOTrainer.__init__)
    read = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "beta"]
    assert sum(isinstance(node.ctx, ast.Load) for node in read) == 4, "GRPOTrainer.__init__ reads beta elsewhere"


# ---- Collectives ----------------------------------------------------------------------------------------------------


TURN = ("_generate_single_turn", "_tokenize_prompts")  # still TRL's, where continuous batching or a user calls them
COLLECTIVE = ("gather", "reduce", "broadcast", "pad_across", "all_")


def collectives_in(name: str) -> set[str]:
    """Names of collectives that a method of TRL's trainer calls, as written."""
    found = set()
    for node in ast.walk(tree_of(getattr(trl.GRPOTrainer, name))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.split(".")[-1].startswith(COLLECTIVE) and not called.startswith("asyncio."):
                found.add(called)
    return found


def test_what_is_still_called_of_trls_turn_exchanges_nothing():
    used = set().union(*(collectives_in(name) for name in TURN))
    assert used == set(), f"TRL's turn uses collectives, of which processes run different numbers: {used}"
    assert collectives_in("_calculate_rewards")  # it finds those that there are


def test_uneven_gathers_replaces_the_accelerators_gather_and_puts_it_back():
    accelerator = accelerate.Accelerator(cpu=True)
    before = (trl_module.gather, trl_module.gather_object)
    with uneven_gathers(accelerator, empty=False):
        assert (trl_module.gather, trl_module.gather_object) == before  # nothing of TRL's module is touched
        assert "gather" in vars(accelerator)
        assert accelerator.gather(torch.tensor([1, 2])).tolist() == [1, 2]
        assert accelerator.gather(torch.tensor(5.0)).sum() == 5.0
    assert "gather" not in vars(accelerator)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("_generate_and_score_completions", "self.accelerator.process_index * len(prompts)"),
        ("_calculate_rewards", "gather(rewards_per_func)"),
        ("_generate", "self.accelerator.gather(prompt_lengths)"),
    ],
)
def test_trl_still_takes_as_many_rows_from_every_process(name, line):
    # and so does code that is written for it, which runs here where processes have unequal shares
    source = inspect.getsource(getattr(trl.GRPOTrainer, name))
    assert line in source, f"{name} may take unequal shares now: see whether uneven_gathers is still needed"


def test_a_process_without_prompts_adds_no_row_and_nothing_to_a_sum():
    accelerator = accelerate.Accelerator(cpu=True)
    with uneven_gathers(accelerator, empty=True):
        assert accelerator.gather(torch.ones(3, 2)).shape == (0, 2)
        assert accelerator.gather(torch.tensor(5.0)).sum() == 0.0


# ---- The loop and the window ----------------------------------------------------------------------------------------


def test_the_accelerator_arguments_hold_the_accumulation_plugin():
    source = inspect.getsource(transformers.Trainer)
    assert "gradient_accumulation_plugin=gradient_accumulation_plugin" in source, "_build_accelerator_args"
    fields = {spec.name for spec in dataclasses.fields(accelerate.utils.GradientAccumulationPlugin)}
    assert "sync_with_dataloader" in fields, "GradientAccumulationPlugin.sync_with_dataloader is gone"


def test_backward_divides_by_the_accumulation_and_accumulate_syncs_at_its_end():
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, synced = torch.nn.Linear(1, 1, bias=False), []
    try:
        accelerator.gradient_accumulation_steps = 3
        accelerator.step = 0
        for _ in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(model.weight.sum())
                synced.append(accelerator.sync_gradients)
    finally:
        accelerator.gradient_accumulation_steps = 1
    assert synced == [False, False, True], "Accelerator.accumulate: syncs elsewhere than in the last micro-batch"
    assert model.weight.grad.item() == pytest.approx(1.0), "Accelerator.backward: divides by something else"


def test_the_train_batch_size_is_still_a_property_of_the_arguments():
    # why the global batch is not called train_batch_size
    assert isinstance(inspect.getattr_static(transformers.TrainingArguments, "train_batch_size"), property)


# ---- The order inside the loop and the checkpoint -------------------------------------------------------------------

# what a resumed run restores is reset before it is told that training begins
RESET_BY_THE_LOOP = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
TRAINER = transformers.Trainer


@pytest.mark.parametrize(
    ("method", "pieces"),
    [
        *(
            (TRAINER._inner_training_loop, (f"self.{name} =", "callback_handler.on_train_begin"))
            for name in RESET_BY_THE_LOOP
        ),
        # after a resume the epoch reaches the prompt order
        (TRAINER._run_epoch, ("skip_first_batches(train_dataloader", "underlying_sampler.set_epoch(epoch)")),
        (TRAINER._init_training_state, ("compare_trainer_and_checkpoint_args(self.args",)),
        (TRAINER._save_checkpoint, ("self.state.best_global_step",)),
        # a checkpoint is written below the folder that is asked for
        *((owner._save_checkpoint, ("self._get_output_dir(trial=trial)",)) for owner in (TRAINER, trl.GRPOTrainer)),
        # the processors that are given to a greedy `generate` run after the model's own
        (
            transformers.GenerationMixin._get_logits_processor,
            ("_merge_criteria_processor_list(processors", "if generation_config.do_sample"),
        ),
    ],
)
def test_lines_that_are_relied_on_stand_in_their_order(method, pieces):
    source, position = inspect.getsource(method), 0
    for piece in pieces:
        position = source.find(piece, position)
        assert position >= 0, f"{method.__qualname__} has no `{piece}` after {pieces[0]}"


# ---- Generation -----------------------------------------------------------------------------------------------------

WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "TypicalLogitsWarper": "mass",
    "EpsilonLogitsWarper": "epsilon",
    "EtaLogitsWarper": "epsilon",
}


@pytest.mark.parametrize("name", WARPERS)
def test_a_filter_of_transformers_takes_its_one_number_first(name):
    owner = importlib.import_module("transformers.generation")
    assert compat.parameters_of(getattr(owner, name))[0] == WARPERS[name]


def test_no_processor_follows_the_given_ones_in_greedy_generation():
    source = inspect.getsource(transformers.GenerationMixin._get_logits_processor)
    merge = source.index("_merge_criteria_processor_list(processors")
    assert "processors.append" not in source[merge : source.index("if generation_config.do_sample")]


# ---- The packed forward and the decoding loop -----------------------------------------------------------------------


def test_the_cpu_flash_kernel_has_the_arguments_the_packed_attention_passes():
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._schema
    names = [argument.name for argument in forward.arguments]
    assert names == ["query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"]
    assert [argument.name for argument in backward.arguments][:6] == [
        "grad_out",
        "query",
        "key",
        "value",
        "out",
        "logsumexp",
    ]


def test_generate_hands_its_preparation_to_a_custom_loop():
    mixin = transformers.GenerationMixin
    assert "isinstance(custom_generate, Callable)" in inspect.getsource(mixin._extract_generation_mode_kwargs)
