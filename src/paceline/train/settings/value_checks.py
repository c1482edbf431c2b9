"""Checks of every settings class of training on its own values: the type, then the range.

Messages name the class, the setting, its value and the bound.
"""

from __future__ import annotations

import math
import os
from typing import NoReturn

from paceline.core import type_conversion
from paceline.core.errors import ConfigError


def refuse(settings: object, key: str, message: str, remedy: str) -> NoReturn:
    """Refuse one setting; the message names its class."""
    raise ConfigError(f"{type(settings).__name__}: {message}", remedy=remedy, key=key)


def conform(settings: object) -> None:
    """Give every field of a frozen dataclass its annotated type (1e3 becomes 1000), or refuse it by name."""
    for name, (_, hint) in type_conversion.fields_of(type(settings)).items():
        value = getattr(settings, name)
        try:
            converted = type_conversion.convert(value, hint, name)
        except type_conversion.ConversionError as error:
            raise error.with_origin(type(settings).__name__) from None
        if converted is not value:
            object.__setattr__(settings, name, converted)


def path_as_text(settings: object, name: str) -> None:
    """Accept a path, kept as text so that a file reads back to an equal object."""
    value = getattr(settings, name)
    if isinstance(value, os.PathLike):
        object.__setattr__(settings, name, os.fspath(value))


def at_least(settings: object, name: str, bound: int, why: str) -> None:
    """Refuse a whole number below `bound`; None means not set and passes."""
    value = getattr(settings, name)
    if value is not None and value < bound:
        message = f"{name}={value}, which is less than {bound}: {why}"
        refuse(settings, name, message, f"set {name} to {bound} or more")


def positive(settings: object, name: str, why: str) -> None:
    """Refuse a number that is zero, negative or not finite; None means not set and passes."""
    value = getattr(settings, name)
    if value is not None and not (math.isfinite(value) and value > 0):
        message = f"{name}={value}, which is not a positive number: {why}"
        refuse(settings, name, message, f"set {name} to a number above 0")


def between(settings: object, name: str, low: float, high: float, why: str) -> None:
    """Refuse a number outside the open interval (low, high)."""
    value = getattr(settings, name)
    if not low < value < high:
        message = f"{name}={value}, which is not between {low:g} and {high:g}: {why}"
        refuse(settings, name, message, f"set {name} to a number above {low:g} and below {high:g}")


def not_empty(settings: object, name: str) -> None:
    """Refuse empty text; None means not set and passes."""
    if getattr(settings, name) == "":
        refuse(settings, name, f"{name} is empty text, which names nothing", f"leave {name} out")
