"""The example of a reward of one's own: what it gives, and that the recipe finds it by its path."""

from __future__ import annotations

import pytest

from grpo_ext.rewards.registry import resolve_rewards
from tests.support.toy_recipe import ROOT


@pytest.fixture(scope="module")
def share_in_place():
    (found,) = resolve_rewards([f"{ROOT / 'recipes' / 'rewards' / 'example.py'}:share_in_place"])
    return found


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [("abcd", "abcd", 1.0), ("abdc", "abcd", 0.5), ("", "abcd", 0.0), ("abcdef", "abc", 0.5), ("", "", 0.0)],
)
def test_it_is_the_share_of_characters_in_place(share_in_place, completion, gold, reward):
    assert share_in_place(prompts=["?"], completions=[completion], answer=[gold]) == [reward]
    messages = [{"role": "assistant", "content": completion}]
    assert share_in_place(prompts=["?"], completions=[messages], answer=[gold]) == [reward]
