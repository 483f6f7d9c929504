"""The comparison of greedy text counts equal first tokens."""

from __future__ import annotations

from app.settings import DEMO_DIRECTORY
from app.text.tokenizer import Tokenizer
from tools.measure.same_text import encode, num_equal, table
from tools.peers.turns import Turn, deal


def test_the_table_counts_equal_first_tokens() -> None:
    ours = [[1, 2, 3, 4], [5, 6, 7, 8]]
    theirs = [[1, 2, 3, 4], [5, 9, 7, 8]]
    lines = table(["a", "b"], ["ours", "peer"], [ours, theirs], same=2).splitlines()
    assert lines[2:] == ["| a | 4 |", "| b | 1 |", "| texts with 2 or more | 1 of 2 |"]
    assert num_equal([1, 2], [2, 2]) == 0


def test_prompts_are_messages_of_a_user_and_reach_every_side() -> None:
    (ids,) = encode(DEMO_DIRECTORY, ["a small boat"])
    plain = Tokenizer(DEMO_DIRECTORY).encode("a small boat", add_special_tokens=False)
    assert set(plain[1:]) < set(ids)
    assert len(ids) > len(plain)
    assert deal(Turn(1, len(ids), 8, 0, [ids])) == [ids]
