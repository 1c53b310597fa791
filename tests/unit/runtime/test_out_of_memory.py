"""Work that runs out of memory is halved, done again, and remembers what fitted."""

import pytest
import torch

from grpo_ext.errors import MemoryShortageError
from grpo_ext.runtime.out_of_memory import Halving, MicroBatchLimits, is_out_of_memory


def limited(most: int, sizes: list[int]):
    """Work that fits up to `most` rows; `sizes` takes the number of rows of every call."""

    def work(rows):
        sizes.append(len(rows))
        if len(rows) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return list(rows)

    return work


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_every_row_is_done_once_in_order_and_the_size_is_kept(most):
    halving, second = Halving("scoring", "help"), []
    for seen in ([], second):
        results = halving.run(range(8), limited(most, seen))
        assert [row for piece in results for row in piece] == list(range(8))
    assert max(second) <= most
    assert halving.limit is None if most == 8 else halving.limit <= most


@pytest.mark.parametrize(("expected", "sizes"), [(8, [8]), (5, [4, 4]), (3, [3, 3, 2]), (0, [1] * 8), (None, [8])])
def test_work_is_cut_before_it_exceeds_the_expected_memory(expected, sizes, caplog):
    halving, seen = Halving("scoring", "help"), []
    for _ in range(2):
        results = halving.run(range(8), limited(max(sizes), seen), expected)
        assert [row for piece in results for row in piece] == list(range(8))
    assert seen == sizes * 2
    assert halving.limit is None  # memory did not run out
    assert caplog.text.count("expected to exceed the free memory") == (len(sizes) > 1)
    fixed, seen = Halving("scoring", "help", enabled=False), []
    fixed.run(range(8), limited(8, seen), expected)
    assert seen == [8]


def test_work_that_cannot_be_cut_raises_an_error_with_a_remedy():
    with pytest.raises(MemoryShortageError, match=r"scoring ran out of memory with 1 completion.*2 GiB.*shorter"):
        Halving("scoring", "take shorter ones").run(range(4), limited(0, []))
    with pytest.raises(MemoryShortageError, match="4 completion"):  # a canonical piece
        Halving("scoring", "help", enabled=False).run(range(4), limited(3, []))


def test_a_token_budget_halves_from_the_tokens_used():
    limits = MicroBatchLimits(8, tokens=4096)
    assert limits.shrink(6, 1000) == "micro_batch_tokens=500"
    assert limits.rows == 6


def test_a_resumed_run_keeps_the_smaller_sizes():
    saved = MicroBatchLimits(8)
    saved.shrink(8, 100)
    resumed = MicroBatchLimits(16)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.rows, resumed.failures) == (4, 1)
    untouched = MicroBatchLimits(16)
    untouched.load_state_dict(MicroBatchLimits(2).state_dict())
    assert untouched.rows == 16  # it never failed: the size is the user's choice


def test_only_memory_errors_are_out_of_memory():
    for text in ("CUDA out of memory. Tried to allocate 2 GiB", "DefaultCPUAllocator: can't allocate memory"):
        assert is_out_of_memory(RuntimeError(text)), text
    for text in (
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if a tensor is not contiguous",
        "[enforce fail at allgather.cc:27] op.preamble.length <= op.nbytes. 48 vs 16",
    ):
        assert not is_out_of_memory(RuntimeError(text)), text
