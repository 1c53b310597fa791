"""The names of the two trainers that `grpo-ext check` compares, and the settings of a run converted to stock TRL's.

Settings of this package that only lay out a run are dropped; they change nothing that is learned.
"""

from dataclasses import fields
from typing import Any

from ..batching.sizes import Settings, geometry_of
from ..errors import GrpoExtError, counted
from ..settings import named, truncating_in

OURS, STOCK = "grpo_ext", "trl"


def refuse_ours(settings: Settings) -> None:
    """Raise a GrpoExtError for settings that change what is learned and that stock TRL does not have.

    None, False or 0 turns them off.
    """
    filters = truncating_in(settings) or settings.get("generation_kwargs")
    without = set() if filters else {"sampling_mask"}  # it changes nothing if all tokens are kept
    if used := [
        f"{name}={settings[name]!r}" for name in sorted({*named("unlike_trl")} - without) if settings.get(name)
    ]:
        raise GrpoExtError(
            f"{', '.join(used)}: stock TRL has no such setting and would learn something else; leave it out to "
            "compare with stock TRL."
        )


def stock_config(settings: Settings, processes: int) -> dict[str, Any]:
    """Express the same run in the fields of `trl.GRPOConfig`; a GrpoExtError if that is impossible."""
    from trl import GRPOConfig

    refuse_ours(settings)
    geometry = geometry_of(settings, processes)
    batch, unit = geometry.global_batch_size, geometry.micro_batch_size * processes
    if batch % unit:
        raise GrpoExtError(
            f"micro-batches of {geometry.micro_batch_size} on {counted(processes, 'process')} do not divide "
            f"global_batch_size={batch}, as stock TRL needs; use a size of which {batch} is a multiple"
        )
    shared = {spec.name for spec in fields(GRPOConfig) if spec.init} - {"generation_batch_size"}
    return {
        **{name: value for name, value in settings.items() if name in shared},
        "gradient_accumulation_steps": batch // unit,
        "steps_per_generation": geometry.rollout_batch_size // unit,
    }
