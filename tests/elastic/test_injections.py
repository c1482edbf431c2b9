"""Faults on demand as a supervisor knows them: written once, remembered, told to the rank's next life."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from paceline.core import events, journal
from paceline.core.control.messages import Injected
from paceline.elastic.shell.chronicle import Chronicle
from paceline.elastic.shell.injections import Injections
from paceline.elastic.shell.memory import Memory, Remembered
from paceline.elastic.shell.seats import Seat


def supervisor_of(folder: Path, confirmed: list[int]) -> Any:
    """As much of one as hears of faults; what it keeps it finds again."""
    memory = Memory(folder)
    one = SimpleNamespace(
        recalled=memory.recall() or Remembered(), chronicle=Chronicle(folder / "journal.jsonl")
    )
    one.staff = SimpleNamespace(confirm_seat=lambda seat: confirmed.append(seat.member))
    one.injections = Injections(cast(Any, one))
    one.keep = lambda: memory.keep(Remembered(injected=one.injections.came))
    return one


def said(index: int, before: int = 0, time: float = 1.0, rank: int = 2) -> Injected:
    event = events.FaultInjected(time=time, rank=rank, step=5, phase="data", fault="kill", index=index)
    return Injected(index=index, before=before, line=events.to_json(event))


def test_what_came_is_known_to_the_next_supervisor_and_written_once(tmp_path):
    confirmed: list[int] = []
    first = supervisor_of(tmp_path, confirmed)
    first.injections.hear(Seat(7, 2), said(0))
    first.injections.hear(Seat(7, 2), said(3))
    first.chronicle.close()
    second = supervisor_of(tmp_path, confirmed)
    # Its word did not arrive, so the worker says it again: at its next chance, so in another line.
    second.injections.hear(Seat(7, 2), said(3, time=2.0))
    second.injections.hear(Seat(8, 2), said(3, time=3.0))  # a fault with `times`, in the next life
    second.injections.hear(Seat(8, 2), said(3, before=1, time=4.0))
    second.injections.hear(Seat(4, 1), said(0, rank=1, time=5.0))
    second.chronicle.close()
    assert confirmed == [7, 7, 7, 8, 8, 4]
    assert second.injections.of(2) == (0, 3, 3, 3)
    assert second.injections.of(1) == (0,)
    assert second.injections.of(0) == ()
    written = [event.time for event in journal.iterate(tmp_path / "journal.jsonl")]
    assert written == [1.0, 1.0, 3.0, 4.0, 5.0]


def test_nothing_is_confirmed_while_the_disk_is_full(tmp_path, monkeypatch):
    confirmed: list[int] = []
    one = supervisor_of(tmp_path, confirmed)
    with monkeypatch.context() as patched:
        patched.setattr(Chronicle, "complete", property(lambda self: False))
        one.injections.hear(Seat(7, 2), said(0))
    assert confirmed == []
    one.injections.hear(Seat(7, 2), said(0))
    assert confirmed == [7]
    one.chronicle.close()
