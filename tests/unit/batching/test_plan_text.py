"""The notes of a plan, by the command that prints it: what is seldom meant, with the size that avoids it."""

import pytest
from typer.testing import CliRunner

from grpo_ext.tools.cli import app

STEP = ["--num_generations", "4", "--global_batch_size", "16"]
CUT = "Steps cut groups; advantages are still computed over whole groups."
TOKENS = "Sampled tokens depend on the number of processes; set rollout_chunk_size=8 to avoid this for up to 2."


def plan(*options: str) -> str:
    done = CliRunner().invoke(app, ["plan", *STEP, *options])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (["--global_batch_size", "18", "--rollout_batch_size", "36"], CUT),
        (["--processes", "8"], "Only 4 of 8 processes sample."),
        (
            ["--processes", "4", "--rollout_chunk_size", "16"],
            "Only 1 of 4 processes sample; rollout_chunk_size=4 uses more of them.",
        ),
        (["--processes", "2", "--per_device_train_batch_size", "4"], TOKENS),
        (["--per_device_train_batch_size", "6"], "Micro-batches of 6 cut groups, which rounds gradients; use a"),
        (
            ["--num_prompts", "9", "--dataloader_drop_last", "True"],
            "9 prompts = 2 optimizer steps, 1 prompt(s) dropped",
        ),
        (["--sampling_mask", "replay", "--top_k", "5"], "up to 5 ids per token"),
    ],
)
def test_a_note_is_printed_where_it_holds(options, note):
    assert note in plan(*options)
    plain = plan("--bf16", "False", "--per_device_train_batch_size", "4")
    assert note not in plain
    assert "unknown (pass --num_prompts)" in plain
