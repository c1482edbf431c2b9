"""Faults on demand: the text that names them, and `Chaos`, the value that it makes.

    kill rank=2 step=20; hang rank=1 step=40 phase=collective; slow rank=0 factor=3; partition rank=3 for=5s
    random kinds=kill,hang rate=0.02 seed=3 until=200

The text travels to the workers and reads back to an equal value. Unknown words are refused with
those that are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, final

from paceline.core.faults import FIELDS, KINDS, RANDOM, Fault, RandomFaults, refuse, refuse_word

__all__ = ["Chaos", "Fault", "RandomFaults", "parse"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(ms|s|m|)", re.IGNORECASE)
_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0}


@final
@dataclass(frozen=True, init=False)
class Chaos:
    """Faults to inject into a run: `Chaos("kill rank=2 step=20; slow rank=0 factor=3")`.

    Takes texts, faults and other `Chaos`; `str` gives a text that makes an equal one.
    """

    parts: tuple[Fault | RandomFaults, ...]

    def __init__(self, *given: str | Fault | RandomFaults | Chaos) -> None:
        parts: list[Fault | RandomFaults] = []
        for one in given:
            if isinstance(one, Chaos):
                parts += one.parts
            elif isinstance(one, str):
                parts += parse(one)
            elif isinstance(one, Fault | RandomFaults):
                parts.append(one)
            else:
                refuse(
                    f"{one!r:.60} ({type(one).__name__}) is no fault",
                    'give text such as "kill rank=2 step=20"',
                    "chaos",
                )
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(part for part in self.parts if isinstance(part, Fault))

    @property
    def random(self) -> tuple[RandomFaults, ...]:
        return tuple(part for part in self.parts if isinstance(part, RandomFaults))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are named."""
        return tuple(sorted({part.rank for part in self.parts if part.rank is not None}))

    def unmet(self, met: Collection[int], ranks: Collection[int], last_step: int) -> list[str]:
        """Return what never came in a run that had these ranks and ended after `last_step`, and why. `met`
        are the places in `parts` of what did. Random faults need not come; their rank has to be there."""
        absent = set(self.ranks) - set(ranks)
        found: list[str] = []
        for index, part in enumerate(self.parts):
            if index in met:
                continue
            if part.rank in absent:
                found.append(f"{part} (there was no rank {part.rank})")
            elif isinstance(part, Fault) and part.step is not None and part.step > last_step:
                found.append(f"{part} (the run ended after step {last_step})")
            elif isinstance(part, Fault):
                where = "there" if part.phase is None else f"in phase {part.phase}"
                found.append(f"{part} (no worker that it is for was {where} in time)")
        return found

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of fault that may come."""
        drawn = (kind for part in self.random for kind in part.kinds)
        return frozenset([*(fault.kind for fault in self.faults), *drawn])

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __str__(self) -> str:
        return "; ".join(str(part) for part in self.parts)

    def __repr__(self) -> str:
        return f"Chaos({str(self)!r})"


def parse(text: str) -> Iterator[Fault | RandomFaults]:
    """Return the faults of a text; they are separated by semicolons or line ends."""
    for statement in re.split(r"[;\n]", text):
        kind, *words = statement.split() or [""]
        if kind:
            yield (
                _random(words, statement.strip())
                if kind == "random"
                else _fault(kind, words, statement.strip())
            )


def _fault(kind: str, words: list[str], statement: str) -> Fault:
    if kind not in KINDS:
        refuse_word(kind, "fault", (*KINDS, "random"), statement)
    values = _fields(words, KINDS[kind], kind, statement)
    if "rank" not in values:
        refuse(f"{statement!r} names no rank", f"add a rank: {kind} rank=1, or rank=all", "rank")
    if "attempt" in values and values["attempt"] is None:
        values["attempt"] = "all"  # None: in whichever life
    return Fault(kind=kind, **values)


def _random(words: list[str], statement: str) -> RandomFaults:
    values = _fields(words, RANDOM, "random", statement)
    for name, example in (("kinds", "kinds=kill,hang"), ("rate", "rate=0.02")):
        if name not in values:
            refuse(f"{statement!r} does not say its {name}", f"add {example}", name)
    return RandomFaults(**values)


def _fields(words: list[str], allowed: tuple[str, ...], kind: str, statement: str) -> dict[str, Any]:
    """Return the values of a statement by the names of the dataclass's fields."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not text:
            refuse(
                f"{word!r} in {statement!r} is not of the form name=value",
                f"{kind} takes {', '.join(f'{one}=...' for one in allowed)}",
                name,
            )
        if name not in allowed:
            refuse_word(name, f"field of {kind}", allowed, statement)
        field = FIELDS.get(name, name)
        if field in values:
            refuse(f"{name} is given twice in {statement!r}", f"keep one of them: {name}={text}", name)
        read, complaint, example = _PARSERS.get(name, _WHOLE)
        try:
            values[field] = read(text)
        except ValueError:
            refuse(f"{name}={text} in {statement!r} {complaint}", f"write {example.format(name)}", name)
    return values


def _whole_or_all(text: str) -> int | None:
    return None if text == "all" else int(text)


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return float(match[1]) * _UNITS[match[2].lower()]


# By field: how its text is read, and what to say of a text that cannot be.
_ValueParser = tuple[Callable[[str], Any], str, str]
_WHOLE: _ValueParser = (int, "is not a whole number", "{}=3")
_NUMBER: _ValueParser = (float, "is not a number", "{}=0.5")
_ONE_OR_ALL: _ValueParser = (_whole_or_all, "is neither a number nor `all`", "{}=1")
_LENGTH: _ValueParser = (_duration, "is no duration", "{0}=5s, {0}=200ms or {0}=1m")
_PARSERS: dict[str, _ValueParser] = {
    "rank": _ONE_OR_ALL,
    "attempt": _ONE_OR_ALL,
    "factor": _NUMBER,
    "rate": _NUMBER,
    "for": _LENGTH,
    "after": _LENGTH,
    "phase": (str, "", ""),
    "kinds": (lambda text: tuple(filter(None, text.split(","))), "", ""),
}
