"""Words and number for sentences that people read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def type_name(cls: type) -> str:
    """Return the name of a class as people know it: "int", "numpy.ndarray"."""
    own = cls.__module__ in ("builtins", "__main__")
    return cls.__qualname__ if own else f"{cls.__module__}.{cls.__qualname__}"


def with_article(value: object) -> str:
    """Return the class of a value, with its article: "an int", "a Tensor"."""
    name = type(value).__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' and name[:1] else 'a'} {name}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for sentences and records of one line; empty where the error
    has no text."""
    return next(iter(str(error).splitlines()), "")


def counted(number: int, noun: str, one: str = "", many: str = "") -> str:
    """Return "1 worker", "3 workers"; with a verb for one and for many "1 worker is", "3 workers are"."""
    words = f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
    verb = one if number == 1 else many
    return f"{words} {verb}" if verb else words


def listed(names: Sequence[object]) -> str:
    """Return the names as "1", "1 and 2", "1, 2 and 5"."""
    words = [str(name) for name in names]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def ranks(slots: Iterable[int], one: str = "", many: str = "", *, all_named: bool = False) -> str:
    """Return "rank 3", "ranks 1, 2 and 5", "ranks 0, 1, 2 and 61 others", "no rank"; with a verb for one and
    for many "rank 3 leaves", "ranks 1 and 2 leave". `all_named` names each rank, however many there are: for
    sentences that are the only place where the ranks are named."""
    names = [str(slot) for slot in sorted(slots)]
    verb = one if len(names) < 2 else many
    if len(names) > 6 and not all_named:
        names = [*names[:3], f"{len(names) - 3} others"]
    words = f"{'ranks' if len(names) > 1 else 'rank'} {listed(names)}" if names else "no rank"
    return f"{words} {verb}" if verb else words
