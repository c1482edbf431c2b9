"""Options that one process gives another: a frozen dataclass at both ends, plain data on the way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from paceline.core import type_conversion
from paceline.core.errors import WireError


@dataclass(frozen=True)
class PlainOptions:
    """Base of a dataclass of options; its fields may be dataclasses, too."""

    def to_plain(self) -> dict[str, Any]:
        """Return the options as data that JSON and msgpack can hold."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=os.fspath)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `to_plain` returned; WireError for anything else."""
        try:
            options: Self = type_conversion.convert(plain, cls, "options")
        except type_conversion.ConversionError as error:
            raise WireError(f"these are not {cls.__name__}: {error}") from error
        return options
