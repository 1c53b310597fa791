"""Drop-in: what works with `trl.GRPOTrainer` works here with the import changed."""

from dataclasses import dataclass

import pytest
import torch
import trl
from datasets import IterableDataset
from torch.nn.utils import parameters_to_vector

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer
from tests.support.trainers import log_of, make, parameters, update


def test_a_subclass_of_trls_config_is_taken_as_it_is(tmp_path):
    @dataclass
    class Mine(trl.GRPOConfig):
        my_flag: int = 7

    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    sizes |= {"num_generations": 4, "max_completion_length": 12, "max_steps": 2}
    args = Mine(str(tmp_path), **sizes, bf16=False, use_cpu=True, report_to="none")
    trainer = GRPOTrainer(tiny_model(), letter_reward, args, prompts(), processing_class=tiny_tokenizer())
    assert trainer.args.my_flag == 7
    assert trainer.geometry.global_batch_size == 16
    assert trainer.geometry.rollout_batch_size == 32
    trainer.train()
    assert trainer.state.global_step == 2
    assert args.gradient_accumulation_steps == 4  # the user's object is left alone


@pytest.mark.parametrize(("tied", "cast"), [(True, True), (False, False)])
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
    settings = {"shuffle_dataset": False, "max_steps": 7}
    # ten prompts: two full steps and a smaller one, then the next pass
    plain = make(tmp_path / "plain", train_dataset=rows, **settings)
    plain.train()

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

    assert not update(tmp_path, cls=Silent, dynamic_sampling=True)[0].any()
    assert update(tmp_path, dynamic_sampling=True)[0].any()


@pytest.mark.parametrize("kind", ["moe", "mixtral"])
def test_a_mixture_configured_to_return_router_logits_trains_as_without(tmp_path, kind):
    trained = {}
    for asked in (False, True):
        for compact in (True, False) if kind == "moe" else (True,):
            model = tiny_model(kind, num_local_experts=4, output_router_logits=asked)
            trainer = make(tmp_path, model, max_steps=1, compact_rollouts=compact)
            trainer.train()
            assert model.config.output_router_logits == asked
            assert log_of(trainer, "aux_loss")[0] > 0
            trained[asked, compact] = (parameters(trainer), log_of(trainer, "aux_loss"))
    for values, loss in trained.values():
        assert torch.equal(values, trained[False, True][0])
        assert loss == trained[False, True][1]


def test_sizes_changed_after_construction_count(tmp_path):
    args = GRPOConfig(**config_kwargs(tmp_path))
    args.global_batch_size, args.num_generations = 8, 2
    trainer = GRPOTrainer(tiny_model(), letter_reward, args, prompts(), processing_class=tiny_tokenizer())
    assert (trainer.geometry.global_batch_size, trainer.geometry.prompts_per_rollout) == (8, 4)
