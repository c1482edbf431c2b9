"""What a control message costs: encode; decode and validate.

    python -m bench.control_messages
    python -m bench.before_after OTHER --only control_messages    # beside another checkout

The other checkout may be of a time before msgspec, with other names: `_names` has both.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

_ROUNDS, _CALLS = 15, 2000
_EIGHT = tuple(range(8))


def _names() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any], type, type, type, str]:
    """Return encoder, decoder, the classes of heartbeat, report and view, and the report's field of held
    shards."""
    try:
        from paceline.control import channel, messages as new
    except ImportError:
        from paceline.core.control import channel as old_channel, messages as old  # type: ignore[import-not-found]

        return old_channel.frame, old_channel.unframed, old.Beat, old.Report, old.View, "held"
    return channel.frame, channel.decode_frame, new.Heartbeat, new.MemberReport, new.View, "held_shards"


def figures() -> dict[str, float]:
    """Return seconds of processor time, by message and direction: the median of rounds."""
    encode, decode, heartbeat, report, view, held = _names()
    messages = {
        "heartbeat": heartbeat(
            phase="forward",
            seconds=0.12,
            progress=(1234, 3, 0),
            waits_for=(1, 2),
            step_seconds=0.2,
            rss=1 << 30,
        ),
        "report": report(
            generation=7,
            progress=(1234, 3, 0),
            digest="ab" * 32,
            agreed=1233,
            trail=tuple((step, "0123456789abcdef") for step in range(1200, 1216)),
            **{held: (0, 1, 2)},
        ),
        "view of 8": view(
            generation=8,
            members=_EIGHT,
            slots=_EIGHT,
            pids=tuple(range(4000, 4008)),
            hosts=("host",) * 8,
            hostnames=("host",) * 8,
            endpoints=(("127.0.0.1", 40000),) * 8,
            shards=tuple((index, index + 8) for index in range(8)),
        ),
    }
    found = {}
    for name, message in messages.items():
        data = encode(message)
        assert decode(data) == message
        found[f"{name}: encode"] = _seconds(functools.partial(encode, message))
        found[f"{name}: decode and validate"] = _seconds(functools.partial(decode, data))
    return found


def main() -> None:
    for name, seconds in figures().items():
        print(f"{name:32}{seconds * 1e6:10.2f} microseconds")


def _seconds(call: Callable[[], object]) -> float:
    found = []
    for _ in range(_ROUNDS):
        begun = time.thread_time()
        for _ in range(_CALLS):
            call()
        found.append((time.thread_time() - begun) / _CALLS)
    return statistics.median(found)


if __name__ == "__main__":
    main()
