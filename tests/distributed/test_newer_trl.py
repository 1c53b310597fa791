"""A rehearsal of a newer TRL: the installed one, copied with additions. Each trains, or is refused by its name."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trl

from tests.support.forks import ROOT
from tests.support.launch import environment, launcher

SCRIPT = Path(__file__).with_name("newer_trl.py")
# by file, texts and what takes their places
ADDITIONS: dict[str, dict[str, str]] = {
    "__init__.py": {'__version__ = version("trl")': '__version__ = "1.19.0"'},
    "trainer/grpo_config.py": {"    beta: float = field(": "    added_setting: int = 1\n    beta: float = field("},
    "trainer/grpo_trainer.py": {
        "dict[str, EnvironmentFactory] | None = None,\n    ):\n": (
            "dict[str, EnvironmentFactory] | None = None,\n        added=None,\n    ):\n        self.added = added\n"
        ),
        "_env_tools": "_renamed_tools",
        "        image_position_ids=None,\n    ) -> tuple": (
            "        image_position_ids=None,\n        added_mask=None,\n    ) -> tuple"
        ),
    },
    "kernels/chunked_logprob.py": {
        "if is_triton_available():\n    import triton\n": (
            "from unittest.mock import MagicMock\n\ntriton = tl = MagicMock()\n"
            "if is_triton_available():\n    import triton\n"
        ),
        "        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,\n    ) -> ": (
            "        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,\n        added_output: bool = False,\n    ) -> "
        ),
    },
}
VALUES = {
    "generation/vllm_generation.py": {
        "return prompt_ids, completion_ids, logprobs, logprob_token_ids": (
            "return prompt_ids, completion_ids, logprobs, logprob_token_ids, added_values"
        )
    }
}


def copied(folder: Path, additions: dict[str, dict[str, str]]) -> str:
    """PYTHONPATH of a copy of TRL with additions."""
    shutil.copytree(Path(trl.__file__).parent, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    for name, replaced in additions.items():
        text = (folder / "trl" / name).read_text()
        for old, new in replaced.items():
            assert old in text, f"TRL's {name} has no {old!r} any more: the rehearsal needs another place"
            text = text.replace(old, new)
        (folder / "trl" / name).write_text(text)
    return f"{folder}:{ROOT}"


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> tuple[list[dict[str, str]], str]:
    """By process, what became of each addition; and the console of both."""
    folder = tmp_path_factory.mktemp("newer")
    (folder / "out").mkdir()
    command = [*launcher(2), str(SCRIPT), str(folder / "out")]
    done = subprocess.run(
        command, env=environment(PYTHONPATH=copied(folder, ADDITIONS)), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / "out" / f"{rank}.json").read_text()) for rank in (0, 1)], done.stdout + done.stderr


KNOWN = {
    "argument": "kept",
    "default": "True",
    "column": "True",
    "setting": r"ConfigError: added_setting=2: .* does not know this setting of trl 1\.19\.0\. Leave it at 1, or",
    "attribute": r"ContractError: .* trl 1\.19\.0 .*GRPOTrainer has no _env_tools\. Install trl>=1\.15,<1\.17 and ",
    "mask": "ContractError: .*_get_per_token_logps_and_entropies was called with added_mask",
    "head": "None",
}


@pytest.mark.parametrize("case", KNOWN)
def test_what_a_newer_trl_adds_trains_or_is_refused_by_name(rehearsed, case):
    for outcomes in rehearsed[0]:
        assert re.match(KNOWN[case], outcomes[case]), outcomes[case]


def test_one_process_warns_once_of_versions_that_were_not_tested(rehearsed):
    _, console = rehearsed
    assert console.count("trl 1.19.0: not tested with this grpo_ext, which works with trl>=1.15,<1.17 and ") == 1
    assert console.count("TRL's Triton head has changed in trl 1.19.0") == 1
    assert "added_output" in console


def test_a_value_more_of_vllms_generation_is_refused_when_a_trainer_is_built(tmp_path):
    path = copied(tmp_path, VALUES)
    code = "from grpo_ext import GRPOTrainer, compat; compat.verify_overrides(GRPOTrainer)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=300
    )
    returned = "(prompt_ids, completion_ids, logprobs, logprob_token_ids, added_values)"
    assert f"generate returns {returned}, not 4 values" in done.stderr
