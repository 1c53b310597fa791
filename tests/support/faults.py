"""Planted faults: one line of the package changed, and the tests of `make test` that have to fail then."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One line that is changed."""

    path: str  # under grpo_ext/
    before: str  # occurs once in the file
    after: str
    tests: str  # pytest arguments of the tests that catch it, in `make test`


ADVANTAGES = "tests/unit/algorithms/test_advantages.py"
CHECK = "tests/unit/tools/test_check.py"
CHECKPOINTS = "tests/trainer/test_checkpoints.py"
CHECKS = "tests/unit/test_checks.py"
CUTS = "tests/unit/batching/test_micro_batches.py"
DECODING = "tests/unit/rollouts/test_decoding.py"
FIXED_POINT = "tests/unit/precision/test_fixed_point.py"
GUARD = "tests/unit/rewards/test_guard.py"
HEAD = "tests/unit/forward/test_tiled_log_probs.py"
KEYED = "tests/unit/rollouts/test_keyed.py"
LOSSES = "tests/unit/algorithms/test_losses.py"
MEMORY = "tests/unit/runtime/test_out_of_memory.py"
METRICS = "tests/unit/step/test_gradients_and_metrics.py"
NUMBERS = "tests/parity/test_numbers.py"
PACKED = "tests/unit/forward/test_packed.py"
PACKING = "tests/unit/batching/test_packing.py"
RANDOM = "tests/unit/algorithms/test_keyed_random.py"
ROUTING = "tests/unit/forward/test_routing.py"
SIZES = "tests/unit/batching/test_sizes.py"
VARLEN = "tests/unit/forward/test_varlen.py"

FAULTS = [
    Fault(
        "algorithms/losses.py",
        "(completions * cfg.max_completion_length)",
        "(completions * mask.size(1))",
        f"{LOSSES} -k aggregation",
    ),
    Fault("algorithms/losses.py", "/ len(counts.group_tokens)", "/ len(set(groups_B))", f"{LOSSES} -k prompt_mean"),
    Fault(
        "algorithms/losses.py",
        "kl = torch.exp(delta) - delta - 1",
        "kl = torch.exp(delta) - 1",
        f"{NUMBERS} -k kl_biased",
    ),
    Fault(
        "algorithms/losses.py",
        ".clamp(max=cfg.epsilon_high).detach() * advantages",
        ".clamp(max=cfg.epsilon_high) * advantages",
        f"{NUMBERS} -k cispo",
    ),
    Fault("algorithms/losses.py", "return float(value) - tolerance", "return float(value)", f"{LOSSES} -k entropy"),
    Fault("algorithms/advantages.py", "keepdim=True) / (count - 1)", "keepdim=True) / count", ADVANTAGES),
    Fault(
        "algorithms/keyed_random.py",
        "mix(mix(start, prompts_B), generations_B)",
        "mix(start, prompts_B + generations_B)",
        RANDOM,
    ),
    Fault(
        "algorithms/keyed_random.py",
        "searchsorted(cdf, target, right=True)",
        "searchsorted(cdf, target, right=False)",
        RANDOM,
    ),
    Fault(
        "batching/packing.py",
        "positions_N=position[segment_N] + within_N",
        "positions_N=within_N",
        f"{PACKING} {PACKED}",
    ),
    Fault(
        "batching/packing.py", "run = length if keep_last else max(length - 1, 0)", "run = max(length - 1, 0)", PACKING
    ),
    Fault("batching/micro_batches.py", "MicroBatch((filler,), weight=0.0)", "MicroBatch((filler,))", CUTS),
    Fault(
        "batching/micro_batches.py", "count = ceil_div(len(rows), max_rows)", "count = len(rows) // max_rows + 1", CUTS
    ),
    Fault(
        "batching/sizes.py",
        "even_slice(ceil_div(num_prompts, groups), num",
        "even_slice(num_prompts // groups, num",
        SIZES,
    ),
    Fault("precision/fixed_point.py", ".mul_(2.0**FRACTION_BITS).round_()", ".mul_(2.0**FRACTION_BITS)", FIXED_POINT),
    Fault("precision/fixed_point.py", "if largest > limit:", "if largest > 2 * limit:", FIXED_POINT),
    Fault(
        "forward/tiled_log_probs.py", "constant = up + entropy_up * entropy", "constant = up", f"{HEAD} -k derivative"
    ),
    Fault(
        "forward/lm_head.py",
        'config.model_type == "hyperclovax" else 1 / divisor',
        'config.model_type == "hyperclovax" else divisor',
        "tests/unit/forward/test_lm_head.py",
    ),
    Fault(
        "forward/shared_prefix.py",
        '"window_size_left": part.window - 1',
        '"window_size_left": part.window',
        f"{VARLEN} {PACKED}",
    ),
    Fault("forward/routing.py", "known_NK = recorded_NK != LIVE", "known_NK = recorded_NK > LIVE + 1", ROUTING),
    Fault(
        "forward/rows.py",
        "places.amin(1, keepdim=True) if width",
        "places.amin(1, keepdim=True) + 1 if width",
        f"{PACKED} -k layout",
    ),
    Fault("rewards/guard.py", "not abs(number) <= _LARGEST", "abs(number) > _LARGEST", GUARD),
    Fault("rewards/guard.py", "if len(values) != self.record.rows:", "if len(values) < self.record.rows:", GUARD),
    Fault(
        "rollouts/keyed.py",
        "(torch.tensor(list(request.prompts)) +",
        "(torch.arange(len(request.prompts)) +",
        f"{KEYED} -k keys",
    ),
    Fault("rollouts/decoding.py", "count = len(done) - sum(done)", "count = len(done) - sum(done[1:])", DECODING),
    Fault("run/checkpoint.py", 'if digest != expected["sha256"]:', "if not digest:", f"{CHECKPOINTS} -k whole"),
    Fault("step/statistics.py", "        if weight:\n", "        if True:\n", METRICS),
    Fault(
        "runtime/out_of_memory.py",
        "size = self.limit = ceil_div(len(piece), 2)",
        "size = ceil_div(len(piece), 2)",
        MEMORY,
    ),
    Fault(
        "checks/model.py",
        "yield f\"{path or 'model'} ({type(module).__name__})",
        'yield f"{path} ({type(model).__name__})',
        CHECKS,
    ),
    Fault(
        "tools/check/comparison.py",
        "return difference / norm if norm else",
        "return difference if norm else",
        f"{CHECK} -k error_is",
    ),
]


if __name__ == "__main__":
    import sys

    from tests.support.plant import main

    sys.exit(main(sys.argv[1:]))
