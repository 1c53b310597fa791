"""Stock TRL's RLOO trainer. It has no tools, so here every token counts as sampled."""

import tempfile
from typing import Any

import trl

from tests.conform.adapters import trl as grpo
from tests.conform.exact import Definition
from tests.conform.given import MOST, Gradient, Objective, Row, Split, padded

NAME, VERSION, ENTRY = "TRL, RLOO", grpo.VERSION, "RLOOTrainer.train"
OBJECTIVES = ("rloo",)
DEFINITION = Definition(trains_tools=True)
OTHERS = (
    "loss_type",
    "top_entropy_quantile",
    "entropy_coef",
    "epsilon_high",
    "importance_sampling_level",
    "mask_truncated_completions",
)


def gradient(objective: Objective, split: Split, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    class Given(trl.RLOOTrainer):  # type: ignore[misc]
        def __init__(self, *, rollout_func: Any, **arguments: Any) -> None:
            self.rollout = rollout_func
            super().__init__(**arguments)

        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            self.given = self.rollout(prompts, self)
            return self.given["prompt_ids"], None, {}

        def _generate_single_turn(self, *_: Any) -> list[list[int]]:
            return self.given["completion_ids"]  # type: ignore[no-any-return]

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            logps = padded(self.given["logprobs"], MOST, device=output["old_logps"].device)
            output["old_logps"] = logps.sum(1)
            return output

    settings = {name: value for name, value in grpo.settings(objective).items() if name not in OTHERS}
    with tempfile.TemporaryDirectory() as folder:
        args = trl.RLOOConfig(folder, **settings, **grpo.sizes(split))
        return grpo.update(Given, args, rows, policy, reference)
