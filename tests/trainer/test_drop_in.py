"""Drop-in: what works with `trl.GRPOTrainer` works here with the import changed.

Every parameter of TRL's configuration and trainer is known, and settings of the loop act as in stock TRL.
"""

import dataclasses
import inspect
from dataclasses import dataclass

import pytest
import torch
import trl
from datasets import IterableDataset
from torch.nn.utils import parameters_to_vector
from transformers import TrainingArguments

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.decoding import decoding
from tests.support.kept import of_stock
from tests.support.tiny import config_kwargs, letter_reward, prompts, sparse_reward, stock_scores, tiny_model
from tests.support.trainers import SAVE, log_of, make, parameters, ran, update


def test_a_subclass_of_trls_config_is_taken_as_it_is(tmp_path):
    @dataclass
    class Mine(trl.GRPOConfig):
        my_flag: int = 7

    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    sizes |= {"num_generations": 4, "max_completion_length": 12, "max_steps": 2}
    args = Mine(str(tmp_path), **sizes, bf16=False, use_cpu=True, report_to="none")
    trainer = make(tmp_path, args=args)
    assert trainer.args.my_flag == 7
    assert trainer.geometry.global_batch_size == 16
    assert trainer.geometry.rollout_batch_size == 32
    trainer.train()
    assert trainer.state.global_step == 2
    assert args.gradient_accumulation_steps == 4  # the user's object is left alone


@pytest.mark.parametrize(("tied", "cast"), [(True, True), pytest.param(False, False, marks=pytest.mark.full)])
def test_the_reference_of_a_bfloat16_object_is_like_it(tmp_path, tied, cast):
    model = tiny_model(tie_word_embeddings=tied).to(torch.bfloat16)
    start = parameters_to_vector(model.parameters()).clone()
    trainer = make(tmp_path, model=model, beta=0.1, bf16=True, cast_lm_head_to_fp32=cast, max_steps=1)
    reference = trainer.ref_model
    assert not reference.training
    assert torch.equal(parameters_to_vector(reference.parameters()), start)
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == tied
    assert reference.lm_head.weight is not trainer.model.lm_head.weight
    trainer.train()
    assert log_of(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-5)
    assert torch.equal(parameters_to_vector(reference.parameters()), start)


def test_the_reference_of_a_name_takes_its_precision_and_attention(tmp_path):
    tiny_model().save_pretrained(tmp_path / "start")
    kwargs = {"dtype": "bfloat16", "attn_implementation": "eager"}
    trainer = make(tmp_path, model=str(tmp_path / "start"), beta=0.1, bf16=True, model_init_kwargs=kwargs)
    assert trainer.ref_model.dtype == trainer.model.dtype == torch.bfloat16
    assert trainer.ref_model.config._attn_implementation == "eager"


def test_the_users_settings_of_the_reference_stay(tmp_path):
    trainer = make(tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)
    assert (trainer.beta, trainer.args.beta, trainer.args.sync_ref_model) == (0.1, 0.1, True)
    with pytest.raises(ValueError, match=r"beta=0\.0"):
        make(tmp_path, sync_ref_model=True)


def test_a_stream_trains_and_resumes_like_the_data_set_it_streams(tmp_path):
    rows = prompts(10)
    settings = {"shuffle_dataset": False, "max_steps": 5}
    # ten prompts: two full steps and a smaller one, then the next pass
    plain = ran(make(tmp_path / "plain", train_dataset=rows, **settings))

    def streamed(**more):
        stream = IterableDataset.from_generator(lambda: iter(rows.to_list()))
        return make(tmp_path, train_dataset=stream, **settings, **more)

    first, second = streamed(save_strategy="steps", save_steps=4), streamed()
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for trainer in (first, second):
        assert log_of(plain, "num_tokens") == log_of(trainer, "num_tokens")
        assert torch.allclose(parameters(plain), parameters(trainer), atol=1e-7)


def test_a_subclass_may_shape_advantages_of_dynamic_sampling(tmp_path):
    class Silent(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            scored = super()._generate_and_score_completions(inputs)
            scored["advantages"] = 0 * scored["advantages"]
            return scored

    assert not update(tmp_path, cls=Silent, dynamic_sampling=True, max_steps=1)[0].any()
    assert update(tmp_path, dynamic_sampling=True, max_steps=1)[0].any()


@pytest.mark.parametrize("kind", ["moe", "mixtral"])
@pytest.mark.full
def test_a_mixture_configured_to_return_router_logits_trains_as_without(tmp_path, kind):
    trained = {}
    for asked in (False, True):
        for compact in (True, False) if kind == "moe" else (True,):
            model = tiny_model(kind, num_local_experts=4, output_router_logits=asked)
            with decoding(compact):
                trainer = ran(make(tmp_path, model, max_steps=1))
            assert model.config.output_router_logits == asked
            assert log_of(trainer, "aux_loss")[0] > 0
            trained[asked, compact] = (parameters(trainer), log_of(trainer, "aux_loss"))
    for values, loss in trained.values():
        assert torch.equal(values, trained[False, True][0])
        assert loss == trained[False, True][1]


def test_sizes_changed_after_construction_count(tmp_path):
    args = GRPOConfig(**config_kwargs(tmp_path))
    args.global_batch_size, args.num_generations = 8, 2
    trainer = make(tmp_path, args=args)
    assert (trainer.geometry.global_batch_size, trainer.geometry.prompts_per_rollout) == (8, 4)


# set in a run below, which logs what stock TRL logs with the same settings
SMOKE = {
    "adam_beta1": 0.8,
    "data_seed": 7,
    "eval_accumulation_steps": 1,
    "eval_delay": 1,
    "eval_on_start": True,
    "eval_steps": 1,
    "eval_strategy": "steps",
    "generation_kwargs": {"no_repeat_ngram_size": 3},
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "greater_is_better": True,
    "load_best_model_at_end": True,
    "log_completions": True,
    "log_unique_prompts": True,
    "logging_first_step": True,
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "lr_scheduler_type": "cosine_with_min_lr",
    "metric_for_best_model": "eval_reward",
    "num_completions_to_print": 1,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 2,
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 1,
    "save_only_model": True,
    **SAVE,
    "save_total_limit": 1,
    "shuffle_dataset": False,
    "sync_ref_model": True,
    "torch_empty_cache_steps": 1,
    "use_bias_correction_kl": True,
    "warmup_steps": 1,
    "weight_decay": 0.01,
}

# what TRL adds to transformers' settings, beside those of SMOKE: shown by the matrix, by parity cases and by tests of
# their own, refused, or passed on to TRL, where nothing of ours stands in between
KNOWN = """
beta cache_implementation cast_lm_head_to_fp32 chat_template_kwargs delta disable_dropout ds3_gather_for_generation
entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high
generation_batch_size importance_sampling_level log_completions_hub_repo log_multimodal loss_type
mask_truncated_completions max_completion_length max_tool_calling_iterations min_p model_init_kwargs
multi_objective_aggregation num_generations num_iterations off_policy_mask_threshold pad_to_multiple_of
repetition_penalty reward_weights router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos scale_rewards
steps_per_generation temperature top_entropy_quantile top_k top_p transformers_continuous_batching_config
trust_remote_code use_adaptive_entropy use_transformers_continuous_batching use_transformers_paged use_vllm
vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization
vllm_group_port vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
vllm_tensor_parallel_size
"""


def test_every_parameter_of_trls_configuration_and_trainer_is_known():
    """A new one fails here: show what it does, or refuse it, and name it above."""
    trls, transformers_own = (
        {spec.name for spec in dataclasses.fields(config)} for config in (trl.GRPOConfig, TrainingArguments)
    )
    assert trls - transformers_own - {*KNOWN.split(), *SMOKE} == set()
    given = "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks"
    given += " optimizers quantization_config peft_config tools rollout_func environment_factory"
    assert set(inspect.signature(trl.GRPOTrainer.__init__).parameters) - {"self"} == set(given.split())


def logged_keys(cls, folder) -> set[str]:
    tiny_model().save_pretrained(folder / "model")  # stock TRL loads the reference by its name
    settings = {**SMOKE, "beta": 0.1, "reward_weights": [1.0, 0.5], "gradient_accumulation_steps": 2, "max_steps": 2}
    parts = {"train_dataset": prompts(8), "eval_dataset": prompts(4, seed=1)}
    trainer = ran(make(folder, str(folder / "model"), [letter_reward, sparse_reward], cls, **parts, **settings))
    return set().union(*trainer.state.log_history)


@stock_scores
def test_settings_of_the_loop_log_what_stock_trl_logs(tmp_path):
    ours = logged_keys(GRPOTrainer, tmp_path / "ours")
    theirs = of_stock(lambda: logged_keys(trl.GRPOTrainer, tmp_path / "theirs"))
    assert theirs - ours == set()
    assert {"reward", "kl", "eval_reward", "grad_norm"} <= theirs


def test_an_optimizer_and_a_schedule_of_the_users_are_used(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = ran(make(tmp_path, model, optimizers=(optimizer, schedule), max_steps=2))
    assert [line["learning_rate"] for line in trainer.state.log_history if "loss" in line] == [0.25, 0.125]
