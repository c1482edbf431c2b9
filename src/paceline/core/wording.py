"""Words and number for sentences that people read."""

from __future__ import annotations

from collections.abc import Iterable


def type_name(cls: type) -> str:
    """ "int", "numpy.ndarray": a class as people know it."""
    own = cls.__module__ in ("builtins", "__main__")
    return cls.__qualname__ if own else f"{cls.__module__}.{cls.__qualname__}"


def with_article(value: object) -> str:
    """ "an int", "a Tensor": the class of a value, with its article."""
    name = type(value).__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' and name[:1] else 'a'} {name}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for sentences and records of one line; empty where the error
    has no text."""
    return next(iter(str(error).splitlines()), "")


def counted(number: int, noun: str, one: str = "", many: str = "") -> str:
    """ "1 worker", "3 workers"; with a verb for one and for many "1 worker is", "3 workers are"."""
    words = f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
    verb = one if number == 1 else many
    return f"{words} {verb}" if verb else words


def ranks(slots: Iterable[int], one: str = "", many: str = "") -> str:
    """ "rank 3", "ranks 1, 2 and 5", "ranks 0, 1, 2 and 61 others", "no rank"; with a verb for one and for
    many "rank 3 leaves", "ranks 1 and 2 leave"."""
    names = [str(slot) for slot in sorted(slots)]
    verb = one if len(names) < 2 else many
    if len(names) > 6:
        names = [*names[:3], f"{len(names) - 3} others"]
    if len(names) < 2:
        words = f"rank {names[0]}" if names else "no rank"
    else:
        words = f"ranks {', '.join(names[:-1])} and {names[-1]}"
    return f"{words} {verb}" if verb else words
