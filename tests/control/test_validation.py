"""A message of a socket is accepted only where every field is of its type and in its range."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.control import message_codec
from paceline.control.messages import (
    REGISTRY,
    CollectiveFailed,
    Heartbeat,
    MemberAccepted,
    PayloadChunk,
    StackReply,
    StepReceipt,
)
from paceline.core.errors import WireError

BEAT = {"phase": "forward", "seconds": 1.5}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unknown": 1}, "'unknown' is not known"),
        ({7: 1}, "'7' is not known"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": float("inf")}, "seconds"),
        ({"seconds": -0.5}, "seconds"),
        ({"seconds": 1e10}, "seconds"),
        ({"seconds": "1.5"}, "seconds"),
        ({"seconds": True}, "seconds"),
        ({"rss": True}, "rss"),
        ({"rss": 1.0}, "rss"),
        ({"rss": 1 << 60}, "rss"),
        ({"rss": -1}, "rss"),
        ({"phase": "x" * 1025}, "phase"),
        ({"phase": b"forward"}, "phase"),
        ({"phase": None}, "phase"),
        ({"progress": [1, 2]}, "progress"),
        ({"progress": [1, 2, -3]}, "progress"),
        ({"waits_for": "12"}, "waits_for"),
        ({"waits_for": [1, None]}, "waits_for"),
    ],
)
def test_a_field_that_does_not_fit_is_refused(changes: dict[Any, Any], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        message_codec.from_plain(["Heartbeat", {**BEAT, **changes}])


def test_a_field_that_is_missing_is_refused() -> None:
    with pytest.raises(WireError, match="seconds"):
        message_codec.from_plain(["Heartbeat", {"phase": "forward"}])


@pytest.mark.parametrize("plain", [None, [], ["Heartbeat"], ["Nonsense", {}], [7, {}], ["Heartbeat", []], {}])
def test_what_is_no_message_is_refused(plain: object) -> None:
    with pytest.raises(WireError, match="not a message"):
        message_codec.from_plain(plain)


def test_numbers_and_lists_become_what_the_annotations_name() -> None:
    fields = {**BEAT, "seconds": 2, "progress": [1, 2, 3], "waits_for": [4, 5]}
    message = message_codec.from_plain(["Heartbeat", fields])
    assert message == Heartbeat(phase="forward", seconds=2.0, progress=(1, 2, 3), waits_for=(4, 5))
    assert isinstance(message, Heartbeat)
    assert type(message.seconds) is float


def test_text_for_a_log_is_cut() -> None:
    long = "x" * (1 << 17)
    failed = message_codec.from_plain([CollectiveFailed.kind, {"generation": 1, "reason": long}])
    assert isinstance(failed, CollectiveFailed)
    assert failed.reason == long[: 1 << 16]
    reply = message_codec.from_plain([StackReply.kind, {"member": 1, "state": "S", "frames": ["a", long]}])
    assert isinstance(reply, StackReply)
    assert [len(frame) for frame in reply.frames] == [1, 1 << 16]
    with pytest.raises(WireError, match="reason"):
        message_codec.from_plain([CollectiveFailed.kind, {"generation": 1, "reason": 5}])


@pytest.mark.parametrize("step", ["", "-1", "1 ", "1\n", "x", "\u0663", "9" * 15])
def test_a_step_as_text_is_a_whole_number(step: str) -> None:
    fields = {"generation": 1, "first": 1, "last": 1, "shards": [0], "hashes": {step: "ab"}}
    with pytest.raises(WireError, match="hashes"):
        message_codec.from_plain([StepReceipt.kind, fields])


def test_bytes_are_not_made_of_text() -> None:
    assert message_codec.from_plain([PayloadChunk.kind, {"offset": 0, "data": b"ab"}]) == PayloadChunk(
        offset=0, data=b"ab"
    )
    with pytest.raises(WireError, match="data"):
        message_codec.from_plain([PayloadChunk.kind, {"offset": 0, "data": "YWI="}])


def test_no_number_of_any_message_may_be_nan() -> None:
    with pytest.raises(WireError, match="patience"):
        message_codec.from_plain([MemberAccepted.kind, {"heartbeat": 1.0, "patience": float("nan")}])
    floats = {
        (kind, name)
        for kind, cls in REGISTRY.items()
        for name, hint in cls.__annotations__.items()
        if "float" in hint
    }
    assert floats == set()  # Seconds, which has a range
