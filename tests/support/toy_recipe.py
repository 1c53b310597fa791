"""The recipe as a module, and what it takes to run a configuration for a large model at toy size, made locally."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.forks import ROOT
from tests.support.tiny import tiny_model, tiny_tokenizer

CONFIGS = ROOT / "recipes" / "configs"

TOY = {"max_position_embeddings": 512, "tie_word_embeddings": True, "initializer_range": 0.02}
BOXED = (r"\boxed{1}", r"\boxed{2}")

# name: (value, why the file's own value is not used here)
Overrides = dict[str, tuple[Any, str]]


def load_recipe(name: str = "grpo") -> Any:
    """A file of recipes/, which is a script and no package."""
    spec = importlib.util.spec_from_file_location(f"recipes_{name}", ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"recipes_{name}"] = module  # its dataclasses look their types up there
    spec.loader.exec_module(module)
    return module


def settings(path: Path) -> dict[str, Any]:
    """What a YAML file sets."""
    return yaml.safe_load(path.read_text())


def as_options(overrides: Overrides) -> list[str]:
    """Overrides as options of the command line."""
    options = []
    for name, (value, reason) in overrides.items():
        assert reason, f"the override of {name} needs a reason"
        options += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return options


def toy_model(folder: Path) -> Path:
    """A Qwen2 with random weights whose vocabulary is so small that it answers a sum right now and then.

    Everything but 1, 2, space and # is one unknown token; a boxed 1 and a boxed 2 are one token each: samples then have
    the form that math-verify reads. The tokenizer has a chat template.
    """
    tokenizer = tiny_tokenizer(chat=True, tokens=["<pad>", "<eos>", "<unk>", "1", "2", " ", "#", *BOXED])
    tiny_model(**TOY, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def question_rows(path: Path, count: int = 32) -> Path:
    """Rows as GSM8K has them: a question, and a worked answer with the gold behind ####."""
    rows = [
        {"question": f"Tom has {n} apples and eats {n - 1 - n % 2}. How many are left?", "answer": f"#### {1 + n % 2}"}
        for n in range(3, 3 + count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def conversation_rows(path: Path, count: int = 32) -> Path:
    """Rows as DeepMath has them: a conversation as prompt, the gold as a formula in `solution`."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {n} mod 2, plus 1?"}], "solution": f"${1 + n % 2}$"}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def train(recipe: Any, argv: list[str]) -> list[dict[str, Any]]:
    """Parse and run as the script does, in this process and with the libraries' remarks; the log lines."""
    demo, script, training, model = recipe.parse(argv)
    assert not demo, "the run names its model and data"
    recipe.run(script, training, model, [])
    return json.loads((Path(training.output_dir) / "metrics.json").read_text())["log_history"]
