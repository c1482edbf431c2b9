"""Options between processes: a dataclass at both ends, plain data on the way."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import WireError
from paceline.core.plain_options import PlainOptions


@dataclass(frozen=True)
class Inner:
    file: Path


@dataclass(frozen=True)
class Some(PlainOptions):
    count: int
    names: tuple[str, ...] = ()
    inner: Inner | None = None
    table: dict[str, Any] = field(default_factory=dict)


def test_options_come_back_as_they_were():
    given = Some(3, ("a", "b"), Inner(Path("/x")), {"links": {"inside": 1.0}})
    plain = json.loads(json.dumps(given.to_plain()))
    assert plain == {
        "count": 3,
        "names": ["a", "b"],
        "inner": {"file": "/x"},
        "table": {"links": {"inside": 1.0}},
    }
    assert Some.from_plain(plain) == Some.from_plain(given.to_plain()) == given


@pytest.mark.parametrize(
    "plain", [{}, {"count": "three"}, {"count": 3, "more": 1}, {"count": 3, "inner": {}}, []]
)
def test_anything_else_is_refused_with_the_name_of_the_options(plain: Any):
    with pytest.raises(WireError, match="these are not Some"):
        Some.from_plain(plain)
