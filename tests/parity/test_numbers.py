"""From completions and rewards to numbers: ratios, advantages, masks, metrics and tables; as in stock TRL."""

import logging
import random
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig
from trl.trainer import grpo_trainer

import grpo_ext
from grpo_ext.sampling.engine_check import EngineCheck
from tests.parity.harness import GROUP, ROWS, Known, alike, compare, run_one, train
from tests.parity.scripts import (
    EOS,
    Journal,
    Script,
    by_turn,
    call,
    chat_tokenizer,
    last_text,
    parts_of,
    scripted_model,
    writing_reward,
)
from tests.support.selection import few_of
from tests.support.server import StandIn
from tests.support.tiny import prompts, sparse_reward, stock_scores, tiny_tokenizer
from tests.support.tool_runs import count
from tests.support.trainers import LORA

pytestmark = stock_scores
MEANS = "means over the step, where TRL's are means of the micro-batches' means"
OF_MICRO_BATCHES = [
    Known(part, name, False, MEANS) for part in ("metrics", "lines") for name in ("entropy", "clip_ratio/*")
]


class Server(StandIn):
    """Answers from a script, and cannot tell some log-probabilities."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def update_named_params(self, described: Any, parameters: Iterable[Any]) -> None:
        list(parameters)

    def generate(self, prompts: Any, n: int, max_tokens: int, generation_kwargs: Any, **rest: Any) -> dict[str, Any]:
        ids = [self.script.ids(list(prompt), max_tokens) for prompt in prompts for _ in range(n)]
        return {
            "prompt_ids": prompts,
            "completion_ids": ids,
            "logprobs": [[[one] for one in self.logps(row)] for row in ids],
            "logprob_token_ids": [[[token] for token in row] for row in ids],
        }

    @staticmethod
    def logps(ids: list[int]) -> list[float | None]:
        source = random.Random(str(ids))
        return [None if source.random() < 0.1 else source.uniform(-6, -3) for _ in ids]


@pytest.fixture
def served(monkeypatch):
    """Trainers with `use_vllm` ask a server that reads from the script of their model."""

    class Generation(grpo_trainer.VLLMGeneration):
        def _init_vllm(self) -> None:
            self.vllm_client = Server(self.model.generate)

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Generation)
    monkeypatch.setattr(EngineCheck, "compare", lambda check, *columns: None)  # the server's are drawn at random
    return {"use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate"])
def test_ratios_to_what_vllm_says_are_one_where_it_says_nothing(tmp_path, served, mode):
    settings = {"vllm_importance_sampling_mode": mode, "steps_per_generation": 1 + (mode == "token_mask")}
    stock = alike(tmp_path, parts_of, **settings, **served)
    output = stock.outputs[0][1]
    unknown = output["sampling_per_token_logps"].isnan()
    ratio = output["importance_sampling_ratio"]
    assert unknown.any()
    assert ratio.shape == ((ROWS, 1) if mode.startswith("sequence") else unknown.shape)
    assert mode.startswith("sequence") or bool((ratio[unknown] == 1).all())
    assert any(name.startswith("sampling/importance") for name in stock.metrics[0][1])


def test_tokens_of_tools_have_the_log_probability_zero(tmp_path, served):
    reply = by_turn([call("count", number=1) + EOS, f"a{EOS}", "cut"], [f"b{EOS}", call("count", number=2)])
    settings = {"max_completion_length": 100, "mask_truncated_completions": True, "max_tool_calling_iterations": 2}
    parts = partial(parts_of, reply=reply, tokenizer=chat_tokenizer(), tools=[count])
    stock = alike(tmp_path, parts, **settings, **served)
    output = stock.outputs[0][1]
    told = output["sampling_per_token_logps"][output["completion_mask"].bool() & (output["tool_mask"] == 0)]
    assert len(told) > 5
    assert not told.any()


@pytest.mark.parametrize(("masked", "steps"), [(False, 1), (True, 2)])
def test_completions_that_do_not_end_are_counted_and_may_be_masked(tmp_path, masked, steps):
    stock = alike(tmp_path, parts_of, mask_truncated_completions=masked, steps_per_generation=steps)
    clipped = stock.metrics[0][1]["completions/clipped_ratio"][0]
    assert 0 < clipped < 1
    whole = stock.outputs[0][1]["completion_mask"].any(1).float().mean()
    assert float(whole) == (1 - clipped if masked else 1.0)


@pytest.mark.parametrize("ends", [False, True])
def test_where_all_completions_end_or_none_does(tmp_path, ends):
    reply = by_turn([f"abc{EOS * ends}", f"bd{EOS * ends}"])
    reason = "a mean over no tokens: 0 in TRL, nothing in grpo_ext"
    names = () if ends else ("entropy", "clip_ratio/*")
    known = [Known(part, name, False, reason) for name in names for part in ("metrics", "lines")]
    masked = {"mask_truncated_completions": not ends}
    stock = alike(tmp_path, partial(parts_of, reply=reply), known=known, **masked)
    assert stock.metrics[0][1]["completions/clipped_ratio"] == [float(not ends)]


def test_the_last_token_says_whether_a_completion_has_ended_and_padding_is_an_end(tmp_path):
    def rollout(asked: Any, trainer: Any) -> dict[str, Any]:
        ids = [[5, 1, 6], [5, 6, 0], [5, 6], [5, 1]]
        prompt_ids = [trainer.processing_class(one)["input_ids"] for one in asked]
        return {"prompt_ids": prompt_ids, "completion_ids": [ids[row % 4] for row in range(ROWS)], "logprobs": None}

    stock = alike(tmp_path, partial(parts_of, rollout_func=rollout))
    assert stock.metrics[0][1]["completions/clipped_ratio"] == [0.5]


def test_an_evaluation_tells_the_tokens_of_training_and_adds_none(tmp_path):
    def act(trainer: Any) -> None:
        trainer.train()
        before = trainer.state.num_input_tokens_seen
        trainer.evaluate()
        assert trainer.state.num_input_tokens_seen == before

    stock = alike(
        tmp_path,
        lambda journal: parts_of(journal, eval_dataset=prompts(2, seed=4)),  # TRL shuffles more of them
        act,
        num_generations_eval=2,
    )
    modes = [mode for mode, _ in stock.outputs]
    assert modes == ["train", "eval"]
    records = {mode: record for mode, record in stock.metrics if record}
    assert records["eval"]["num_tokens"] == records["train"]["num_tokens"]


LOSSES: dict[str, dict[str, Any]] = {
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.1},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.2, "sapo_temperature_pos": 0.8},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {
        **{"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5},
        **{"vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5},
    },
    "gspo": {"importance_sampling_level": "sequence"},
    "delta": {"delta": 1.05, "epsilon": 0.01},
    "kl_biased": {"beta": 0.1, "use_bias_correction_kl": False},
    "quantile": {"top_entropy_quantile": 0.3},
    "entropy": {"entropy_coef": 0.05},
    "off_policy": {"off_policy_mask_threshold": 1e-4},
    "moe": {"kind": "moe"},
    "adapter": {"beta": 0.1, "lora": True},  # the reference is the model without it
    "padded to a multiple": {"pad_to_multiple_of": 8},
}
MOVED = {"num_iterations": 2, "max_steps": 2, "learning_rate": 1e-2}  # the policy has moved in the second step


# losses that are like others, and what the loss does not see
ALIKE = {"gspo", "dapo", "dr_grpo", "entropy", "quantile", "moe", "adapter", "padded to a multiple"}


@pytest.mark.parametrize("name", few_of(LOSSES, LOSSES.keys() - ALIKE))
def test_every_loss_has_the_update_and_the_metrics_of_stock_trl(tmp_path, name):
    settings = dict(LOSSES[name])
    kind, lora = settings.pop("kind", "qwen2"), settings.pop("lora", False)

    def parts(journal: Journal) -> dict[str, Any]:
        model = scripted_model(tiny_tokenizer(), kind=kind)
        if "beta" in settings:  # stock TRL loads the reference by its name
            model.save_pretrained(tmp_path / "start")
            model.config._name_or_path = str(tmp_path / "start")
        torch.manual_seed(5)  # of an adapter's start
        return parts_of(
            journal, model=model, train_dataset=prompts(4), peft_config=LoraConfig(**LORA) if lora else None
        )

    stock = alike(tmp_path, parts, **MOVED, **settings)
    assert stock.update.norm() > 1e-3
    assert ("ref_per_token_logps" in stock.outputs[0][1]) == ("beta" in settings)


def test_another_denominator_is_noticed(tmp_path):
    """The negative control."""
    stock, ours = (
        run_one(package, tmp_path / name, parts_of, loss_type=name, **MOVED)
        for package, name in ((trl, "dapo"), (grpo_ext, "grpo"))
    )
    assert any(line.startswith("update: ") for line in compare(stock, ours))


@pytest.mark.parametrize(
    ("sizes", "rows", "old"),
    [
        # a rollout batch is one step: `steps_per_generation` is the accumulation
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 2}, 4, False),
        # 6 x 3 completions with 4 generations: the second step begins within a group
        ({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "steps_per_generation": 6}, 9, True),
    ],
    ids=["whole groups", "cut groups"],
)
def test_a_step_of_several_micro_batches_has_the_update_of_stock_trl(tmp_path, sizes, rows, old):
    parts = partial(parts_of, train_dataset=prompts(rows))
    stock = alike(tmp_path, parts, train, OF_MICRO_BATCHES, **sizes, max_steps=2)
    assert ("old_per_token_logps" in stock.outputs[0][1]) is old


@pytest.mark.parametrize(
    "settings", [{"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}], ids=str
)
def test_several_rewards_of_which_some_do_not_apply(tmp_path, settings):
    def parts(journal: Journal) -> dict[str, Any]:
        return parts_of(journal, reward_funcs=[writing_reward(journal), sparse_reward])

    stock = alike(tmp_path, parts, **settings, reward_weights=[0.5, 2.0])
    assert any(value != value for value in stock.tables[0][1]["rewards"]["sparse_reward"])


@pytest.mark.parametrize(
    ("rows", "aggregation"),
    [
        ({1, 6}, "sum_then_normalize"),
        (set(range(GROUP)), "normalize_then_sum"),
        (set(range(ROWS)), "sum_then_normalize"),
    ],
    ids=["some", "a group", "all"],
)
def test_completions_that_nobody_scored_teach_nothing_and_are_warned_of(tmp_path, caplog, rows, aggregation):
    def reward(completions: Any, **columns: Any) -> list[float | None]:
        return [None if row in rows else float(len(text)) for row, text in enumerate(completions)]

    with caplog.at_level(logging.WARNING):
        stock = alike(
            tmp_path, partial(parts_of, reward_funcs=[reward, reward]), multi_objective_aggregation=aggregation
        )
    assert not stock.outputs[0][1]["advantages"][list(rows)].any()
    assert caplog.text.count("No completion of this rollout was scored") == (2 if len(rows) == ROWS else 0)
    # by both runs of grpo_ext, and by stock TRL where that runs
    assert caplog.text.count("All reward functions returned None for the following kwargs") in (2, 3)


def test_metrics_and_columns_of_reward_functions(tmp_path):
    def parts(journal: Journal) -> dict[str, Any]:
        def reward(completions: Any, log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
            log_extra("length", [len(last_text(one)) for one in completions])
            log_extra("a first", [last_text(one)[:1] for one in completions])
            for value in (1.0, 2.5):
                log_metric("share", value)
            log_metric("other", 3)
            return [float(len(one)) for one in completions]

        def later(completions: Any, log_metric: Any, **columns: Any) -> list[float]:
            log_metric("share", 4.0)
            return [1.0] * len(completions)

        class Judge:
            async def __call__(self, completions: Any, **columns: Any) -> Any:
                return torch.arange(len(completions))

        functions = [reward, later, partial(later, extra=1), Judge()]
        return parts_of(journal, reward_funcs=functions, eval_dataset=prompts(2, seed=4))

    def act(trainer: Any) -> None:
        trainer.train()
        trainer.evaluate()

    stock = alike(tmp_path, parts, act)
    assert stock.metrics[0][1]["share"] == [pytest.approx((1.0 + 2.5 + 4.0 + 4.0) / 4)]
    assert set(stock.tables[0][1]["extra"]) == {"length", "a first"}
