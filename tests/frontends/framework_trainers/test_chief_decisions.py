"""What the chief decides for all ranks, and what becomes of them where it fails at that."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.errors import PeerLostError, UsageError
from paceline.frontends.framework_trainers.chief_decisions import decided_by_chief


def chief(decide: Callable[[], Any]) -> tuple[Any, str]:
    """Return what the chief returns or raises, and what the other ranks get of it."""
    sent: list[str] = []

    def broadcast(found: list[Any]) -> list[Any]:
        sent.append(json.dumps(found))
        return found

    try:
        outcome = decided_by_chief(decide, True, broadcast)
    except Exception as error:
        outcome = error
    (text,) = sent
    return outcome, text


def other(text: str) -> Any:
    return decided_by_chief(lambda: pytest.fail("only the chief decides"), False, lambda _: json.loads(text))


@pytest.mark.parametrize("decided", [None, {"step": 3}, [1, "two", None]])
def test_all_ranks_learn_what_the_chief_decides(decided: Any) -> None:
    outcome, text = chief(lambda: decided)
    assert outcome == other(text) == decided


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (
            UsageError("no such folder", remedy="name one"),
            UsageError,
            "rank 0 refuses the run: no such folder",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            PeerLostError,
            "rank 0 ended with OSError: [Errno 28] No space left on device",
        ),
        (KeyError("batches"), PeerLostError, "rank 0 ended with KeyError: 'batches'"),
    ],
)
def test_all_ranks_end_with_what_the_chief_raises(
    raised: Exception, kind: type[Exception], said: str
) -> None:
    def decide() -> None:
        raise raised

    outcome, text = chief(decide)
    assert outcome is raised
    with pytest.raises(kind) as ended:
        other(text)
    assert str(ended.value).startswith(said)
    assert "\n  try: " in str(ended.value)
