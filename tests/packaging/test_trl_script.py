"""TRL's own script with this trainer in place of TRL's, as docs/coming-from.md writes it down."""

import json
import re

from tests.support import forks

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
