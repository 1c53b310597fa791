"""The identity of a run, without its layout: saved with every checkpoint, compared on resume.

A run may resume with another number of processes, with another micro-batch size or on another machine. With another
seed, batch, loss, data set or model it would be another run, which is refused before training.
"""

import ast
import contextlib
import dataclasses
import datetime
import decimal
import hashlib
import inspect
import json
import math
import os
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers.utils import get_json_schema

from ..algorithms.advantages import THRESHOLD, takes_keyword
from ..algorithms.digests import digest
from ..batching.sizes import LAYOUT_SIZES, BatchGeometry
from ..config import GRPOConfig
from ..errors import CheckpointError, ConfigError, did_you_mean, shortened
from ..forward.architecture import base_model_of
from ..settings import NOTED, STATE, compared_by_value, resumes
from ..view import TrainerView
from .checkpoint import FINGERPRINT, explaining_format
from .record import Identity, differences

_ROWS_READ = 100_000  # of a data set, evenly spread: a second or two; smaller sets are read whole
_LARGE_ROWS_READ = 2_000  # where rows are files
# fields of a model's or adapter's configuration that describe its origin, storage and execution
_NOT_COMPUTED = {
    *("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "architectures", "auto_map"),
    *("base_model_name_or_path", "inference_mode"),
    *("dtype", "torch_dtype", "attn_implementation", "_attn_implementation", "experts_implementation"),
    *("_experts_implementation", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    *("pad_token_id", "_pad_token_id", "bos_token_id", "eos_token_id"),  # transformers sets them anew
}
# settings of `generate` that follow from others, or that sampling does not read
_FOLLOW = {"max_new_tokens", "max_length", "do_sample", "_from_model_config", "output_attentions", "compile_config"}
_SAME_STATE = {"adamw_torch", "adamw_torch_fused"}  # optimizers that can load each other's state


def fingerprint_of(view: TrainerView, geometry: BatchGeometry) -> Identity:
    accelerator = view.accelerator
    others = {"reference": view.ref_model, "teacher": view.teacher_model}
    fixed = {name: accelerator.unwrap_model(model) for name, model in others.items() if model is not None}
    return {
        "data": data_fingerprint(view.train_dataset),
        "model": model_fingerprint(view.policy, fixed, whole=not view.sharded),
        "tokenizer": tokenizer_fingerprint(view.tokenizer),
        "template": view.chat_template,
        "generation_config": None if view.use_vllm else generation_fingerprint(view),
        "end_tokens": sorted(view.eos_token_ids),
        "rewards": list(view.reward_func_names),
        "tools": tools_fingerprint(view.tools or ()),
        "tool_code": code_of([*(view.tools or ()), *(view.environment_factories or {}).values()]),
        "settings": settings_of(view.args, geometry),
    }


def plain(value: Any, without: Collection[str] = ()) -> Any:
    """A value in JSON types, without these names at any depth."""
    if isinstance(value, dict):  # JSON takes no tuples as keys
        return {str(name): plain(part, without) for name, part in value.items() if name not in without}
    # the modules of an adapter are a set, whose order is another in every process
    text = json.dumps(value, default=lambda v: sorted(v, key=str) if isinstance(v, set | frozenset) else str(v))
    return json.loads(re.sub(" at 0x[0-9a-f]+", "", text))  # the address of an object is another in every process


def settings_of(args: GRPOConfig, geometry: BatchGeometry) -> Identity:
    """The settings that a resume compares (the table of settings), and those of a user's own."""
    names = [f.name for f in dataclasses.fields(args) if compared_by_value(f.name, args.bitwise_invariant)]
    values = {name: plain(getattr(args, name)) for name in names if hasattr(args, name)}
    if args.advantage_estimator and takes_keyword(args.advantage_estimator, THRESHOLD):  # elsewhere of evaluations only
        values[THRESHOLD] = args.eval_pass_threshold
    sizes = {name: size for name, size in dataclasses.asdict(geometry).items() if name not in LAYOUT_SIZES}
    return dict(sorted({**values, **sizes}.items()))


def data_fingerprint(dataset: Any) -> Identity | None:
    """Length, columns, and a hash of each column of evenly spread rows; None for a stream.

    Image files count by name.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    rows, columns = len(dataset), sorted(getattr(dataset, "column_names", None) or [])
    large = re.search("Image|Audio|Video|binary", str(getattr(dataset, "features", "")))
    most = _LARGE_ROWS_READ if large else _ROWS_READ
    step, by_column = max(rows / most, 1.0), dict[str, Any]()
    for row in _rows(dataset, [int(number * step) for number in range(min(rows, most))]):
        for name, value in sorted(row.items()):
            text = json.dumps(value, sort_keys=True, default=_as_text)
            by_column.setdefault(name, hashlib.sha256()).update(text.encode())
    hashes = {name: column.hexdigest()[:16] for name, column in by_column.items()}
    return {"rows": rows, "columns": columns, "by_column": hashes}


def _rows(dataset: Any, numbers: Sequence[int]) -> Iterator[Any]:
    if not isinstance(dataset, datasets.Dataset):
        yield from (dataset[number] for number in numbers)
        return
    stored = dataset.with_format("arrow")  # nothing is decoded
    for start in range(0, len(numbers), 1000):
        yield from (_without_folders(row) for row in stored[numbers[start : start + 1000]].to_pylist())


def _without_folders(value: Any) -> Any:
    """A row with the names of files instead of their paths, which differ between machines."""
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"bytes", "path"}:
        return {"bytes": value["bytes"], "path": os.path.basename(value["path"] or "")}
    return {name: _without_folders(part) for name, part in value.items()}


def _as_text(value: Any) -> str:
    """Text for a value that JSON cannot hold: dates and decimals as written, bytes and pixels by their hash."""
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    content = value if isinstance(value, bytes) else value.tobytes() if hasattr(value, "tobytes") else None
    return type(value).__name__ + ("" if content is None else hashlib.sha256(content).hexdigest())


def _sample_hash(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, parameter in parameters:
        flat = parameter.detach().reshape(-1)
        last = max(flat.numel() - 1, 0)
        index = torch.linspace(0, last, min(flat.numel(), 64)).long().clamp_(max=last)  # float32 rounds up past 2**24
        digest.update(name.encode())
        digest.update(tensor_hash(flat[index.to(flat.device)]).encode())
    return digest.hexdigest()


def model_fingerprint(model: torch.nn.Module, others: Mapping[str, torch.nn.Module], whole: bool) -> Identity:
    """Class, configuration, adapters, and hashes of the weights.

    "sha256" covers names, shapes and types of all weights, "frozen" the values of those that checkpoints do not hold,
    such as those of the `others`, by the names of these models; None where this process does not hold them `whole`.
    """
    config: Any = getattr(base_model_of(model), "config", None)
    frozen = None
    if whole:
        fixed = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        for kind, other in others.items():
            fixed += [(f"{kind} {name}", p) for name, p in other.named_parameters()]
        frozen = _sample_hash(sorted(fixed, key=lambda pair: pair[0]))
    digest = hashlib.sha256()
    count = 0
    for name, parameter in sorted(model.named_parameters()):
        # under ZeRO-3 a parameter is a shard and its whole shape is ds_shape
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        digest.update(f"{name} {shape} {parameter.dtype} {parameter.requires_grad}\n".encode())
        count += math.prod(shape)
    return {
        "class": type(model).__name__,
        "config": plain(config.to_dict(), _NOT_COMPUTED) if hasattr(config, "to_dict") else None,
        "parameters": count,
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "sha256": digest.hexdigest(),
        "adapters": {n: plain(vars(c), _NOT_COMPUTED) for n, c in getattr(model, "peft_config", {}).items()},
        "frozen": frozen,
        "others": {kind: plain(base_model_of(m).config.to_dict(), _NOT_COMPUTED) for kind, m in others.items()},
    }


def tools_fingerprint(tools: Iterable[Any]) -> Identity:
    """The schema of every tool by name (`Environment.name`), and their order in a chat template."""
    owners = {tool: getattr(tool, "__self__", None) for tool in tools}
    names = {tool: f"{type(owner).__name__}." * (owner is not None) + tool.__name__ for tool, owner in owners.items()}
    schemas = {name: plain(get_json_schema(tool)["function"]) for tool, name in names.items()}
    return schemas | {"(order)": list(schemas)}


def code_of(functions: Iterable[Any]) -> dict[str, str]:
    """A hash of the code of each tool or environment, without comments and layout; of those whose source is known."""
    codes: dict[str, str] = {}
    for function in functions:
        with contextlib.suppress(OSError, TypeError, SyntaxError, AttributeError):  # of a partial, or typed in
            owner = getattr(function, "__self__", None)
            source = inspect.unwrap(function) if owner is None else type(owner)
            codes[source.__name__] = digest(ast.dump(ast.parse(textwrap.dedent(inspect.getsource(source)))))
    return codes


def generation_fingerprint(view: TrainerView) -> Identity:
    """What `generate` is set to by the trainer's and the model's configuration, and no setting of the run says."""
    configs = getattr(view.policy, "generation_config", None), view.generation_config
    values = {n: v for config in configs if config is not None for n, v in config.to_diff_dict().items()}
    said = {*view.generation_settings, *GRPOConfig.__dataclass_fields__, *_NOT_COMPUTED, *_FOLLOW}
    return plain({name: value for name, value in values.items() if name not in said})


def tokenizer_fingerprint(processing_class: Any) -> str | None:
    """A hash of the vocabulary and the chat template; None without a vocabulary."""
    if not hasattr(processing_class, "get_vocab"):
        return None
    content = [sorted(processing_class.get_vocab().items()), getattr(processing_class, "chat_template", None)]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def tensor_hash(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bits."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}\n".encode())
    if plain.numel():
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_hashes(model: torch.nn.Module, optimizer: Any) -> dict[str, str]:
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    hashes = {f"parameter/{name}": tensor_hash(parameter) for parameter, name in names.items()}
    for parameter, values in getattr(optimizer, "state", {}).items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and parameter in names:
                hashes[f"optimizer/{names[parameter]}/{key}"] = tensor_hash(value)
    return hashes


def changed(saved: Identity, current: Identity) -> dict[str, tuple[Any, Any]]:
    """The differences as `name: (saved, current)`; not those of names that only one has, or that an engine shards."""
    old, new = _flat(saved), _flat(current)
    both = [name for name in old if name in new and resumes(name) != NOTED]
    return {name: (old[name], new[name]) for name in both if old[name] != new[name]}


def _flat(fingerprint: Identity) -> Identity:
    whole = {"data": fingerprint.get("data"), "model": fingerprint["model"]}
    parts = {f"{name}.{part}": value for name in whole for part, value in (whole[name] or {}).items()}
    known = {name: value for name, value in parts.items() if value is not None}
    stream = {"data": None if whole["data"] is None else "rows"} if "data" in fingerprint else {}
    # a field of a user's own may have the name of a part
    return {**fingerprint["settings"], **fingerprint, **known, "model": None, "settings": None, **stream}


def saved_identity(folder: str | Path) -> Identity:
    """The fingerprint of the run that wrote a checkpoint; an empty one where another trainer did."""
    path = Path(folder) / FINGERPRINT
    return dict(json.loads(path.read_text())) if path.is_file() else {"model": {}, "settings": {}}


def check_same_run(
    folder: str, saved: Identity, current: Identity, allowed: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    """The differences of a checkpoint's run from this one; a CheckpointError for one that is not allowed.

    Args:
        allowed: names that may differ; "model" stands for all its parts. What the optimizer's state holds may not.
    """
    with explaining_format(folder):
        changes = changed(saved, current)
    fixed = {name for name in changes if resumes(name) == STATE or name.startswith("optimizer.")}
    if not _SAME_STATE.issuperset(changes.get("optim", ())):
        fixed |= {"optim"}
    allowed = set(allowed)
    known = {*_flat(saved), *_flat(current), *(f"model.{part}" for part in {**saved["model"], **current["model"]})}
    known |= {*GRPOConfig.__dataclass_fields__, "optimizer", "lr_scheduler", "stopped_early"}
    for name in sorted(allowed - known):
        remedy = did_you_mean(name, known, "leave it out.")
        raise ConfigError(f"allow_changed_on_resume={name!r} is unknown; {remedy}")
    allowed -= fixed
    refused = {n: v for n, v in changes.items() if n in fixed or allowed.isdisjoint((n, n.split(".")[0]))}
    if not refused:
        return changes
    lines = "\n".join(
        f"  {part}: {shortened(json.dumps(old), 80)} in the checkpoint, {shortened(json.dumps(new), 80)} now"
        for part, old, new in differences(refused)
    )
    remedy = "Put these back, or start a new run with the checkpoint's weights"
    if fixed:
        remedy += f": the optimizer keeps the checkpoint's {', '.join(sorted(fixed))}"
    # the weights of another shape are not read, whatever is allowed
    if others := {n for n in refused.keys() - fixed if not (n.startswith("model.") and "model.parameters" in fixed)}:
        names = sorted(allowed | {name if name.startswith("model.") else name.split(".")[0] for name in others})
        remedy += (
            f". If {'the other' if fixed else 'the'} change is meant, set allow_changed_on_resume={names} (as an "
            f"option: --allow_changed_on_resume {' '.join(names)})"
        )
    raise CheckpointError(f"{folder} belongs to another run:\n{lines}\n{remedy}.")
