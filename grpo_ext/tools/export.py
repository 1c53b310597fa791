"""`grpo-ext export`: from a checkpoint of any engine to a plain Hugging Face model folder, which it checks.

The actor alone, as safetensors, with tokenizer, generation configuration, chat template and a model card; no optimizer,
no reference. Weights are copied file by file: memory holds one file (`max_shard_size`). Merging an adapter, putting an
engine's shards together and the check at the end hold the model once. Needs no GPU and no training processes.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData, split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..errors import CheckpointError, ConfigError, GrpoExtError
from ..forward.quantised import keep_4bit_weights
from ..run.checkpoint import checkpoints, why_broken
from ..run.fingerprint import FINGERPRINT
from ..run.manifest import read_manifest
from ..run.recorded_completions import RecordedCompletions, score_alone

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# mean difference of a log-probability that the coarsest number format in play explains
ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_INDEX, _PLAIN = "model.safetensors.index.json", "model.safetensors"
# beginnings of the names of the files that go with the weights
_BESIDE = (
    *("generation_config", "preprocessor_config", "processor_config", "chat_template", "tokenizer"),
    *("special_tokens_map", "added_tokens", "vocab", "merges", "spiece", "sentencepiece"),
)


@dataclass(frozen=True)
class _Job:
    """What is exported where, and how; see `export`.

    Attributes:
        writing: the folder that becomes the model's, if all goes well.
        merge: put the adapter into its base model.
    """

    source: Path
    writing: Path
    adapter: bool
    merge: bool
    base: str | None
    dtype: str | None
    max_shard_size: str


@dataclass
class Exported:
    """What came out.

    Attributes:
        kind: what the checkpoint held ("full", "adapter", "merged adapter", "FSDP shards", "ZeRO shards").
        size: of the folder, in bytes.
        difference: mean difference of the recorded log-probabilities; None where the checkpoint holds none.
    """

    kind: str
    size: int
    difference: float | None


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    merge_adapter: bool = False,
    base: str | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    check: bool = True,
    trust_shards: bool = False,
) -> Exported:
    """Write the policy of a checkpoint to a new folder and check it; on any error nothing is left behind.

    Args:
        merge_adapter: put an adapter into its base model; otherwise the adapter alone is written.
        base: the adapter's base model, where it is not the one its configuration names.
        dtype: of the written weights; default: as they are (merged: as the base's).
        check: load the result and compare it with the checkpoint's recorded completions; holds the model in memory.
        trust_shards: weights in an engine's shards are Python pickles, which run code when they are read.

    Raises:
        ConfigError: arguments that contradict, or a folder that exists.
        CheckpointError: the checkpoint is broken, of a newer version or of no known kind, the disk is full, or the
            written model scores the recorded completions differently.
    """
    source, target = Path(checkpoint), Path(out)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}.")
    if target.exists():
        raise ConfigError(f"{target} exists already; name a new folder, so that nothing of yours is overwritten.")
    try:
        _split({}, max_shard_size)
    except ValueError:
        raise ConfigError(f"max_shard_size={max_shard_size!r} is no size; write for example 5GB.") from None
    adapter = _holds_adapter(source, trust_shards)
    if not adapter and (merge_adapter or base is not None):
        raise ConfigError(f"merge_adapter and base are for adapters, and {source} holds a whole model; leave them out.")
    try:
        with _beside(target) as writing:
            job = _Job(source, writing, adapter, merge_adapter, base, dtype, max_shard_size)
            kind = _write_adapter(job) if adapter else _write_model(job)
            _copy_beside(job)
            difference = _verify(job) if check else None
            _write_card(job, kind, difference)
            size = sum(path.stat().st_size for path in writing.rglob("*") if path.is_file())
    except GrpoExtError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{source} could not be exported: {type(error).__name__}: {error}") from error
    return Exported(kind, size, difference)


def _holds_adapter(source: Path, trust_shards: bool) -> bool:
    """Whether a checkpoint holds an adapter, or a whole model; refuses what is neither, or cannot be read."""
    inside = checkpoints(source)
    if inside:
        raise CheckpointError(f"{source} is a run; name one of its checkpoints, for example {inside[-1]}.")
    reason = why_broken(source)
    if reason is not None:
        raise CheckpointError(f"{reason}; export another checkpoint of the run.")
    adapter = (source / _ADAPTER_CONFIG).is_file()
    if not adapter and not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has neither config.json nor {_ADAPTER_CONFIG}, so what it holds is unknown.")
    if any((source / name).is_file() for name in ([_ADAPTER] if adapter else [_PLAIN, _INDEX])):
        return adapter
    if not (list(source.glob("pytorch_model_fsdp_*")) or (source / "latest").is_file()):
        raise CheckpointError(f"{source} holds no weights that are known: no safetensors, no FSDP or DeepSpeed shards.")
    if not trust_shards:
        raise ConfigError(
            f"the weights in {source} are an engine's shards, Python pickles that run code when they are read; if the "
            "checkpoint is your own, add --trust-shards."
        )
    return adapter


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` if all went well, and is gone otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="_exporting-", dir=target.parent) as name:
        writing = Path(name) / target.name
        writing.mkdir()
        yield writing
        writing.rename(target)


# ---- Weights --------------------------------------------------------------------------------------------------------


def _write_model(job: _Job) -> str:
    if (job.source / _PLAIN).is_file() or (job.source / _INDEX).is_file():
        _copy_weights(job.source, job)
        kind = "full"
    else:
        with tempfile.TemporaryDirectory(prefix="_joining-", dir=job.writing.parent) as name:
            joined = Path(name)
            kind = _join_shards(job.source, joined)
            _copy_weights(joined, job)
    config = json.loads((job.source / "config.json").read_text())
    config["dtype"] = job.dtype or _main_dtype(job.writing)
    config.pop("torch_dtype", None)
    (job.writing / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return kind


def _join_shards(source: Path, joined: Path) -> str:
    """Put the weights that an engine's processes wrote together, with the engine's own tool."""
    shards = next((path for path in sorted(source.glob("pytorch_model_fsdp_*")) if path.is_dir()), None)
    if shards is not None:
        from accelerate.utils import merge_fsdp_weights

        merge_fsdp_weights(str(shards), str(joined), safe_serialization=True)
        return "FSDP shards"
    try:
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
    except ImportError:
        raise ConfigError(
            f"{source} holds weights in DeepSpeed's shards; `pip install deepspeed` to put them together."
        ) from None
    convert_zero_checkpoint_to_fp32_state_dict(str(source), str(joined), safe_serialization=True)
    return "ZeRO shards"


def _weight_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor."""
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    with safe_open(folder / _PLAIN, "pt") as file:
        return dict.fromkeys(file.keys(), folder / _PLAIN)


def _split(sizes: dict[str, int], limit: str) -> Any:
    """Which tensors go into which file, from the bytes of each."""
    return split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )


def _copy_weights(weights: Path, job: _Job) -> None:
    files = _weight_files(weights)
    sizes: dict[str, int] = {}
    for name, path in files.items():
        with safe_open(path, "pt") as file:
            view = file.get_slice(name)
        stored = view.get_dtype()
        width = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}.get(stored, 2)
        if job.dtype is not None and stored.startswith(("F", "BF")):
            width = DTYPES[job.dtype].itemsize
        sizes[name] = math.prod(view.get_shape()) * width
    split = _split(sizes, job.max_shard_size)
    for shard, names in split.filename_to_tensors.items():
        tensors = {}
        for name in names:
            with safe_open(files[name], "pt") as file:
                tensors[name] = _converted(file.get_tensor(name), job.dtype)
        save_file(tensors, job.writing / shard, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (job.writing / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _converted(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    return tensor.to(DTYPES[dtype]) if dtype is not None and tensor.is_floating_point() else tensor


def _main_dtype(folder: Path) -> str:
    """The type most weights have."""
    counts: Counter[str] = Counter()
    for name, path in _weight_files(folder).items():
        with safe_open(path, "pt") as file:
            counts[file.get_slice(name).get_dtype()] += 1
    return {"BF16": "bfloat16", "F16": "float16"}.get(counts.most_common(1)[0][0], "float32")


def _adapter_tensors(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The adapter's tensors under PEFT's names, joined where an engine's processes wrote a part each."""
    path = source / _ADAPTER
    if not path.is_file():
        with tempfile.TemporaryDirectory(prefix="_joining-", dir=folder) as name:
            _join_shards(source, Path(name))
            tensors = load_file(Path(name) / _PLAIN)
        return {name.replace(".default.", "."): value for name, value in tensors.items()}
    return load_file(path)


def _write_adapter(job: _Job) -> str:
    settings = json.loads((job.source / _ADAPTER_CONFIG).read_text())
    tensors = _adapter_tensors(job.source, job.writing.parent)
    settings["base_model_name_or_path"] = job.base or settings.get("base_model_name_or_path")
    alone = job.writing.parent / "adapter" if job.merge else job.writing
    alone.mkdir(exist_ok=True)
    written = {n: _converted(t, None if job.merge else job.dtype).contiguous() for n, t in tensors.items()}
    save_file(written, alone / _ADAPTER, metadata={"format": "pt"})
    (alone / _ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    if not job.merge:
        return "adapter"
    model, stored = _with_adapter(alone, job.base, merging=True)
    merged = model.merge_and_unload()  # in float32: small updates vanish in a half precision
    merged = merged.to(stored if job.dtype is None else DTYPES[job.dtype])
    merged.save_pretrained(job.writing, max_shard_size=job.max_shard_size)
    return "merged adapter"


def _class_of(config: Any) -> Any:
    """The class of a model, as TRL finds it: one that takes images is no causal language model by its configuration."""
    import transformers

    return getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)


def _with_adapter(
    folder: Path, base: str | None, merging: bool, quantised: dict[str, Any] | None = None
) -> tuple[Any, torch.dtype]:
    """The base model with the adapter of a folder, in float32, and the type the base is stored in.

    Args:
        quantised: quantise the base like this while it is read, where it is not stored so.

    Raises:
        ConfigError: the base is unknown, or quantised where it is merged into.
    """
    from peft import PeftModel
    from transformers import AutoConfig

    settings = json.loads((folder / _ADAPTER_CONFIG).read_text())
    name = base or settings.get("base_model_name_or_path")
    if not name:
        raise ConfigError("the adapter names no base model (it was in memory); give it with --base.")
    config = AutoConfig.from_pretrained(name)
    stored_so = getattr(config, "quantization_config", None) is not None
    if merging and stored_so:
        raise ConfigError(
            f"{name} is quantised, and merging into quantised weights rounds the adapter away; give the original with "
            "--base, or export the adapter alone."
        )
    options = {} if quantised is None or stored_so else {"quantization_config": quantised}
    model = _class_of(config).from_pretrained(name, dtype=torch.float32, **options)
    keep_4bit_weights(model)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return PeftModel.from_pretrained(model, str(folder)), stored


# ---- What goes with them --------------------------------------------------------------------------------------------


def _copy_beside(job: _Job) -> None:
    for path in sorted(job.source.iterdir()):
        own_code = path.suffix == ".py" and not path.name.startswith("zero_to_")  # of models with code of their own
        wanted = path.is_file() and (path.name.startswith(_BESIDE) or own_code)
        if wanted and not (job.writing / path.name).exists():
            shutil.copyfile(path, job.writing / path.name)
    if (job.source / "chat_templates").is_dir():
        shutil.copytree(job.source / "chat_templates", job.writing / "chat_templates")


def _verify(job: _Job) -> float | None:
    """Load what was written and score the recorded completions with it; None where there is nothing to compare with.

    Raises:
        CheckpointError: the log-probabilities differ by more than rounding.
    """
    adapter = job.adapter and not job.merge
    recorded = RecordedCompletions.load(job.source)
    if recorded is None or (recorded.quantised and not adapter) or recorded.quantised is True:
        return None  # a merged model has the weights of the base as they were before they were rounded
    if adapter:
        try:
            model = _with_adapter(job.writing, job.base, merging=False, quantised=recorded.quantised or None)[0]
        except ImportError:  # of what reads quantised weights
            return None
        written = job.dtype or (
            "bfloat16" if recorded.quantised else "float32"
        )  # a device multiplies them in its own way
    else:
        from transformers import AutoConfig

        kind = _class_of(AutoConfig.from_pretrained(job.writing))
        model, written = kind.from_pretrained(job.writing, dtype="auto"), _main_dtype(job.writing)
    model.eval()
    difference = _difference(model, recorded)
    limit = max(ROUNDING[recorded.dtype], ROUNDING[written])
    worse = False
    if adapter:  # rounding may hide a small adapter, but it may not lead away from what was recorded
        with model.disable_adapter():
            worse = difference > 2 * _difference(model, recorded) and difference > ROUNDING["float32"]
    if worse or not difference <= limit:
        raise CheckpointError(
            f"the written model is not the one that was trained: log-probabilities of {len(recorded.prompts)} saved "
            f"samples differ by {difference:.1e} on average (rounding explains {limit:.0e}). Nothing was kept."
        )
    return difference


def _difference(model: Any, recorded: RecordedCompletions) -> float:
    pairs = zip(score_alone(model, recorded), recorded.logps)
    return float(torch.cat([(one - other).abs() for one, other in pairs]).mean())


def _write_card(job: _Job, kind: str, difference: float | None) -> None:
    fingerprint = json.loads(path.read_text()) if (path := job.source / FINGERPRINT).is_file() else {}
    entries = read_manifest(job.source.parent)
    versions = entries[-1]["versions"] if entries else {}
    state = job.source / "trainer_state.json"
    step = json.loads(state.read_text()).get("global_step") if state.is_file() else "?"
    library = "peft" if (job.writing / _ADAPTER_CONFIG).is_file() else "transformers"
    data = ModelCardData(library_name=library, tags=["grpo", "trl", "grpo_ext"])
    checked = "not checked"
    if difference is not None:
        checked = f"checked: log-probabilities of saved samples differ by {difference:.1e} on average"
    settings = sorted(fingerprint.get("settings", {}).items())
    rows = [f"| {n} | {v} |" for n, v in settings if v is not None and not isinstance(v, (dict, list))]
    text = [
        f"---\n{data.to_yaml()}\n---",
        f"# {job.writing.name}",
        f"Trained with GRPO (TRL, grpo_ext), exported after step {step} ({kind}; {checked}).",
        "Rewards: " + (", ".join(fingerprint.get("rewards", [])) or "unknown"),
        "Versions: " + (", ".join(f"{name} {value}" for name, value in versions.items() if value) or "unknown"),
        "## Settings\n",
        "| setting | value |\n|---|---|\n" + "\n".join(rows),
    ]
    ModelCard("\n\n".join(text) + "\n").save(job.writing / "README.md")
