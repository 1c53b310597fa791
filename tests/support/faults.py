"""Planted faults: one line of the package changed, and the tests of `make test` that have to fail then."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One line that is changed.

    Attributes:
        path: of the file, under grpo_ext/.
        before: text that occurs once in the file.
        after: what stands there instead.
        tests: pytest arguments of the tests that catch it, in `make test`.
    """

    path: str
    before: str
    after: str
    tests: str


FAULTS = [
    Fault(
        "algorithms/losses.py",
        "return mask / (completions * cfg.max_completion_length)",
        "return mask / (completions * mask.size(1))",
        "tests/unit/algorithms/test_losses.py -k aggregation",
    ),
    Fault(
        "algorithms/losses.py",
        "return mask / tokens_B[:, None] / len(counts.group_tokens)",
        "return mask / tokens_B[:, None] / len(set(groups_B))",
        "tests/unit/algorithms/test_losses.py -k prompt_mean",
    ),
    Fault(
        "algorithms/losses.py",
        "kl = torch.exp(delta) - delta - 1",
        "kl = torch.exp(delta) - 1",
        "tests/parity/test_numbers.py -k kl_biased",
    ),
    Fault(
        "algorithms/losses.py",
        ".clamp(max=cfg.epsilon_high).detach() * advantages",
        ".clamp(max=cfg.epsilon_high) * advantages",
        "tests/parity/test_numbers.py -k cispo",
    ),
    Fault(
        "algorithms/losses.py",
        "return float(value) - tolerance",
        "return float(value)",
        "tests/unit/algorithms/test_losses.py -k entropy",
    ),
    Fault(
        "algorithms/advantages.py",
        "keepdim=True) / (count - 1)",
        "keepdim=True) / count",
        "tests/unit/algorithms/test_advantages.py",
    ),
    Fault(
        "algorithms/keyed_random.py",
        "return mix(mix(start, prompts_B), generations_B)",
        "return mix(start, prompts_B + generations_B)",
        "tests/unit/algorithms/test_keyed_random.py",
    ),
    Fault(
        "algorithms/keyed_random.py",
        "return torch.searchsorted(cdf, target, right=True)",
        "return torch.searchsorted(cdf, target, right=False)",
        "tests/unit/algorithms/test_keyed_random.py",
    ),
    Fault(
        "batching/packing.py",
        "positions_N=position[segment_N] + within_N",
        "positions_N=within_N",
        "tests/unit/batching/test_packing.py tests/unit/forward/test_packed.py",
    ),
    Fault(
        "batching/packing.py",
        "run = length if keep_last else max(length - 1, 0)",
        "run = max(length - 1, 0)",
        "tests/unit/batching/test_packing.py",
    ),
    Fault(
        "batching/micro_batches.py",
        "MicroBatch((filler,), weight=0.0)",
        "MicroBatch((filler,))",
        "tests/unit/batching/test_micro_batches.py",
    ),
    Fault(
        "batching/micro_batches.py",
        "count = ceil_div(len(rows), max_rows)",
        "count = len(rows) // max_rows + 1",
        "tests/unit/batching/test_micro_batches.py",
    ),
    Fault(
        "batching/sizes.py",
        "chunks = even_slice(ceil_div(num_prompts, groups), num_processes, rank)",
        "chunks = even_slice(num_prompts // groups, num_processes, rank)",
        "tests/unit/batching/test_sizes.py",
    ),
    Fault(
        "precision/fixed_point.py",
        ".mul_(2.0**FRACTION_BITS).round_()",
        ".mul_(2.0**FRACTION_BITS)",
        "tests/unit/precision/test_fixed_point.py",
    ),
    Fault(
        "precision/fixed_point.py",
        "if largest > limit:",
        "if largest > 2 * limit:",
        "tests/unit/precision/test_fixed_point.py",
    ),
    Fault(
        "forward/tiled_log_probs.py",
        "constant = up + entropy_up * entropy",
        "constant = up",
        "tests/unit/forward/test_tiled_log_probs.py -k derivative",
    ),
    Fault(
        "forward/shared_prefix.py",
        "(max(start, stop - window + 1), stop)",
        "(max(start, stop - window), stop)",
        "tests/unit/forward/test_varlen.py tests/unit/forward/test_packed.py",
    ),
    Fault(
        "forward/routing.py",
        "known_NK = recorded_NK != LIVE",
        "known_NK = recorded_NK > LIVE + 1",
        "tests/unit/forward/test_routing.py",
    ),
    Fault(
        "forward/rows.py",
        "places.amin(1, keepdim=True) if width",
        "places.amin(1, keepdim=True) + 1 if width",
        "tests/unit/forward/test_packed.py -k layout",
    ),
    Fault(
        "rewards/guard.py",
        "if number is not None and not abs(number) <= _LARGEST",
        "if number is not None and abs(number) > _LARGEST",
        "tests/unit/rewards/test_guard.py",
    ),
    Fault(
        "rewards/guard.py",
        "if len(values) != self.record.rows:",
        "if len(values) < self.record.rows:",
        "tests/unit/rewards/test_guard.py",
    ),
    Fault(
        "rollouts/keyed.py",
        "prompts = (torch.tensor(list(request.prompts)) + request.first_prompt)",
        "prompts = torch.arange(len(request.prompts))",
        "tests/unit/rollouts/test_keyed.py -k keys",
    ),
    Fault(
        "rollouts/decoding.py",
        "count = len(done) - sum(done)",
        "count = len(done) - sum(done[1:])",
        "tests/unit/rollouts/test_decoding.py",
    ),
    Fault(
        "run/checkpoint.py",
        'if digest != expected["sha256"]:',
        "if not digest:",
        "tests/trainer/test_checkpoints.py -k whole",
    ),
    Fault(
        "step/metrics.py",
        "        if weight:\n",
        "        if True:\n",
        "tests/unit/step/test_gradients_and_metrics.py",
    ),
    Fault(
        "runtime/out_of_memory.py",
        "size = self.limit = ceil_div(len(piece), 2)",
        "size = ceil_div(len(piece), 2)",
        "tests/unit/runtime/test_out_of_memory.py",
    ),
    Fault(
        "checks/model.py",
        "yield f\"{path or 'model'} ({type(module).__name__})",
        'yield f"{path} ({type(model).__name__})',
        "tests/unit/test_checks.py",
    ),
    Fault(
        "tools/check/comparison.py",
        "return difference / norm if norm else",
        "return difference if norm else",
        "tests/unit/tools/test_check.py -k error_is",
    ),
]
