"""Whole numbers as users pass them: checked in one place, refused with what is allowed."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from paceline.core.errors import UsageError


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return `value` as a Python int (NumPy's integers are welcome, booleans and floats are not)."""
    number = None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            # An array of several numbers has __index__ too, and no use for it.
            number = None
    if number is None or number < least or (most is not None and number > most):
        allowed = f"from {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name}={value!r}", remedy=f"{name} is a whole number {allowed}")
    return number
