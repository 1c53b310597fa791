"""A rehearsal of a newer TRL: the installed one, copied with additions. Each trains, or is refused by its name."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import trl

from grpo_ext import GRPOTrainer, compat
from grpo_ext.errors import ContractError
from tests.support.launch import two_processes

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
    "return prompt_ids, completion_ids, logprobs, logprob_token_ids": (
        "return prompt_ids, completion_ids, logprobs, logprob_token_ids, added_values"
    )
}


def added_to(name: str, replaced: dict[str, str]) -> str:
    """A file of TRL with additions."""
    text = (Path(trl.__file__).parent / name).read_text()
    for old, new in replaced.items():
        assert old in text, f"TRL's {name} has no {old!r} any more: the rehearsal needs another place"
        text = text.replace(old, new)
    return text


# a forked process has imported the installed one
START = """
import runpy, sys
folder, script = sys.argv[1:]
for name in [name for name in sys.modules if name.split(".")[0] in ("trl", "grpo_ext", "tests")]:
    del sys.modules[name]
sys.path.insert(0, folder)
sys.argv = [script, f"{folder}/out"]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> tuple[list[dict[str, str]], str]:
    """By process, what became of each addition; and the console of both."""
    folder = tmp_path_factory.mktemp("newer")
    (folder / "out").mkdir()
    (folder / "start.py").write_text(START)
    shutil.copytree(Path(trl.__file__).parent, folder / "trl")
    for name, replaced in ADDITIONS.items():
        (folder / "trl" / name).write_text(added_to(name, replaced))
    status, output = two_processes(folder / "start.py", str(folder), str(SCRIPT))
    assert status == 0, output[-3000:]
    return [json.loads((folder / "out" / f"{rank}.json").read_text()) for rank in (0, 1)], output


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


def test_a_value_more_of_vllms_generation_is_refused_when_a_trainer_is_built(tmp_path, monkeypatch):
    changed = tmp_path / "vllm_generation.py"
    changed.write_text(added_to("generation/vllm_generation.py", VALUES))
    spec = importlib.util.spec_from_file_location("trl.generation.changed", changed)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(compat, "VLLMGeneration", module.VLLMGeneration)
    returned = r"\(prompt_ids, completion_ids, logprobs, logprob_token_ids, added_values\)"
    with pytest.raises(ContractError, match=rf"generate returns {returned}, not 4 values"):
        compat.verify_overrides.__wrapped__(GRPOTrainer)
