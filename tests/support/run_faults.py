"""Planted faults of rollouts, resumes and processes, which tests of whole runs catch; see faults.py."""

from tests.support.faults import Fault

RUN_FAULTS = [
    Fault(
        "rollouts/rounds.py",
        "starts[number] + place * group + i for",
        "place * group + i for",
        "tests/trainer/test_dynamic_sampling.py",
    ),
    Fault(
        "rollouts/rounds.py",
        "sum(map(len, has_variance[1:])), open_places)",
        "0, open_places)",
        "tests/trainer/test_dynamic_sampling.py",
    ),
    Fault(
        "rollouts/join.py",
        "tokens=sum(transcript.mask),",
        "tokens=len(transcript.mask),",
        "tests/parity/test_prompts.py -k mask",
    ),
    Fault(
        "rollouts/ahead.py",
        "range(step, self.max_steps)), lag + 1)",
        "range(step, self.max_steps)), lag)",
        "tests/trainer/test_ahead.py -k named",
    ),
    Fault(
        "rollouts/tools.py",
        "completion <= self.max_completion_length and",
        "completion < self.max_completion_length and",
        "tests/parity/test_turns.py -k fit_into",
    ),
    Fault(
        "rollouts/tools.py",
        "+ completion < self.context",
        "+ completion <= self.context",
        "tests/parity/test_turns.py -k fills_the_context",
    ),
    Fault(
        "rollouts/tools.py",
        "            self.environments.retire(environment)\n",
        "            pass\n",
        "tests/trainer/test_tools.py -k hangs",
    ),
    Fault(
        "rollouts/engine_check.py",
        ".item()) <= self.bound",
        ".item()) <= 1e9 * self.bound",
        "tests/trainer/test_vllm.py -k other_weights",
    ),
    Fault(
        "rollouts/images.py",
        "if any_process(any(shown)) and any_process(not all(shown)):",
        "if False:",
        "tests/trainer/test_images.py -k every_prompt_has_an_image_or_none",
    ),
    Fault(
        "run/interrupts.py",
        "if os.getpid() != self._process:",
        "if False:",
        "tests/trainer/test_interrupts.py -k forks",
    ),
    Fault(
        "run/interrupts.py",
        "if not any_process(self.requested):",
        "if not self.requested:",
        "tests/trainer/test_interrupts.py -k both_processes",
    ),
    Fault(
        "forward/reference.py",
        "if state and self.view.ref_model is not None:",
        "if False:",
        "tests/trainer/test_reference.py -k callback_has_moved",
    ),
    Fault(
        "checks/settings.py",
        'max(tensor_parallel, sizes.get("tp_size", 1))',
        'sizes.get("tp_size", 1)',
        "tests/trainer/test_settings.py -k known_to_work",
    ),
    Fault(
        "checks/trainer.py",
        "if rows <= prompts:",
        "if rows < prompts:",
        "tests/trainer/test_bad_input.py -k parts_that",
    ),
    Fault(
        "runtime/out_of_memory.py",
        'min(self.rows, state["rows"])',
        "self.rows",
        "tests/trainer/test_out_of_memory.py -k resume_keeps",
    ),
    Fault(
        "step/loss.py",
        'cfg.beta != 0.0 and "ref_per_token_logps" not in columns',
        "False",
        "tests/trainer/test_hooks.py -k kl_term",
    ),
]
