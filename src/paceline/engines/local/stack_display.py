"""Stacks that ranks wrote into their stack files, for people: equal stacks are shown once."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.core.wording import ranks

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_ENTRY = "engines/local/forked_rank.py"  # only the main thread comes from there
_RUNS_A_SCRIPT = ("engines/local/script_main.py", "<frozen runpy>")  # between the entry and a user's script
_CRASH = "Fatal Python error"
_INNERMOST = 3
_OUTERMOST = 5


def frames(dump: str) -> list[str]:
    """Return the innermost frames of the thread that matters, innermost first, without the process's own
    start."""
    found = [match for line in _thread(dump) if (match := _FRAME.match(line))]
    files = [match["file"] for match in found]
    start = next((number for number, file in enumerate(files) if file.endswith(_ENTRY)), None)
    # From there on are the process's own beginnings, and the last frame before them is the entry.
    end = len(files) if start is None else min(start, max(1, start - 1))
    while end > 1 and files[end - 1].endswith(_RUNS_A_SCRIPT):
        end -= 1
    return _shorten([f"{match['file']}:{match['line']} in {match['name']}" for match in found[:end]])


def describe_stacks(by_rank: Mapping[int, list[str]]) -> str:
    """Return lines with the stack of each rank; ranks with equal stacks share an entry."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, where in sorted(by_rank.items()):
        groups.setdefault(tuple(where), []).append(rank)
    lines: list[str] = []
    for place, sharing in groups.items():
        # Each rank is named: the line is the only place that says where the rank is.
        who = ranks(sharing, all_named=True)
        lines.append(f"  {who}: {place[0] if place else 'no Python code was running'}")
        lines += [f"      called from {frame}" for frame in place[1:]]
    return "\n".join(lines)


def _shorten(places: list[str]) -> list[str]:
    """Return where it is and where the user's code called it; what is in between matters least."""
    left_out = len(places) - _INNERMOST - _OUTERMOST
    if left_out <= 0:
        return places
    return [*places[:_INNERMOST], f"{left_out} more", *places[-_OUTERMOST:]]


def _thread(dump: str) -> list[str]:
    """Return the stack of the thread that crashed; of a process that was asked, that of its main thread,
    because the signal may go to any."""
    blocks = re.split(r"^(?=(?:Current thread|Thread) 0x)", dump, flags=re.MULTILINE)
    current = [block for block in blocks if block.startswith("Current thread")]
    main = [block for block in blocks if f'{_ENTRY}"' in block]
    if _CRASH in dump:
        return (current or blocks)[-1].splitlines()
    return (main or current or blocks)[-1].splitlines()
