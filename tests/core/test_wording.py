"""Words for sentences that people read."""

from __future__ import annotations

import pytest

from paceline.core.wording import first_line


@pytest.mark.parametrize(("text", "line"), [("no", "no"), ("no\nmore", "no"), ("", ""), ("\nlate", "")])
def test_the_first_line_of_an_error(text, line):
    assert first_line(ValueError(text)) == line
