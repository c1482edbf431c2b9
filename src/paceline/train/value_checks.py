"""What every settings class of training checks about its own values: the type, then the range.

Messages name the class, the setting, its value and the bound. Must not know what any setting means.
"""

from __future__ import annotations

import math

from paceline.core import typed
from paceline.core.errors import ConfigError


def conform(settings: object) -> None:
    """Give every field of a frozen dataclass its annotated type (1e3 becomes 1000), or refuse it by name."""
    cls = type(settings)
    for name, (_, hint) in typed.fields_of(cls).items():
        value = getattr(settings, name)
        try:
            converted = typed.convert(value, hint, name)
        except typed.MismatchError as error:
            raise ConfigError(
                f"{cls.__name__}: {error.path}: expected {error.expected}, given {error.given}",
                remedy=f"change {error.path} to {error.expected}",
                key=error.path,
            ) from None
        except typed.UnknownKeyError as error:
            raise ConfigError(
                f"{cls.__name__}: unknown key {typed.join(error.path, error.key)}",
                remedy=f"valid below {error.path}: {', '.join(error.valid)}",
                key=typed.join(error.path, error.key),
            ) from None
        except typed.MissingKeyError as error:
            raise ConfigError(
                f"{cls.__name__}: {error.path} is missing and has no default",
                remedy=f"give {error.path} ({error.expected})",
                key=error.path,
            ) from None
        if converted is not value:
            object.__setattr__(settings, name, converted)


def at_least(settings: object, name: str, bound: int, why: str) -> None:
    """Refuse a whole number below `bound`; None means not set and passes."""
    value = getattr(settings, name)
    if value is not None and value < bound:
        raise ConfigError(
            f"{type(settings).__name__}: {name}={value}, which is less than {bound}: {why}",
            remedy=f"set {name} to {bound} or more",
            key=name,
        )


def positive(settings: object, name: str, why: str) -> None:
    """Refuse a number that is zero, negative or not finite; None means not set and passes."""
    value = getattr(settings, name)
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{type(settings).__name__}: {name}={value}, which is not a positive number: {why}",
            remedy=f"set {name} to a number above 0",
            key=name,
        )


def between(settings: object, name: str, low: float, high: float, why: str) -> None:
    """Refuse a number outside the open interval (low, high)."""
    value = getattr(settings, name)
    if not low < value < high:
        raise ConfigError(
            f"{type(settings).__name__}: {name}={value}, which is not between {low:g} and {high:g}: {why}",
            remedy=f"set {name} to a number above {low:g} and below {high:g}",
            key=name,
        )
