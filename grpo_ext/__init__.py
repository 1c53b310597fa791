"""grpo_ext: GRPO on TRL, with an update that does not depend on how the batch is split over hardware."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithms.advantages import register_advantage_estimator
    from .algorithms.policy_losses import register_policy_loss
    from .config import GRPOConfig
    from .tools.console import Console
    from .trainer import GRPOTrainer

__all__ = ["Console", "GRPOConfig", "GRPOTrainer", "register_advantage_estimator", "register_policy_loss"]
__version__ = "0.1.0"

_HOME = {
    "Console": "tools.console",
    "GRPOConfig": "config",
    "GRPOTrainer": "trainer",
    "register_advantage_estimator": "algorithms.advantages",
    "register_policy_loss": "algorithms.policy_losses",
}

if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> Any:
        # lazily, so that `grpo-ext plan` and the tools need not import TRL's trainer
        if name in _HOME:
            import importlib

            return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
