"""What the package relies on in TRL, transformers, Accelerate and torch beyond the signatures of what it overrides.

Behaviour rather than signatures: how they call what is overridden, gather, accumulate and generate.
"""

import ast
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import transformers
import trl
from trl.trainer.base_trainer import _BaseTrainer

from grpo_ext import GRPOTrainer, compat


@cache
def code_of(owner: Any) -> str:
    """The source without comments and docstrings."""
    return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(owner))))


def test_every_override_is_still_called():
    """Whether the calls fit is seen from the signatures (compat)."""
    names = set(compat.overrides(GRPOTrainer)) - {"__init__", "train", "predict", "prediction_step", "training_step"}
    code = "".join(map(code_of, (trl.GRPOTrainer, _BaseTrainer, transformers.Trainer)))
    assert [name for name in sorted(names) if not re.search(rf"\b(self|super\(\))\.{name}\(", code)] == []


def test_the_constructor_reads_beta_for_the_reference_model_alone():
    # it is shown zero where our own reference follows: an adapter's copy, the attribute, two checks
    read = re.findall(r"\.beta\b(?! = )", code_of(trl.GRPOTrainer.__init__))
    assert len(read) == 4, "GRPOTrainer.__init__ reads beta elsewhere"


def test_trls_turn_calls_no_collectives():
    """It is still TRL's, where continuous batching or a user calls it; processes run different numbers of turns."""
    collective = re.compile(r"(?<!asyncio\.)\b(?:gather|reduce|broadcast|pad_across|all_)\w*\(")
    for name in ("_generate_single_turn",):
        assert collective.findall(code_of(getattr(trl.GRPOTrainer, name))) == [], name
    assert collective.findall(code_of(trl.GRPOTrainer._calculate_rewards))  # it finds those that there are


ACROSS = {"gather", "gather_for_metrics", "gather_object", "reduce", "pad_across_processes"}
OVER_ROWS = {"quantile", "nanquantile", "median", "sort", "topk", "mean", "nanmean", "sum", "nansum", "std", "var"}
OF_A_ROW = {"-1", "1"}  # dimensions


def reduces_over_rows(call: ast.Call) -> bool:
    """Whether a call gathers, or reduces more than the tokens of each row."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in OVER_ROWS:
        return name in ACROSS
    dims = [keyword.value for keyword in call.keywords if keyword.arg == "dim"]
    dims += call.args[1 if getattr(getattr(call.func, "value", None), "id", "") == "torch" else 0 :]
    return not any(ast.unparse(dim) in OF_A_ROW for dim in dims)


def methods_that_reduce(methods: dict[str, ast.FunctionDef], losses: tuple[str, ...]) -> set[str]:
    """The methods that losses call, by themselves or through others, whose results depend on other rows."""
    pending, reached = [name for name in losses if name in methods], set[str]()
    while pending:
        for node in ast.walk(methods[pending.pop()]):
            name = node.attr if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self" else ""
            if name in methods.keys() - reached:
                reached.add(name)
                pending.append(name)
    calls = {name: [n for n in ast.walk(methods[name]) if isinstance(n, ast.Call)] for name in reached - {*losses}}
    return {name for name in calls if any(map(reduces_over_rows, calls[name]))}


def methods_of(text: str, bases: set[str]) -> list[dict[str, ast.FunctionDef]]:
    """The methods of each class in a source that is named GRPOTrainer or derived from one of `bases`."""
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    chosen = [c for c in classes if c.name in bases or any(ast.unparse(b).split(".")[-1] in bases for b in c.bases)]
    return [{part.name: part for part in c.body if isinstance(part, ast.FunctionDef)} for c in chosen]


LOSSES = ("compute_loss", "_compute_loss")
# answered by this trainer with the statistic of the step (get_high_entropy_mask), or by its own forward
KNOWN = {"get_high_entropy_mask", "_get_per_token_logps_and_entropies"}


def test_no_other_method_of_trls_losses_reduces_over_a_micro_batch():
    """A subclass that copies such a loss would have an update that depends on the micro-batch, silently."""
    own = methods_of(code_of(trl.GRPOTrainer), {"GRPOTrainer"})[0]
    assert methods_that_reduce(own, LOSSES) == KNOWN
    experimental = Path(inspect.getfile(trl)).parent / "experimental"
    for path in experimental.rglob("*.py"):
        for methods in methods_of(path.read_text(), {"GRPOTrainer"}) if "GRPOTrainer" in path.read_text() else []:
            assert methods_that_reduce({**own, **methods}, LOSSES) <= KNOWN, path
    assert set(compat.overrides(GRPOTrainer)) >= KNOWN


def test_a_new_method_that_reduces_is_seen():
    text = """
class Mine(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return self.scaled(inputs).sum(-1).mean() + self.by_row(inputs)
    def scaled(self, inputs):
        return self.inner(inputs)
    def inner(self, inputs):
        return inputs / inputs.std()
    def by_row(self, inputs):
        return torch.sum(inputs, dim=-1) + inputs.mean(1)
"""
    assert methods_that_reduce(methods_of(text, {"GRPOTrainer"})[0], LOSSES) == {"inner"}
