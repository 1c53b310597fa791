"""On GPUs: what `join` sends between processes arrives with the same bits, also under NCCL."""

import subprocess
import sys

import pytest
import torch

from grpo_ext.runtime.transfer import pack, unpack
from tests.distributed import tasks
from tests.support.gpu import DEVICE, TOY, needs_gpu
from tests.support.launch import ROOT, environment

pytestmark = [pytest.mark.gpu, needs_gpu]
EXCHANGE = """
import sys, torch
from accelerate import PartialState
from grpo_ext.runtime.collectives import gather_nested
from tests.distributed.tasks import RANK, nested
PartialState(cpu=sys.argv[1] == "cpu")
torch.save(gather_nested(nested(RANK)), f"{sys.argv[2]}/rank_{RANK}.pt")
"""


def same(found: dict, sent: dict) -> bool:
    tensors = [(part["ids"], part["cube"], part["parts"][0]["flags"]) for part in (found, sent)]
    return all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(*tensors))


def test_values_in_one_buffer_have_the_same_bits_after_a_way_over_the_device():
    replaced, buffer = pack(tasks.nested(1))
    assert same(unpack(replaced, buffer.to(DEVICE).cpu()), tasks.nested(1))
    assert not same(unpack(replaced, buffer.to(DEVICE).cpu()), tasks.nested(2))


@pytest.mark.skipif(not TOY and torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process")
def test_an_exchange_has_the_same_bits(tmp_path):
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        [*command, DEVICE, str(tmp_path)], env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for process in tasks.results(tmp_path):
        assert all(same(found, tasks.nested(rank)) for rank, found in enumerate(process))
