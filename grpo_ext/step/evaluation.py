"""pass@k and mean@k of evaluations, from the rewards and the threshold that the settings name."""

from collections.abc import Sequence
from typing import Any

import torch

from ..algorithms.advantages import weighted_sum
from ..algorithms.pass_at_k import are_pass_or_fail, pass_metrics
from ..config import GRPOConfig
from ..runtime.messages import logger


class PassAtK:
    def __init__(self, args: GRPOConfig) -> None:
        self.args = args
        self._rewards_B = torch.empty(0)
        self.pass_or_fail = True  # every reward of the evaluations so far was 0 or 1

    def state_dict(self) -> dict[str, Any]:
        return {"pass_or_fail": self.pass_or_fail}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pass_or_fail = state["pass_or_fail"]

    def observe(self, rewards_BF: torch.Tensor | None, weights_F: torch.Tensor, names: Sequence[str]) -> None:
        if rewards_BF is None:
            self._rewards_B = torch.empty(0)
            return
        name = self.args.eval_pass_reward
        self._rewards_B = weighted_sum(rewards_BF, weights_F) if name is None else rewards_BF[:, names.index(name)]
        self.pass_or_fail = self.pass_or_fail and are_pass_or_fail(self._rewards_B.tolist())

    def metrics(self, num_generations: int) -> dict[str, float]:
        """Metrics of the evaluation that was observed last; none where its rewards are unknown."""
        if not len(self._rewards_B):
            return {}
        threshold = self.args.eval_pass_threshold
        if threshold is None and self.pass_or_fail:
            threshold = 1.0
        if threshold is None and self.args.num_generations_eval is not None:
            logger.warning_once(
                "Evaluation logs no pass@k, because not every reward is 0 or 1; set eval_pass_threshold to the least "
                "reward that has passed, or eval_pass_reward to the reward function that says what has."
            )
        return pass_metrics(self._rewards_B.view(-1, num_generations).tolist(), threshold)
