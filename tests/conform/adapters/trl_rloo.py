"""Stock TRL's RLOO trainer. It has no tools, so here every token counts as sampled."""

import tempfile
from typing import Any

import trl

from tests.conform.adapters import trl as grpo
from tests.conform.exact import Definition
from tests.conform.given import GROUP, MAX_LENGTH, Gradient, Objective, Row, Split, padded

NAME, VERSION, ENTRY = "TRL, RLOO", grpo.VERSION, "RLOOTrainer.train"
OBJECTIVES = ("rloo",)
DEFINITION = Definition(trains_tools=True)


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
            logps = padded(self.given["logprobs"], MAX_LENGTH, device=output["old_logps"].device)
            output["old_logps"] = logps.sum(1)
            return output

    sizes = {"num_generations": GROUP, "max_completion_length": MAX_LENGTH, **grpo.batch_sizes(split)}
    with tempfile.TemporaryDirectory() as folder:
        args = trl.RLOOConfig(folder, beta=0.0, shuffle_dataset=False, **grpo.SGD, **grpo.ON_CPU, **grpo.QUIET, **sizes)
        return grpo.update(Given, args, rows, policy, reference)
