"""The seams in TRL, transformers and Accelerate: each exists with the parameters the package relies on.

A failure names the seam. One file to read when a new release of one of them breaks something.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from functools import cache
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import accelerate
import accelerate.utils
import pytest
import torch
import transformers
import trl
import trl.trainer.grpo_trainer as trl_module
from packaging.version import Version
from trl.trainer.base_trainer import _BaseTrainer

import grpo_ext.config
import grpo_ext.engine.collectives
import grpo_ext.resumable
import grpo_ext.sampling
import grpo_ext.trainer
from grpo_ext.engine.collectives import ragged_scoring
from grpo_ext.resumable import ResumableTrainer
from grpo_ext.sampling import SamplingTrainer
from grpo_ext.trainer import GRPOTrainer

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(function) -> list[str]:
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind not in VARIABLE]
    return [name for name in names if name != "self"]


def require_seam(owner, name: str, expected: list[str], first_only: bool = False) -> None:
    """Fail, naming the seam, unless `owner.name` exists and takes the expected parameters in that order.

    Args:
        first_only: more parameters may follow.
    """
    where = f"{owner.__module__}.{owner.__name__}" if inspect.isclass(owner) else owner.__name__
    seam = f"seam {where}.{name}"
    assert hasattr(owner, name), f"{seam} is gone"
    found = parameters_of(getattr(owner, name))
    compared = found[: len(expected)] if first_only else found
    assert compared == expected, f"{seam} takes ({', '.join(found)}); the package expects ({', '.join(expected)})"


# ---- Versions -------------------------------------------------------------------------------------------------------


def test_the_installed_trl_is_the_one_the_seams_belong_to():
    assert Version("1.16") <= Version(version("trl")) < Version("1.17")


# ---- Methods the trainer overrides ----------------------------------------------------------------------------------

OVERRIDES = {
    "__init__": [
        "model",
        "reward_funcs",
        "args",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "reward_processing_classes",
        "callbacks",
        "optimizers",
        "quantization_config",
        "peft_config",
        "tools",
        "rollout_func",
        "environment_factory",
    ],
    "_build_accelerator_args": [],
    "create_accelerator_and_postprocess": [],
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "log": ["logs", "start_time"],
    "_init_training_state": [
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ],
    "_run_epoch": [
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "trial",
        "ignore_keys_for_eval",
        "start_time",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ],
    "evaluate": ["eval_dataset", "ignore_keys", "metric_key_prefix"],
    "_save_checkpoint": ["model", "trial"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_push_from_checkpoint": ["checkpoint_folder"],
    "_finalize_training": ["trial", "num_train_samples", "start_time"],
    "get_total_train_batch_size": ["args"],
    "get_train_dataloader": [],
    "get_eval_dataloader": ["eval_dataset"],
    "get_test_dataloader": ["test_dataset"],
    "_generate_single_turn": ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "_generate_and_score_completions": ["inputs"],
    "_prepare_inputs": ["generation_batch"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
    "_compute_loss": ["model", "inputs"],
    "_get_per_token_logps_and_entropies": [
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ],
}
OPEN = ("_get_per_token_logps_and_entropies",)  # images' parameters follow and are passed on


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_overridden_method_has_the_expected_parameters(name):
    require_seam(trl.GRPOTrainer, name, OVERRIDES[name], first_only=name in OPEN)


def test_the_loop_resets_what_a_resumed_run_restores_before_it_says_that_training_begins():
    source = inspect.getsource(transformers.Trainer._inner_training_loop)
    begins = source.index("callback_handler.on_train_begin")
    for name in ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"):
        assert 0 < source.index(f"self.{name} =") < begins, f"seam Trainer._inner_training_loop: {name}"


def test_a_checkpoint_is_written_below_the_output_folder_that_is_asked_for():
    for owner in (transformers.Trainer, trl.GRPOTrainer):
        source = inspect.getsource(owner._save_checkpoint)
        assert "self._get_output_dir(trial=trial)" in source, f"seam {owner.__name__}._save_checkpoint"
    assert "self.args.output_dir" not in inspect.getsource(transformers.Trainer._save_checkpoint)


def own_methods() -> set[str]:
    ours = vars(SamplingTrainer) | vars(ResumableTrainer) | vars(GRPOTrainer)
    return {name for name, value in ours.items() if inspect.isfunction(value)}


def test_every_override_of_the_package_is_in_the_list_above():
    overridden = {name for name in own_methods() if hasattr(trl.GRPOTrainer, name)}
    assert overridden == set(OVERRIDES)


def test_the_constructor_is_a_drop_in_replacement():
    ours, theirs = inspect.signature(GRPOTrainer.__init__), inspect.signature(trl.GRPOTrainer.__init__)
    assert list(ours.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert ours.parameters[name].default == parameter.default, f"default of {name}"


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


@pytest.mark.parametrize("name", sorted(set(OVERRIDES) - {"__init__"}))
def test_every_call_in_trl_and_transformers_fits_the_override(name):
    signature = inspect.signature(getattr(GRPOTrainer, name))
    calls = [(owner, call) for owner in CALLERS for call in calls_in(owner, name)]
    if name not in ("train", "prediction_step", "training_step"):
        assert calls, f"seam {name} is not called any more"
    for owner, call in calls:
        positional = [None] * len([a for a in call.args if not isinstance(a, ast.Starred)])
        keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        try:
            signature.bind(None, *positional, **keywords)
        except TypeError as error:
            pytest.fail(f"seam {name}: {owner.__name__} calls {ast.unparse(call)}, which does not fit: {error}")


# ---- What the trainer calls and reads -------------------------------------------------------------------------------

CALLED = [
    (trl.GRPOTrainer, "compute_loss", ["model", "inputs", "return_outputs", "num_items_in_batch"]),
    (trl.GRPOTrainer, "compute_loss_context_manager", []),
    (trl.GRPOTrainer, "_tokenize_prompts", ["prompts"]),
    (trl.GRPOTrainer, "_remove_unused_columns", ["dataset", "description"]),
    (accelerate.Accelerator, "accumulate", []),
    (accelerate.Accelerator, "backward", ["loss"]),
    (accelerate.Accelerator, "unwrap_model", ["model"]),
]


@pytest.mark.parametrize(("owner", "name", "expected"), CALLED, ids=[name for _, name, _ in CALLED])
def test_a_called_method_has_the_expected_parameters(owner, name, expected):
    require_seam(owner, name, expected, first_only=True)


FUNCTIONS = [
    ("trl.models", "unwrap_model_for_generation", ["model", "accelerator"]),
    ("trl.models", "prepare_deepspeed", ["model", "accelerator"]),
    ("trl.models", "prepare_fsdp", ["model", "accelerator"]),
    ("trl.trainer.utils", "add_fused_lm_head", ["model", "temperature", "cast_lm_head_to_fp32"]),
    ("trl.trainer.utils", "create_model_from_path", ["model_id"]),
    ("trl.trainer.callbacks", "SyncRefModelCallback", ["ref_model", "accelerator"]),
    ("trl.models.utils", "disable_gradient_checkpointing", ["model", "gradient_checkpointing_kwargs"]),
    ("trl.extras.profiling", "profiling_context", ["trainer", "name"]),
    ("trl.trainer.utils", "get_config_model_id", ["config"]),
    ("trl.trainer.utils", "is_async_callable", ["func"]),
    ("trl.trainer.utils", "pad", ["tensors", "padding_value", "padding_side", "pad_to_multiple_of"]),
    ("accelerate.utils", "gather", ["tensor"]),
    ("accelerate.utils", "gather_object", ["object"]),
    ("accelerate.utils", "broadcast_object_list", ["object_list"]),
]


@pytest.mark.parametrize(("module", "name", "expected"), FUNCTIONS, ids=[name for _, name, _ in FUNCTIONS])
def test_an_imported_function_has_the_expected_parameters(module, name, expected):
    require_seam(importlib.import_module(module), name, expected, first_only=True)


def test_the_constructor_reads_beta_for_the_reference_model_alone():
    # it is shown zero where our own reference follows: an adapter's copy, the attribute, two checks
    tree = tree_of(trl.GRPOTrainer.__init__)
    read = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "beta"]
    assert sum(isinstance(node.ctx, ast.Load) for node in read) == 4, "seam GRPOTrainer.__init__ reads beta elsewhere"


def test_generation_is_unwrapped_with_the_keywords_the_package_passes():
    names = parameters_of(trl.models.unwrap_model_for_generation)
    for keyword in ("gather_deepspeed3_params", "generation_kwargs", "gradient_checkpointing_kwargs"):
        assert keyword in names, f"seam unwrap_model_for_generation lost {keyword}"


def attributes(tree: ast.AST, context: type) -> dict[str, int]:
    """Names X of `self.X` that a tree reads (ast.Load) or sets (ast.Store), with a line."""
    return {
        node.attr: node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, context)
    }


def test_every_attribute_the_trainer_reads_is_set_somewhere():
    sources = [inspect.getsource(module) for module in (grpo_ext.sampling, grpo_ext.resumable, grpo_ext.trainer)]
    tree = ast.parse("\n".join(sources))
    read, own = attributes(tree, ast.Load), set(attributes(tree, ast.Store)) | own_methods()
    assert {"_dist", "_metrics", "eos_token_ids"} <= set(read)
    theirs = set()
    for owner in CALLERS:
        theirs |= set(attributes(tree_of(owner), ast.Store)) | set(dir(owner))
    missing = {name: line for name, line in read.items() if name not in own | theirs | set(dir(GRPOTrainer))}
    assert missing == {}, (
        f"seams (attributes of TRL's trainer) that are gone, with the line in resumable.py + trainer.py: {missing}"
    )


def test_an_attribute_that_is_gone_would_be_found():
    tree = ast.parse("class T:\n    def f(self):\n        return self._gone + self.kept\n        self.kept = 1")
    assert set(attributes(tree, ast.Load)) - set(attributes(tree, ast.Store)) == {"_gone"}


def test_every_setting_the_config_reads_is_a_field_of_trls():
    tree = ast.parse(inspect.getsource(grpo_ext.config))
    config = grpo_ext.config.GRPOConfig
    known = {spec.name for spec in dataclasses.fields(config)} | set(dir(config)) | {"geometry"}
    missing = {name: line for name, line in attributes(tree, ast.Load).items() if name not in known}
    assert missing == {}, f"seams (fields of trl.GRPOConfig) that are gone, with grpo_ext/config.py's line: {missing}"
    assert {"steps_per_generation", "generation_batch_size", "num_generations_eval"} <= {
        spec.name for spec in dataclasses.fields(trl.GRPOConfig)
    }


def test_the_trainer_still_returns_the_fields_a_rollout_is_made_of():
    source = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    for name in (
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
        "tool_mask",
    ):
        assert f'output["{name}"]' in source or f'"{name}": {name}' in source, f"seam: TRL returns no {name} any more"


def test_scoring_asks_the_model_for_what_the_package_expects():
    source = inspect.getsource(trl.GRPOTrainer._get_per_token_logps_and_entropies)
    for part in ("fused_lm_head=True", "outputs.log_probs", "outputs.entropy", '"output_router_logits"'):
        assert part in source, f"seam _get_per_token_logps_and_entropies: no {part} any more"


# ---- Collectives ----------------------------------------------------------------------------------------------------


def test_the_patched_names_of_trls_module_are_accelerates():
    assert trl_module.gather is accelerate.utils.gather, "seam trl.trainer.grpo_trainer.gather is another function"
    assert trl_module.gather_object is accelerate.utils.gather_object, "seam trl...gather_object is another function"


SCORING = ("_generate_and_score_completions", "_generate", "_calculate_rewards", "_generate_single_turn")
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


def test_scoring_gathers_only_through_the_names_that_are_patched():
    used = set().union(*(collectives_in(name) for name in SCORING))
    unknown = used - {"self.accelerator.gather", "gather", "gather_object"}
    assert unknown == set(), f"seam: TRL's scoring uses collectives that ragged_scoring does not replace: {unknown}"
    assert {"self.accelerator.gather", "gather"} <= used


def test_ragged_scoring_replaces_all_three_names_and_puts_them_back():
    accelerator = accelerate.Accelerator(cpu=True)
    before = (trl_module.gather, trl_module.gather_object)
    with ragged_scoring(accelerator, ghost=False):
        assert trl_module.gather is not before[0]
        assert trl_module.gather_object is not before[1]
        assert "gather" in vars(accelerator)
        assert accelerator.gather(torch.tensor([1, 2])).tolist() == [1, 2]
        assert trl_module.gather_object(["a"]) == ["a"]
    assert (trl_module.gather, trl_module.gather_object) == before
    assert "gather" not in vars(accelerator)


def test_a_ghost_adds_no_row_and_nothing_to_a_sum():
    accelerator = accelerate.Accelerator(cpu=True)
    with ragged_scoring(accelerator, ghost=True):
        assert accelerator.gather(torch.ones(3, 2)).shape == (0, 2)
        assert trl_module.gather(torch.tensor(5.0)).sum() == 0.0
        assert trl_module.gather_object(["a"]) == []


# ---- The loop and the window ----------------------------------------------------------------------------------------


def test_the_accelerator_arguments_hold_the_accumulation_plugin():
    source = inspect.getsource(transformers.Trainer)
    assert "gradient_accumulation_plugin=gradient_accumulation_plugin" in source, "seam _build_accelerator_args"
    fields = {spec.name for spec in dataclasses.fields(accelerate.utils.GradientAccumulationPlugin)}
    assert "sync_with_dataloader" in fields, "seam GradientAccumulationPlugin.sync_with_dataloader is gone"


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
    assert synced == [False, False, True], "seam Accelerator.accumulate: syncs elsewhere than in the last micro-batch"
    assert model.weight.grad.item() == pytest.approx(1.0), "seam Accelerator.backward: divides by something else"


def test_the_loop_sets_the_epoch_of_the_batch_sampler_after_skipping():
    source = inspect.getsource(transformers.Trainer._run_epoch)
    skip, reach = source.find("skip_first_batches(train_dataloader"), source.find("underlying_sampler.set_epoch(epoch)")
    assert 0 <= skip < reach, "seam Trainer._run_epoch: after a resume the epoch does not reach the prompt order"


def test_the_train_batch_size_is_still_a_property_of_the_arguments():
    # why the global batch is not called train_batch_size
    assert isinstance(inspect.getattr_static(transformers.TrainingArguments, "train_batch_size"), property)


# ---- Generation -----------------------------------------------------------------------------------------------------

WARPERS = {
    "TemperatureLogitsWarper": ["temperature"],
    "TopKLogitsWarper": ["top_k"],
    "TopPLogitsWarper": ["top_p"],
    "MinPLogitsWarper": ["min_p"],
    "TypicalLogitsWarper": ["mass"],
    "EpsilonLogitsWarper": ["epsilon"],
    "EtaLogitsWarper": ["epsilon"],
}


@pytest.mark.parametrize("name", WARPERS)
def test_a_filter_of_transformers_takes_its_one_number_first(name):
    owner = importlib.import_module("transformers.generation")
    require_seam(owner, name, WARPERS[name], first_only=True)


def test_greedy_generation_puts_the_given_processors_last():
    source = inspect.getsource(transformers.GenerationMixin._get_logits_processor)
    merge, warpers = (
        source.find("_merge_criteria_processor_list(processors"),
        source.find("if generation_config.do_sample"),
    )
    assert 0 <= merge < warpers, "seam _get_logits_processor: the order of the processors has changed"
    between = source[merge:warpers]
    assert "processors.append" not in between, "seam _get_logits_processor: processors follow the given ones"


# ---- The helper can fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (
            lambda self, model, inputs, extra: None,
            r"seam trl\..*GRPOTrainer\._compute_loss takes \(model, inputs, extra\)",
        ),
        (
            lambda self, inputs, model: None,
            r"_compute_loss takes \(inputs, model\); the package expects \(model, inputs\)",
        ),
    ],
)
def test_a_moved_seam_is_named(replacement, message):
    with mock.patch.object(trl.GRPOTrainer, "_compute_loss", replacement), pytest.raises(AssertionError, match=message):
        require_seam(trl.GRPOTrainer, "_compute_loss", OVERRIDES["_compute_loss"])


def test_a_missing_seam_is_named():
    with pytest.raises(AssertionError, match=r"seam trl\.trainer\.grpo_trainer\.GRPOTrainer\._gone is gone"):
        require_seam(trl.GRPOTrainer, "_gone", [])


def test_the_package_is_the_one_of_this_checkout():
    assert Path(grpo_ext.trainer.__file__).parents[1] == Path(__file__).parents[2]


# ---- The packed forward and the decoding loop -----------------------------------------------------------------------


def test_the_fused_head_takes_shifted_labels_and_runs_the_backbone_by_its_base_model():
    source = inspect.getsource(trl.trainer.utils.add_fused_lm_head)
    for piece in ("shift_labels is None", "backbone_outputs.last_hidden_state", 'backbone_attr = "base_model"'):
        assert piece in source, f"seam add_fused_lm_head: `{piece}` is gone"


def test_the_heads_kernel_reads_its_tile_height_from_the_module():
    from trl.kernels import chunked_logprob

    assert isinstance(chunked_logprob.TOKEN_CHUNK_SIZE, int)
    for method in (chunked_logprob.ChunkedLogProbFunction.forward, chunked_logprob.ChunkedLogProbFunction.backward):
        assert "range(0, N, TOKEN_CHUNK_SIZE)" in inspect.getsource(method), "seam TOKEN_CHUNK_SIZE moved"


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
    require_seam(mixin, "_prefill", ["input_ids", "generation_config", "model_kwargs"], first_only=True)
    require_seam(mixin, "_update_model_kwargs_for_generation", ["outputs", "model_kwargs"], first_only=True)
    require_seam(mixin, "prepare_inputs_for_generation", ["input_ids", "next_sequence_length"], first_only=True)
    assert "isinstance(custom_generate, Callable)" in inspect.getsource(mixin._extract_generation_mode_kwargs)
