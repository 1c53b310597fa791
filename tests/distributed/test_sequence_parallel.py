"""One pack over two and four processes: scores and gradients of the whole pack, what is exchanged, what is held."""

import re
from pathlib import Path

import pytest
import torch

from tests.distributed import slices
from tests.support.launch import on_processes
from tests.support.packs import FLOAT32
from tests.tolerances import DIFFERENT, SAME_ALGEBRA, UPDATE

SIZES = slices.SIZES


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of four processes has of every task."""
    folder = tmp_path_factory.mktemp("slices")
    status, output = on_processes(4, Path(slices.__file__), str(folder))
    assert status == 0, output[-3000:]
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.parametrize("size", SIZES)
def test_slices_give_the_scores_and_gradients_of_the_whole_pack(ranks, size):
    for rank in ranks:
        for (kind, shape), found in rank["kinds", size].items():
            exact = kind in slices.MODELS and kind not in FLOAT32
            assert max(found) <= (SAME_ALGEBRA if exact else UPDATE), f"{kind}, {shape}: {found}"


def test_every_case_was_run_in_groups_of_each_size(ranks, request):
    """With --full; otherwise those that are named."""
    for size in SIZES:
        expected = {*slices.CASES} if request.config.getoption("--full") else slices.FEW[size]
        assert {*ranks[0]["kinds", size]} == expected


@pytest.mark.parametrize("size", SIZES)
def test_masks_and_experts_are_those_of_the_whole_pack(ranks, size):
    for rank in ranks:
        found = rank["replayed", size]
        assert max(found["masks"]) <= SAME_ALGEBRA
        assert found["unmasked"] > DIFFERENT
        assert found["experts"]
        whole, sliced = found["counts"]
        assert sliced == whole
        assert whole[0] > 0
        assert max(found["routed"]) <= UPDATE


@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_that_members_count_twice_is_found(ranks, size):
    *scores, gradient = ranks[0]["controls", size]["summed_twice"]
    assert max(scores) <= SAME_ALGEBRA
    assert gradient > DIFFERENT


def test_a_slice_that_is_off_by_a_token_is_found(ranks):
    assert min(ranks[0]["controls", 2]["shifted"]) > DIFFERENT
    for rank in ranks:
        right, wrong = rank["refused"]
        assert right is None
        assert "times the rounding" in wrong


@pytest.mark.parametrize("size", SIZES)
def test_a_layer_has_two_exchanges_in_a_pass(ranks, size):
    layers, heads, shared, width, tokens = 4, 4, 2, 8, 16 + 47 + 46 + 30
    length = -(-tokens // size)
    keys = max(shared, size)  # repeated for more members
    of_states, of_output = (4 * width * length * n for n in (heads + 2 * keys, heads))
    for name, passes in (("plain", 1), ("checkpointing", 2)):
        forward, backward = ranks[0]["exchanges", size][name]
        assert forward == [of_states, of_output] * layers
        assert len(backward) == 2 * passes * layers
        assert sorted({*backward}) == sorted({of_states, of_output})


def test_a_member_holds_its_share_of_the_activations(ranks):
    whole = ranks[0]["saved whole"]
    for size, most in ((2, 0.6), (4, 0.35)):
        assert max(rank["saved", size] for rank in ranks) <= most * whole


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loss", "ConfigError: sequence_parallel_size=2 and OwnLoss._compute_loss"),
        ("log-probabilities", "_get_per_token_logps_and_entropies: each of 2 processes"),
        ("heads", "ModelError: sequence_parallel_size=2: Qwen2Config has 9 attention heads, .* use 1"),
        ("convolution", "ModelError: sequence_parallel_size=2 shares the tokens of packs, .*conv"),
        ("images", "ModelError: sequence_parallel_size=2 .*the model takes images; .*pass its tokenizer"),
        ("three", "ConfigError: sequence_parallel_size=3 does not divide the number of processes, 4; .* use 1, 2, 4"),
        ("gaps", "ConfigError: sequence_parallel_size=2, and a completion_mask that leaves out tokens between others"),
        ("not finite", r"PrecisionError: .*first in model\.layers\.0\.mlp"),
        ("lag", "ConfigError: sequence_parallel_size=2 cannot be combined with rollout_lag=1"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(ranks, name, words):
    for rank in ranks:
        assert re.search(words, rank["refusals"][name]), rank["refusals"][name]


@pytest.mark.full
def test_a_step_of_shared_completions_runs_again(ranks):
    text, rows, _ = ranks[0]["step again"]
    assert text == "step 2: the same bits"
    assert len(rows) == 16
    assert all(len(row["tokens"]["training"]) == len(row["tokens"]["ids"]) for row in rows)
    assert [rank["step again"][2] for rank in ranks] == [2, 0, 0, 0]  # TRL's methods are not collectives
