"""Words that errors are put together from. Must not know any error."""

from __future__ import annotations


def a_kind(value: object) -> str:
    """ "an int", "a Tensor": the class of a value, with its article."""
    name = type(value).__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' and name[:1] else 'a'} {name}"
