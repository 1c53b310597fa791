"""Planted faults: one line of the package changed, and the tests of `make test` that have to fail then.

python -m tests.support.faults         plants all of them, one at a time, in a copy; half a minute each
python -m tests.support.faults 3 7     some, by their numbers

Prints "caught" or "MISSED" for each. Exit status 1 where one was missed, or where its text does not occur once.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAILED = 1  # pytest's exit status where tests ran and failed


@dataclass(frozen=True)
class Fault:
    """One line that is changed."""

    path: str  # under grpo_ext/
    before: str  # occurs once in the file
    after: str
    tests: str  # pytest arguments of the tests that catch it, in `make test`


ADVANTAGES = "tests/unit/algorithms/test_advantages.py"
CASES = "tests/trainer/test_cases.py"
REASONS = "tests/trainer/test_case_reasons.py"
CHECK = "tests/unit/tools/test_check.py"
CHECKPOINTS = "tests/trainer/test_checkpoints.py"
CHECKS = "tests/unit/test_checks.py"
CUTS = "tests/unit/batching/test_micro_batches.py"
DECODING = "tests/unit/sampling/test_decoding.py"
DYNAMIC = "tests/trainer/test_dynamic_sampling.py"
FIXED_POINT = "tests/unit/precision/test_fixed_point.py"
GUARD = "tests/unit/rewards/test_guard.py"
HEAD = "tests/unit/forward/test_tiled_log_probs.py"
INTERRUPTS = "tests/trainer/test_interrupts.py"
KEYED = "tests/unit/sampling/test_keyed.py"
LOSSES = "tests/unit/algorithms/test_losses.py"
MEMORY = "tests/unit/runtime/test_out_of_memory.py"
METRICS = "tests/unit/step/test_gradients_and_metrics.py"
NUMBERS = "tests/parity/test_numbers.py"
OPTIMIZERS = "tests/trainer/test_optimizer_objects.py"
PACKED = "tests/unit/forward/test_packed.py"
PACKING = "tests/unit/batching/test_packing.py"
RANDOM = "tests/unit/algorithms/test_keyed_random.py"
ROUTING = "tests/unit/forward/test_routing.py"
ROWS = "tests/invariance/test_several_rows.py"
PLAIN_LOOP = "tests/trainer/test_several_rows.py -k plain_loop_over"
SIZES = "tests/unit/batching/test_sizes.py"
TURNS = "tests/parity/test_turns.py"
VARLEN = "tests/unit/forward/test_varlen.py"

PLANTED: dict[str, list[tuple[str, str, str]]] = {  # by file: before, after, tests
    "algorithms/losses.py": [
        (
            "(completions * cfg.max_completion_length)",
            "(completions * max(batch.lengths_B))",
            f"{LOSSES} -k aggregation",
        ),
        ("/ len(counts.group_tokens)", "/ len(set(groups_B))", f"{LOSSES} -k prompt_mean"),
        ("kl = torch.exp(delta) - delta - 1", "kl = torch.exp(delta) - 1", f"{NUMBERS} -k kl_biased"),
        (
            ".clamp(max=cfg.epsilon_high).detach() * advantages",
            ".clamp(max=cfg.epsilon_high) * advantages",
            f"{NUMBERS} -k cispo",
        ),
        ("return float(value) - tolerance", "return float(value)", f"{LOSSES} -k entropy"),
        ("(teacher_S - logps_S.detach())", "(teacher_S - logps_S)", f"{LOSSES} -k teacher"),
    ],
    "algorithms/advantages.py": [("keepdim=True) / (count - 1)", "keepdim=True) / count", ADVANTAGES)],
    "algorithms/keyed_random.py": [
        ("mix(mix(start, prompts_B), generations_B)", "mix(start, prompts_B + generations_B)", RANDOM),
        ("searchsorted(cdf, target, right=True)", "searchsorted(cdf, target, right=False)", RANDOM),
    ],
    "batching/packing.py": [
        ("positions_N=position[segment_N] + within_N", "positions_N=within_N", f"{PACKING} {PACKED}"),
        ("run = length if keep_last else max(length - 1, 0)", "run = max(length - 1, 0)", PACKING),
    ],
    "batching/micro_batches.py": [
        ("MicroBatch((shortest,), weight=0.0, ", "MicroBatch((shortest,), ", CUTS),
        ("count = ceil_div(len(rows), max_rows)", "count = len(rows) // max_rows + 1", CUTS),
    ],
    "batching/sizes.py": [
        ("even_slice(ceil_div(num_prompts, groups), num", "even_slice(num_prompts // groups, num", SIZES)
    ],
    "precision/fixed_point.py": [
        ("* 2.0**FRACTION_BITS).round_()", "* 2.0**FRACTION_BITS)", FIXED_POINT),
        ("if largest > limit:", "if largest > 2 * limit:", FIXED_POINT),
    ],
    "forward/tiled_log_probs.py": [("constant = up + entropy_up * entropy", "constant = up", f"{HEAD} -k derivative")],
    "forward/lm_head.py": [
        (
            'config.model_type == "hyperclovax" else 1 / divisor',
            'config.model_type == "hyperclovax" else divisor',
            "tests/unit/forward/test_lm_head.py",
        )
    ],
    "forward/shared_prefix.py": [
        ('"window_size_left": part.window - 1', '"window_size_left": part.window', f"{VARLEN} {PACKED}")
    ],
    "forward/routing.py": [("known_NK = recorded_NK != BY_ROUTER", "known_NK = recorded_NK > BY_ROUTER + 1", ROUTING)],
    "forward/rows.py": [
        ("attended[:, :width].cumsum(1) > 0", "attended[:, :width].cumsum(1) > 1", f"{PACKED} -k layout"),
        ("(torch.arange(length) >= row.repeated)", "(torch.arange(length) >= 0)", PLAIN_LOOP),
        ("[completions[row.completion] for row in self.rows_of]", "range(len(self))", f"{ROWS} -k lora_dropout-padded"),
    ],
    "rewards/guard.py": [
        ("not abs(number) <= _LARGEST", "abs(number) > _LARGEST", GUARD),
        ("if len(values) != self.record.rows:", "if len(values) < self.record.rows:", GUARD),
    ],
    "batching/prompt_order.py": [
        ("(torch.tensor(list(request.prompts)) +", "(torch.arange(len(request.prompts)) +", f"{KEYED} -k keys")
    ],
    "sampling/keyed.py": [
        ("bool(config.stop_strings) or any(used)", "any(used)", "tests/trainer/test_ends.py -k found_in_padding")
    ],
    "sampling/decoding.py": [("count = len(done) - sum(done)", "count = len(done) - sum(done[1:])", DECODING)],
    "run/checkpoint.py": [("if digest != files[path].get(_HASH):", "if not digest:", f"{CHECKPOINTS} -k whole")],
    "step/cut_completion.py": [
        ("self.loss if piece == min(self.scores) else", "self.loss if True else", f"{ROWS} -k gspo_terms-two"),
        ("slope_S * (score_S - score_S.detach())", "0 * score_S", f"{ROWS} -k gspo_terms-two"),
    ],
    "step/statistics.py": [("return self if weight else", "return self if True else", METRICS)],
    "runtime/out_of_memory.py": [
        ("size = self.limit = ceil_div(len(piece), 2)", "size = ceil_div(len(piece), 2)", MEMORY),
        ('min(self.rows, state["rows"])', "self.rows", "tests/trainer/test_out_of_memory.py -k resume_keeps"),
    ],
    "checks/model.py": [
        ("yield f\"{path or 'model'} ({type(module).__name__})", 'yield f"{path} ({type(model).__name__})', CHECKS)
    ],
    "run/trail_comparison.py": [
        ('if step == 1 and stage == "values"', "if False", "tests/unit/run/test_diff.py -k values_of_the_first_step")
    ],
    "tools/check/comparison.py": [
        ("if not error <= most:", "if error > 1.0:", f"{CHECK} -k verdicts"),
    ],
    "rollouts/rounds.py": [
        ("starts[number] + place * group + i for", "place * group + i for", DYNAMIC),
        ("sum(map(len, has_variance[1:])), open_places)", "0, open_places)", DYNAMIC),
    ],
    "rollouts/join.py": [
        ("tokens=sum(transcript.mask),", "tokens=len(transcript.mask),", "tests/parity/test_prompts.py -k mask")
    ],
    "rollouts/ahead.py": [
        (
            "self.view.state.max_steps)), lag + 1)",
            "self.view.state.max_steps)), lag)",
            "tests/trainer/test_ahead.py -k named",
        )
    ],
    "rollouts/tools.py": [
        (
            "completion <= self.max_completion_length and",
            "completion < self.max_completion_length and",
            f"{TURNS} -k fit_into",
        ),
        ("+ completion < self.context", "+ completion <= self.context", f"{TURNS} -k fills_the_context"),
        (
            "            self.environments.retire(environment)\n",
            "            pass\n",
            "tests/trainer/test_tools.py -k hangs",
        ),
    ],
    "sampling/engine_check.py": [
        (".item()) <= self.bound", ".item()) <= 1e9 * self.bound", "tests/trainer/test_vllm.py -k other_weights")
    ],
    "rollouts/images.py": [
        (
            "if any_process(any(shown)) and any_process(not all(shown)):",
            "if False:",
            "tests/trainer/test_images.py -k every_prompt_has_an_image_or_none",
        )
    ],
    "run/interrupts.py": [
        ("if os.getpid() != self._process:", "if False:", f"{INTERRUPTS} -k forks"),
        ("if not any_process(self.requested):", "if not self.requested:", f"{INTERRUPTS} -k both_processes"),
    ],
    "upstream/reference.py": [
        (
            "if state and self.view.ref_model is not None:",
            "if False:",
            "tests/trainer/test_reference.py -k callback_has_moved",
        )
    ],
    "checks/settings.py": [
        (
            'max(tensor_parallel, sizes.get("tp_size", 1))',
            'sizes.get("tp_size", 1)',
            "tests/trainer/test_settings.py -k known_to_work",
        )
    ],
    "checks/trainer.py": [
        ("if rows <= prompts:", "if rows < prompts:", "tests/trainer/test_bad_input.py -k parts_that")
    ],
    "step/record.py": [
        ("torch.autograd.grad(shares_S.sum()", "torch.autograd.grad((shares_S**2).sum()", f"{CASES} -k arithmetic")
    ],
    "run/cases.py": [
        ("view.having(self.start | attributes)", "view.having(attributes)", f"{CASES} -k adaptive"),
        ("weight.data.copy_(before[name])", "pass", f"{CASES} -k bits"),
        ("relative(step.norm, run.norm, least=0.0)", "0.0", f"{REASONS} -k something_else"),
        ("part.update({key: copy.deepcopy(value)", "part.update({key: value", f"{CASES} -k bits"),
        ("                part.update(values)", "                pass", f"{CASES} -k bits"),
        ("parts |= _dictionaries_of(part)", "pass", f"{OPTIMIZERS} -k holds_others"),
        (
            "not all(\n                set(view.policy",
            "False and not all(\n                set(view.policy",
            f"{OPTIMIZERS} -k copies",
        ),
        ("(of_run.learning_rate or 1.0)", "1.0", f"{CASES} -k its_optimizer_makes"),
    ],
    "view.py": [("**logs, **attributes", "**attributes", f"{REASONS} -k alone")],
    "run/case_comparison.py": [
        ("- apart**2) / (2 * one", "+ apart**2) / (2 * one", f"{CASES} -k opposite"),
        ("apart / one if one else", "apart if one else", f"{CHECK} -k error_is"),
    ],
    "step/loss.py": [
        ('cfg.beta != 0.0 and "ref_per_token_logps" not in columns', "False", "tests/trainer/test_hooks.py -k kl_term")
    ],
}
FAULTS = [Fault(path, *row) for path, rows in PLANTED.items() for row in rows]


def copy_of_repository(folder: Path) -> None:
    """Copy the files that git knows, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def verdict(fault: Fault, folder: Path) -> str:
    """What comes of the fault's tests in a copy of the repository, which is left as it was."""
    path = folder / "grpo_ext" / fault.path
    text = path.read_text()
    if text.count(fault.before) != 1:
        return f"MISSED: the text occurs {text.count(fault.before)} times"
    path.write_text(text.replace(fault.before, fault.after))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--show-capture=no", *shlex.split(fault.tests)]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    path.write_text(text)
    if done.returncode == FAILED:
        return "caught"
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    return f"MISSED: pytest ended with status {done.returncode} ({last})"


def main(arguments: Sequence[str]) -> int:
    """Plant faults by their numbers, or all of them; returns the exit status."""
    numbers = [int(argument) for argument in arguments] or range(len(FAULTS))
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        copy_of_repository(Path(name))
        for number in numbers:
            fault = FAULTS[number]
            found = verdict(fault, Path(name))
            missed += found != "caught"
            print(f"{number:3} {fault.path}: {fault.before.strip()[:60]!r}: {found}", flush=True)
    print(f"{len(numbers) - missed} of {len(numbers)} faults were caught.")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
