"""`grpo-ext export`: from a checkpoint of any engine to a plain Hugging Face model folder.

Writes only the policy, as safetensors, with tokenizer, generation configuration, chat template and a model card; no
optimizer, no reference. Weights are copied as they are stored; converting them, merging an adapter or joining an
engine's shards holds the model in memory once. Needs no GPU and no training processes.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import CheckpointError, ConfigError, GrpoExtError
from ..run.checkpoint import FINGERPRINT, why_broken
from ..upstream.argument_checks import find_model
from ..upstream.merging import check_names, merged_model, save_merged
from ..upstream.model_card import base_name, usage

DTYPES = ("float32", "bfloat16", "float16")
_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_WEIGHTS = "model*.safetensors*"  # one file, or several with their index
# files that are copied with the weights, by the start of their names
_BESIDE = (
    *("generation_config", "preprocessor_config", "processor_config", "chat_template", "tokenizer"),
    *("special_tokens_map", "added_tokens", "vocab", "merges", "spiece", "sentencepiece"),
)


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    merge_adapter: bool = False,
    base: str | None = None,
    dtype: str | None = None,
    trust_shards: bool = False,
) -> str:
    """Write the policy of a checkpoint to a new folder; on any error nothing is left behind.

    Returns what the checkpoint held: "full", "adapter", "merged adapter", "FSDP shards" or "ZeRO shards".

    Args:
        merge_adapter: merge an adapter into its base model; otherwise only the adapter is written.
        base: the adapter's base model; default: the one that its configuration names.
        dtype: dtype of the written weights; default: the stored one (after a merge, that of the base).
        trust_shards: read an engine's shards, which are Python pickles and can run code.

    Raises:
        ConfigError: arguments contradict each other, or the folder exists.
        CheckpointError: the checkpoint is broken or of an unknown kind, lacks a weight of the model, or the disk is
            full.
    """
    source, target = Path(checkpoint), Path(out)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}.")
    if target.exists():
        raise ConfigError(f"{target} exists already; name a new folder, so that none of your files is overwritten.")
    adapter = _holds_adapter(source, trust_shards)
    if not adapter and (merge_adapter or base is not None):
        raise ConfigError(f"merge_adapter and base are for adapters, and {source} holds a whole model; leave them out.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="_exporting-", dir=target.parent) as temporary:
            folder = Path(temporary) / "export"  # next to other temporary folders
            if adapter:
                base = base or json.loads((source / _ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
                kind = _write_adapter(source, folder, merge_adapter, base, dtype)
            else:
                kind = _write_model(source, folder, dtype)
            _copy_beside(source, folder)
            _write_card(source, folder, target.name, kind, base)
            folder.rename(target)
    except GrpoExtError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise CheckpointError(f"{source} could not be exported: {type(error).__name__}: {error}") from error
    return kind


def _holds_adapter(source: Path, trust_shards: bool) -> bool:
    """Whether a checkpoint holds an adapter, not a whole model; refuses one that holds neither or cannot be read."""
    if (reason := why_broken(source)) is not None:
        raise CheckpointError(f"{reason}; name another checkpoint.")
    adapter = (source / _ADAPTER_CONFIG).is_file()
    if not adapter and not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has neither config.json nor {_ADAPTER_CONFIG}, so what it holds is unknown.")
    if any(source.glob(_ADAPTER if adapter else _WEIGHTS)):
        return adapter
    if not (list(source.glob("pytorch_model_fsdp_*")) or (source / "latest").is_file()):
        raise CheckpointError(f"{source} holds no weights: neither safetensors nor shards of FSDP or DeepSpeed.")
    if not trust_shards:
        raise ConfigError(
            f"the weights in {source} are an engine's shards: Python pickles, which can run code when read. If "
            "you trust the checkpoint, add --trust-shards."
        )
    return adapter


def _write_model(source: Path, folder: Path, dtype: str | None) -> str:
    plain = folder if dtype is None else folder.with_name("plain")
    plain.mkdir()
    files, kind = list(source.glob(_WEIGHTS)), "full"
    for path in files:
        shutil.copyfile(path, plain / path.name)
    if not files:
        kind = _join_shards(source, plain)
    config = json.loads((source / "config.json").read_text())
    if "auto_map" not in config:  # custom model code is not run
        config = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
        (plain / "config.json").write_text(json.dumps(config))
        # checks names and shapes, because transformers only warns of missing weights, and initialises them
        model, info = _class_of(config).from_pretrained(plain, device_map="meta", output_loading_info=True)
        check_names(info["missing_keys"])
        config["dtype"] = str(model.dtype).removeprefix("torch.")  # as stored in the shards
    (plain / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if dtype is not None:
        _class_of(config).from_pretrained(plain, dtype=dtype).save_pretrained(folder)
    return kind


def _join_shards(source: Path, joined: Path) -> str:
    shards = next((path for path in sorted(source.glob("pytorch_model_fsdp_*")) if path.is_dir()), None)
    if shards is not None:
        from accelerate.utils import merge_fsdp_weights

        merge_fsdp_weights(str(shards), str(joined), safe_serialization=True)
        return "FSDP shards"
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(str(source), str(joined), safe_serialization=True)
    return "ZeRO shards"


def _class_of(config: dict[str, Any]) -> Any:
    """The class of a model, found as in TRL: AutoModelForCausalLM does not load models that take images."""
    return getattr(transformers, (config.get("architectures") or [""])[0], transformers.AutoModelForCausalLM)


def _write_adapter(source: Path, folder: Path, merge: bool, base: str | None, dtype: str | None) -> str:
    settings = json.loads((source / _ADAPTER_CONFIG).read_text()) | {"base_model_name_or_path": base}
    tensors = _adapter_tensors(source, folder.with_name("joined"))
    if dtype is not None and not merge:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    alone = folder.with_name("adapter") if merge else folder
    alone.mkdir()
    save_file(tensors, alone / _ADAPTER, metadata={"format": "pt"})
    (alone / _ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    if not merge:
        return "adapter"
    model = _load_base(base)
    stored = str(model.dtype).removeprefix("torch.")
    merged = merged_model(model, alone, tensors)
    save_merged(merged.to(getattr(torch, dtype or stored)), folder)
    return "merged adapter"


def _adapter_tensors(source: Path, joined: Path) -> dict[str, torch.Tensor]:
    """The adapter's tensors under PEFT's names, joined if each of an engine's processes wrote a part."""
    if (source / _ADAPTER).is_file():
        return load_file(source / _ADAPTER)
    joined.mkdir()
    _join_shards(source, joined)
    tensors = load_file(joined / "model.safetensors")
    return {name.replace(".default.", "."): tensor for name, tensor in tensors.items()}


def _load_base(name: str | None) -> Any:
    """Load the base model of an adapter in its stored dtype."""
    if not name:
        raise ConfigError("the adapter names no base model (it was built in memory); name it with --base.")
    find_model(name, {})
    config = transformers.AutoConfig.from_pretrained(name).to_dict()
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"{name} is quantised, and merging into quantised weights rounds the adapter away; name the original "
            "with --base, or export only the adapter."
        )
    return _class_of(config).from_pretrained(name, dtype="auto")


def _copy_beside(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        model_code = path.suffix == ".py" and not path.name.startswith("zero_to_")
        if path.is_file() and (path.name.startswith(_BESIDE) or model_code):
            shutil.copyfile(path, folder / path.name)
    if (source / "chat_templates").is_dir():
        shutil.copytree(source / "chat_templates", folder / "chat_templates")


def _write_card(source: Path, folder: Path, title: str, kind: str, base: str | None) -> None:
    adapter = (folder / _ADAPTER_CONFIG).is_file()
    base, images = base_name(base), (folder / "processor_config.json").is_file()
    code = usage(title, base, adapter, (folder / "chat_template.jinja").is_file(), images)
    run = json.loads(path.read_text()) if (path := source / FINGERPRINT).is_file() else {}
    plain = {n: v for n, v in run.get("settings", {}).items() if v is not None and not isinstance(v, (dict, list))}
    settings = json.dumps({"rewards": run.get("rewards"), **plain}, indent=1)
    (folder / "README.md").write_text(
        f"---\nlibrary_name: {'peft' if adapter else 'transformers'}\ntags: [grpo, trl, grpo_ext]\n---\n\n# {title}\n\n"
        f"{f'`{base}`, trained' if base else 'Trained'} with GRPO (TRL, grpo_ext): {source.name}, {kind}.\n\n"
        f"{code}\n\nSettings of the run:\n\n```json\n{settings}\n```\n"
    )
