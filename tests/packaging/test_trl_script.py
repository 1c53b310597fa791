"""TRL's own script with this trainer in place of TRL's, as docs/coming-from.md writes it down."""

import json
import re

from tests.support import forks
from tests.support.tiny import prompts

from .start import ROOT, write_start


def test_the_script_of_the_documents_runs_trls_script_with_this_trainer(tmp_path):
    (script,) = re.findall(r"```python\n(# train\.py.*?)```", (ROOT / "docs" / "coming-from.md").read_text(), re.S)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "mine.py").write_text("def long(completions, **_):\n    return [float(len(c)) for c in completions]\n")
    model, data = write_start(tmp_path)
    (tmp_path / "run.yaml").write_text("global_batch_size: 8\nmax_steps: 1\nlogging_steps: 1\nbf16: false\n")
    options = {
        "config": "run.yaml",
        "model_name_or_path": model,
        "dataset_name": data,
        "reward_funcs": "mine.long",
        "output_dir": "out",
        "num_generations": 4,
        "per_device_train_batch_size": 3,  # TRL refuses a size that does not divide
        "max_completion_length": 8,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    done = forks.python("train.py", *arguments, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 completions = 2 prompts x 4" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert "rewards/long/mean" in state["log_history"][0]
    assert "layout/useful_tokens_per_second" in state["log_history"][0]


OF_A_TRL_USER = """
from datasets import load_from_disk
from trl import GRPOConfig, GRPOTrainer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config


def long(completions, **columns):
    return [float(len(completion)) for completion in completions]


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=long,
        args=training_args,
        train_dataset=load_from_disk(script_args.dataset_name),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    assert model_args.lora_dropout == 0.05
    print("trained", trainer.state.global_step, GRPOTrainer.__module__)
"""


def test_a_script_with_trls_lora_options_trains_with_one_line_changed(tmp_path):
    """Whose dropout is TRL's default."""
    changed = OF_A_TRL_USER.replace(
        "from trl import GRPOConfig, GRPOTrainer", "from grpo_ext import GRPOConfig, GRPOTrainer"
    )
    (tmp_path / "train.py").write_text(changed)
    model, _ = write_start(tmp_path)
    prompts(8).save_to_disk(str(tmp_path / "prompts"))
    arguments = f"--model_name_or_path {model} --dataset_name prompts --use_peft --lora_r 4 --num_generations 4"
    arguments += (
        " --per_device_train_batch_size 8 --max_completion_length 8 --max_steps 2 --report_to none --bf16 false"
    )
    done = forks.python("train.py", *arguments.split(), "--output_dir", "out", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained 2 grpo_ext.trainer" in done.stdout
