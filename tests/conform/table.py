"""The tables of docs/conform.md."""

import datetime
import math
from collections.abc import Sequence
from typing import Any

RIGHT = 1e-5  # an error below it is rounding
MARK = "<!-- written by make conform -->"
Cell = dict[str, Any]


BY_DEFINITION = "by definition"  # reasons that begin so are not errors
UNEXPLAINED = "wrong, and REASONS gives no reason"


def shown(result: dict[str, Any], cell: Cell | None) -> str:
    """An error in bold, if it is one; a dash where a trainer refuses a split."""
    if cell is None:
        return ""
    if "error" not in cell:
        return "**failed**" if "failed" in cell else "\N{EN DASH}"
    why = reason(result, cell)
    number = f"{cell['error']:.0e}".replace("e-0", "e-") if why is None else f"{cell['error']:.2g}"
    return number if why is None or why.startswith(BY_DEFINITION) else f"**{number}**"


def worst(result: dict[str, Any], objective: str, several: bool = False) -> str:
    """The largest error of an objective over the splits that a trainer accepts; of several rollouts, or of one."""
    cells = [cell for cell in of(result, objective) if ("rollouts" in cell["split"]) == several]
    ranked = sorted(cells, key=lambda cell: ("failed" in cell, cell.get("error", -1.0)))
    return shown(result, ranked[-1] if ranked else None)


def is_wrong(result: dict[str, Any], cell: Cell) -> bool:
    """Whether a cell failed, or has an error that nothing explains."""
    return "failed" in cell or reason(result, cell) == UNEXPLAINED


def dtype(result: dict[str, Any]) -> str:
    """float64, unless a trainer has none."""
    return min((cell["dtype"] for cell in result.get("cells", ())), key=("float64", "float32").index, default="float64")


def of(result: dict[str, Any], objective: str, split: str = "") -> list[Cell]:
    """The cells of an objective, on one split or on all."""
    cells = [cell for cell in result.get("cells", ()) if cell["dtype"] == dtype(result)]
    return [cell for cell in cells if cell["objective"] == objective and split in ("", cell["split"])]


def names(results: Sequence[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(cell[key] for result in results for cell in result.get("cells", ())))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def title(result: dict[str, Any]) -> str:
    return f"{result['name']} {result.get('version', '')}".strip()


def summary(results: Sequence[dict[str, Any]]) -> str:
    """A row for each objective, a column for each trainer; steps of several rollouts have rows of their own."""
    results = [result for result in results if "cells" in result]
    lines = [row("objective", *map(title, results)), "|---" * (len(results) + 1) + "|"]
    for objective in names(results, "objective"):
        lines.append(row(objective, *(worst(result, objective) for result in results)))
    several = [cell["objective"] for result in results for cell in result["cells"] if "rollouts" in cell["split"]]
    for objective in (name for name in ("grpo", "dapo") if name in several):
        name = f"{objective}, a step of 2 rollouts"
        lines.append(row(name, *(worst(result, objective, several=True) for result in results)))
    return "\n".join(lines)


def details(result: dict[str, Any]) -> str:
    """A row for each objective, a column for each split, and the reason for what is wrong or was not run."""
    lines = [f"### {title(result)}", ""]
    if "failed" in result:
        return "\n".join(
            [*lines, f"Not run: {result['failed']}{' (' + result['log'] + ')' if 'log' in result else ''}."]
        )
    splits, objectives = names([result], "split"), names([result], "objective")
    beside = f" Beside {', '.join(result['beside'])}." if "beside" in result else ""
    lines += [f"`{result['entry']}`.{beside}", "", row("objective", *splits), "|---" * (len(splits) + 1) + "|"]
    for objective in objectives:
        cells = [of(result, objective, split=split) for split in splits]
        lines.append(row(objective, *(shown(result, next(iter(found), None)) for found in cells)))
    reasons = dict[str, list[str]]()
    for cell in result["cells"]:
        if why := reason(result, cell):
            reasons.setdefault(why, []).append("\N{EN DASH}" if "refused" in cell else cell["objective"])
    lines += [""] + [f"- {'; '.join(dict.fromkeys(where))}: {why}." for why, where in reasons.items()]
    right = {
        (c["objective"], c["split"]) for c in result["cells"] if c["dtype"] == "float64" and c.get("error", 1) < RIGHT
    }
    in_float32 = [c for c in result["cells"] if (c["objective"], c["split"]) in right and c["dtype"] == "float32"]
    single = [c.get("error", math.inf) for c in in_float32]
    if dtype(result) == "float32":
        lines.append("- These are float32's numbers: it has no float64.")
    elif single:
        lines.append(f"- float32, on the first split of each launch: at most {max(single):.0e} where float64 is right.")
    return "\n".join(lines)


def reason(result: dict[str, Any], cell: Cell) -> str | None:
    if "error" not in cell:
        return str(cell.get("refused", cell.get("failed"))).splitlines()[0].rstrip(".")
    if cell["error"] < RIGHT:
        return None
    reasons = result.get("reasons", {})
    return str(reasons.get(cell["objective"], reasons.get(cell["split"], UNEXPLAINED)))


def table(results: Sequence[dict[str, Any]]) -> str:
    parts = [summary(results)] if any("cells" in result for result in results) else []
    return "\n\n".join([*parts, *map(details, results)])


def page(text: str, results: Sequence[dict[str, Any]]) -> str:
    """The page with the tables of these results; what stands above the mark stays."""
    before, _, _ = text.partition(MARK)
    return f"{before}{MARK}\n\n{datetime.date.today():%d %B %Y}.\n\n{table(results)}\n"
