"""An error that one process says, and the others raise."""

import pickle
import subprocess
import sys

from grpo_ext.errors import CheckpointError, quiet

SCRIPT = "from grpo_ext.errors import CheckpointError, quiet; raise quiet(CheckpointError('it is another run'))"


def test_a_quiet_error_travels_as_the_plain_one():
    copy = pickle.loads(pickle.dumps(quiet(CheckpointError("it is another run"))))
    assert (type(copy), str(copy)) == (CheckpointError, "it is another run")


def test_a_quiet_error_that_nothing_catches_ends_the_process_in_silence():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
