"""Control messages as plain data, and back.

Configuration is forgiving (core.type_conversion turns 1e6 into an int and names the path to a mistake); what
comes from a socket is not, and there are hundreds of messages a second: msgspec checks types, ranges and
lengths from the annotations. A type alone is not enough: a number that no run can have, a NaN or a name of a
megabyte would reach the deciding machine, the journal and other members. So every number of a message has a
range, which no NaN is in, and a name has a length. A message that does not validate is a WireError, and its
sender is dropped. A first message of another version is not validated, and becomes a ForeignVersion.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Annotated, Any, ClassVar

import msgspec

from paceline.control.field_types import Truncated
from paceline.control.messages import REGISTRY, AgentHello, ControlMessage, MemberHello, ToolRequest
from paceline.core.errors import WireError
from paceline.core.version import PROTOCOL, VERSION


class ForeignVersion(ControlMessage):
    """A first message of another version, as far as it is understood. It never travels."""

    kind: ClassVar[str] = ""
    what: str
    protocol: int
    version: str

    @property
    def text(self) -> str:
        """Return the sentence that both terminals show: which end has which version."""
        who = {"Hello": "a worker", "Offer": "a host that wants to join"}.get(self.what, "a tool")
        return (
            f"{who} has Paceline {self.version} and speaks protocol {self.protocol}; the supervisor has "
            f"Paceline {VERSION} and speaks protocol {PROTOCOL}"
        )


_FIRST = frozenset({MemberHello.kind, AgentHello.kind, ToolRequest.kind})


def _foreign(kind: str, fields: dict[Any, Any]) -> ForeignVersion | None:
    """Return what is understood of a first message of another version; None: it is of this one."""
    protocol, version = fields.get("protocol", 1), fields.get("version", "0.1.0 or earlier")
    same = protocol == PROTOCOL and (version == VERSION or kind == ToolRequest.kind)
    if same:
        return None
    known = isinstance(protocol, int) and isinstance(version, str)
    return ForeignVersion(
        what=kind,
        protocol=int(protocol) if known else 0,
        version="".join(filter(str.isprintable, str(version)))[:40] if known else "of unknown kind",
    )


def to_plain(message: ControlMessage) -> list[Any]:
    """Return [kind, fields]."""
    if REGISTRY.get(message.kind) is not type(message):
        raise WireError(f"{type(message).__name__} is not a message of the control connection")
    # No message holds another, and a frozen message does not change: no deep copy.
    return [message.kind, dict(vars(message))]


def from_plain(plain: Any) -> ControlMessage:
    """Return the message; WireError for anything that is not exactly one."""
    if type(plain) is not list or len(plain) != 2:
        raise WireError("not a message of the control connection")
    kind, fields = plain
    if type(kind) is not str or kind not in REGISTRY or type(fields) is not dict:
        raise WireError("not a message of the control connection")
    if kind in _FIRST and (foreign := _foreign(kind, fields)) is not None:
        return foreign
    truncated = _fields(kind)
    # msgspec ignores fields that a dataclass does not have.
    if not fields.keys() <= truncated.keys():
        unknown = str(min(fields.keys() - truncated.keys(), key=str))[:40]
        raise WireError(f"a {kind} message is damaged: {unknown!r} is not known")
    for name, value in fields.items():
        if (most := truncated[name]) is not None:
            fields[name] = _cut(value, most)
    try:
        return msgspec.convert(fields, REGISTRY[kind], builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise WireError(f"a {kind} message is damaged: {error}") from error


@functools.cache
def _fields(kind: str) -> dict[str, int | None]:
    """Return the fields of a message, each with the length to which its text is cut."""
    hints = typing.get_type_hints(REGISTRY[kind], include_extras=True)
    return {field.name: _limit(hints[field.name]) for field in dataclasses.fields(REGISTRY[kind])}


def _limit(hint: Any) -> int | None:
    if typing.get_origin(hint) is Annotated:
        return next((one.most for one in hint.__metadata__ if isinstance(one, Truncated)), None)
    return next((most for arg in typing.get_args(hint) if (most := _limit(arg)) is not None), None)


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, list | tuple):
        return [_cut(item, most) for item in value]
    return value[:most] if isinstance(value, str) else value
