"""Words for sentences that people read."""

from __future__ import annotations

import pytest

from paceline.core.wording import counted, first_line, listed, ranks


@pytest.mark.parametrize(("text", "line"), [("no", "no"), ("no\nmore", "no"), ("", ""), ("\nlate", "")])
def test_the_first_line_of_an_error(text, line):
    assert first_line(ValueError(text)) == line


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 workers are"), (1, "1 worker is"), (2, "2 workers are"), (1024, "1,024 workers are")],
)
def test_a_count_agrees_with_noun_and_verb(number, text):
    assert counted(number, "worker", "is", "are") == text
    assert counted(number, "worker") == text.rpartition(" ")[0]


@pytest.mark.parametrize(
    ("names", "text"), [([], ""), ([12], "12"), ([12, 13], "12 and 13"), (["a", "b", "c"], "a, b and c")]
)
def test_a_list(names, text):
    assert listed(names) == text


def test_many_ranks_are_counted_unless_all_are_to_be_named():
    assert ranks(range(6)) == "ranks 0, 1, 2, 3, 4 and 5"
    assert ranks(range(7)) == "ranks 0, 1, 2 and 4 others"
    assert ranks(range(7), all_named=True) == "ranks 0, 1, 2, 3, 4, 5 and 6"
    assert ranks([3], "waits", "wait", all_named=True) == "rank 3 waits"
    assert ranks([4, 3], "waits", "wait", all_named=True) == "ranks 3 and 4 wait"
    assert ranks([], all_named=True) == "no rank"
