"""What data is called in messages: as the user knows it, never by the class that Paceline wraps it in."""

from __future__ import annotations

from typing import Any


def given_name(source: Any) -> str:
    """The class of what the user gave, behind the source that reads it."""
    for attribute in ("dataset", "_dataset"):
        inner = getattr(source, attribute, None)
        if inner is not None:
            return getattr(inner, "__qualname__", None) or type(inner).__qualname__
    columns = getattr(source, "columns", None)
    if columns is not None:
        kinds = sorted({type(column).__qualname__ for column in columns})
        return f"the data ({', '.join(kinds)})"
    return type(source).__qualname__
