"""Faults as values: what happens to which worker, at which step and in which phase, and random ones.

Only the fields that `KINDS` lists make sense for a kind; the others are refused by name. Must not know the
text they are written as (see chaos_spec.py), nor how a fault is done.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, final

from paceline.core.errors import ConfigError

WAIT: Final = "wait"  # for the others, before a new group: a worker that joins begins with it
PHASES: Final = ("data", "forward", "backward", "collective", "optimizer", "checkpoint", "evaluation", WAIT)
# Those that every step of every worker with a shard goes through.
STEP_PHASES: Final = ("data", "forward", "backward", "collective", "optimizer")

_ANYWHERE = ("rank", "step", "phase", "times", "attempt")
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "kill": (*_ANYWHERE, "after"),
    "exit": (*_ANYWHERE, "code"),
    "raise": _ANYWHERE,
    "stop": (*_ANYWHERE, "for", "after"),
    "hang": (*_ANYWHERE, "for"),
    "deadlock": (*_ANYWHERE, "for"),
    "slow": ("rank", "step", "factor", "for", "times", "attempt"),
    "partition": (*_ANYWHERE, "for"),
    "corrupt": ("rank", "step", "times", "attempt"),
    "oom": _ANYWHERE,
    "leave": (*_ANYWHERE, "after"),
}
RANDOM: Final = ("kinds", "rate", "seed", "from", "until", "rank", "for", "factor", "code", "attempt")
# Where the text has another word than the field.
FIELDS: Final = {"for": "seconds", "from": "first"}
_PARTITION_SECONDS = 5.0
_SLOW_FACTOR = 3.0


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. Of the fields only those are allowed that `KINDS` lists for the kind (`for` is `seconds`).

    rank      the rank it acts on; None: all
    step      the step being computed, counted from 1; the fault comes at the first chance from there on
    phase     where in the step; None: at once
    factor    slow: how many times as long a shard takes
    seconds   how long it lasts; None: for ever (partition: 5 s)
    times     how often; slow: number of steps
    code      exit: the exit code
    after     kill, stop, leave: seconds from the beginning of the phase to the signal, wherever the worker is
              by then; None: the signal comes as the phase begins
    attempt   in which life of the rank, from 1, or "all". None: once in a run (or `times`), in whichever life
              gets there, so that no replacement dies the same death. With it `times` is how often in one
              life, or, for what ends a life, in how many lives
    """

    kind: str
    rank: int | None
    step: int | None = None
    phase: str | None = None
    factor: float | None = None
    seconds: float | None = None
    times: int | None = None
    code: int | None = None
    attempt: int | Literal["all"] | None = None
    after: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            refuse_word(self.kind, "fault", (*KINDS, "random"), str(self.kind))
        filled = self._filled()
        for name, value in filled.items():
            if value is not None and name not in KINDS[self.kind]:
                refuse_word(name, f"field of {self.kind}", KINDS[self.kind], f"{self.kind} {name}={value}")
        life = None if self.attempt == "all" else self.attempt
        _check_values(self.kind, filled | {"rank": self.rank, "attempt": life})
        if self.kind == "slow" and self.factor is None:
            object.__setattr__(self, "factor", _SLOW_FACTOR)
        if self.kind == "partition" and self.seconds is None:
            object.__setattr__(self, "seconds", _PARTITION_SECONDS)

    def _filled(self) -> dict[str, Any]:
        """Return the fields of some kinds by the names of `KINDS`, in the order of the text."""
        names = ("step", "phase", "factor", "for", "times", "code", "after")
        return {name: getattr(self, FIELDS.get(name, name)) for name in names}

    @property
    def ends_a_life(self) -> bool:
        """Return whether the worker is gone afterwards, by itself or because no rank can wait for it."""
        return self.kind in ("kill", "exit", "raise", "oom", "leave") or (
            self.kind in ("stop", "hang", "deadlock") and self.seconds is None
        )

    def meets(self, rank: int, attempt: int) -> bool:
        """Return whether life number `attempt` of this rank is concerned at all."""
        if self.rank is not None and self.rank != rank:
            return False
        if self.attempt is None:
            return True
        lives = self.times if self.ends_a_life else None
        if self.attempt == "all":
            return lives is None or attempt <= lives
        return self.attempt <= attempt < self.attempt + (lives or 1)

    def __str__(self) -> str:
        rank = "all" if self.rank is None else self.rank
        return _statement(self.kind, {"rank": rank, **self._filled(), "attempt": self.attempt})


@final
@dataclass(frozen=True, kw_only=True)
class RandomFaults:
    """Random faults: in each step, with probability `rate`, one of `kinds` for each rank, in a random phase.

    first, until   the steps between which it may happen, both included
    rank           only this one; None: all
    seconds        how long a hang, stop, deadlock or partition lasts; None: for ever (partition: 5 s)
    attempt        in which life of the rank; None: all
    """

    kinds: tuple[str, ...]
    rate: float
    seed: int = 0
    first: int = 1
    until: int | None = None
    rank: int | None = None
    seconds: float | None = None
    factor: float | None = None
    code: int | None = None
    attempt: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))
        for kind in self.kinds:
            if kind not in KINDS:
                refuse_word(kind, "fault", tuple(KINDS), f"random kinds={','.join(self.kinds)}")
        if not self.kinds:
            refuse("random faults of no kind", f"name some: kinds={','.join(KINDS)}", "kinds")
        if not 0.0 <= self.rate <= 1.0:
            refuse(
                f"rate={self.rate} is no probability",
                "set rate between 0 and 1, such as rate=0.02: one in fifty steps of each worker",
                "rate",
            )
        if self.until is not None and self.until < self.first:
            refuse(
                f"random from={self.first} until={self.until}: there is no step in between",
                f"set until to {self.first} or more",
                "until",
            )
        options = {"for": self.seconds, "factor": self.factor, "code": self.code}
        for name, value in options.items():
            if value is not None and not any(name in KINDS[kind] for kind in self.kinds):
                users = [kind for kind, fields in KINDS.items() if name in fields]
                refuse_word(name, f"field of {', '.join(self.kinds)}", users, f"random {name}={value}")
        whole = {"seed": self.seed, "step": self.first, "rank": self.rank, "attempt": self.attempt}
        _check_values("random", options | whole)

    def draw(self, step: int, rank: int, attempt: int = 1) -> Fault | None:
        """Return what this life of the rank meets in this step."""
        if step < self.first or (self.until is not None and step > self.until):
            return None
        if (self.rank is not None and self.rank != rank) or self.attempt not in (None, attempt):
            return None
        seed = hashlib.blake2b(f"{self.seed} {step} {rank} {attempt}".encode(), digest_size=16).digest()
        if int.from_bytes(seed[:8], "little") >= self.rate * 2.0**64:
            return None
        kind = self.kinds[int.from_bytes(seed[8:12], "little") % len(self.kinds)]
        phase = STEP_PHASES[int.from_bytes(seed[12:], "little") % len(STEP_PHASES)]
        takes = KINDS[kind]
        return Fault(
            kind=kind,
            rank=rank,
            step=step,
            phase=phase if "phase" in takes else None,
            seconds=self.seconds if "for" in takes else None,
            factor=self.factor if "factor" in takes else None,
            code=self.code if "code" in takes else None,
            times=1 if kind == "slow" else None,
            attempt=attempt,
        )

    def __str__(self) -> str:
        words = {name: getattr(self, FIELDS.get(name, name)) for name in RANDOM}
        words |= {"kinds": ",".join(self.kinds), "from": None if self.first == 1 else self.first}
        return _statement("random", words)


def _check_values(kind: str, values: Mapping[str, Any]) -> None:
    """Check the range of each field; None is a field that was left out."""
    bounds = {"rank": 0, "step": 1, "times": 1, "attempt": 1, "code": 0, "seed": 0}
    for name, value in values.items():
        if value is None:
            continue
        if name == "phase":
            if value not in PHASES:
                refuse_word(str(value), "phase", PHASES, f"{kind} phase={value}")
        elif name in bounds:
            if type(value) is not int or value < bounds[name]:
                refuse(
                    f"{kind}: {name}={value!r} is not a whole number from {bounds[name]} on",
                    f"set {name} to {bounds[name]} or more",
                    name,
                )
            if name == "code" and value > 255:
                refuse(
                    f"{kind}: code={value}, and an exit code has 8 bits", "set code between 0 and 255", name
                )
        elif isinstance(value, bool) or not isinstance(value, int | float):
            refuse(f"{kind}: {name}={value!r} is not a number", f"set {name} to a number", name)
        elif name == "factor" and not (math.isfinite(value) and value >= 1.0):
            refuse(
                f"{kind}: factor={value}: a worker takes this many times as long",
                "set factor to 1 or more, such as factor=3",
                name,
            )
        elif name == "for" and not (math.isfinite(value) and value > 0.0):
            refuse(f"{kind}: for={value}s is no time at all", "set it above 0, such as for=5s", name)
        elif name == "after" and not (math.isfinite(value) and value >= 0.0):
            refuse(f"{kind}: after={value}s lies in the past", "set it to 0 or more, such as after=2ms", name)


def _statement(kind: str, words: Mapping[str, object]) -> str:
    """Return the text of a fault; what is None is left out."""
    texts = [kind]
    for name, value in words.items():
        if value is not None:
            shown = value if isinstance(value, str) else repr(value).removesuffix(".0")
            texts.append(f"{name}={shown}{'s' if name in ('for', 'after') else ''}")
    return " ".join(texts)


def refuse_word(word: str, what: str, allowed: Sequence[str], statement: str) -> NoReturn:
    near = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    refuse(
        f"there is no {what} called {word!r}, as in {statement!r}",
        f"{hint}choose from {', '.join(allowed)}",
        word,
    )


def refuse(message: str, remedy: str, key: str) -> NoReturn:
    raise ConfigError(f"chaos: {message}", remedy=remedy, key=key)
