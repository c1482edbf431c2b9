"""Every error Paceline raises on purpose: what happened, to whom, whose fault it is, what to try.

    PacelineError
    ├── UsageError            fault: user       (also a ValueError)
    │   └── ConfigError                         a setting is unknown, missing or of the wrong type
    ├── InternalError         fault: ours       a bug in Paceline
    ├── PeerError             fault: peer
    │   ├── PeerLostError                       a rank died or its connection closed
    │   ├── DisagreementError                   ranks called different things
    │   ├── GroupInterruptedError               this rank was interrupted to leave its group
    │   ├── CorruptDataError                    a rank's data did not match its checksum
    │   ├── RankFailedError                     a rank raised; carries its traceback as text
    │   └── WireError                           bytes that are not a Paceline message
    └── PlatformError         fault: platform
        ├── CommTimeoutError                    waited too long (also a TimeoutError)
        ├── ResourceError                       memory, ports, descriptors, processes ran out
        ├── RendezvousError                     ranks could not find each other
        ├── ReplicasDifferError                 ranks that must hold the same weights do not
        └── UnavailableError                    a backend or an optional package is not here

Other packages add leaves below these (a damaged checkpoint, a corrupt shard).

Errors travel between processes, so all of them survive pickle with their facts, notes and cause; a fact or a
cause that cannot be pickled arrives as text.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

FaultOwner = Literal["user", "ours", "peer", "platform"]


class PacelineError(Exception):
    """The root: a message, a remedy, and the facts behind the message for programs that want them."""

    fault: ClassVar[FaultOwner] = "ours"
    usual_remedy: ClassVar[str] = ""

    def __init__(self, message: str, *, remedy: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy or self.usual_remedy
        self.facts: dict[str, object] = dict(facts)

    def __str__(self) -> str:
        return self._body() + (f"\n  try: {self.remedy}" if self.remedy else "")

    def _body(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        state["facts"] = {
            name: value if _survives_pickle(value) else repr(value) for name, value in self.facts.items()
        }
        cause = self.__cause__
        if cause is not None and not _survives_pickle(cause):
            text = "caused by: " + "".join(traceback.format_exception_only(cause)).rstrip()
            state["__notes__"], cause = [*getattr(self, "__notes__", ()), text], None
        return _rebuild, (type(self), self.args, state, cause)


class UsageError(PacelineError, ValueError):
    """The caller asked for something that cannot be."""

    fault: ClassVar[FaultOwner] = "user"


class ConfigError(UsageError):
    """A setting is unknown, missing or of the wrong type."""


class InternalError(PacelineError):
    """Paceline broke its own rules."""

    fault = "ours"
    usual_remedy = "this is a bug in Paceline: please report it with this message and the traceback"


class PeerError(PacelineError):
    """Another rank is the reason."""

    fault = "peer"


class PeerLostError(PeerError):
    """One or more ranks died or can no longer be reached."""

    usual_remedy = "look at the lost rank's own output for the reason it ended"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        ranks: Iterable[int] = (),
        remedy: str = "",
        **facts: object,
    ) -> None:
        super().__init__(message, remedy=remedy, **facts)
        named = set(ranks) if rank is None else {rank, *ranks}
        self.ranks: tuple[int, ...] = tuple(sorted(named))

    @property
    def rank(self) -> int | None:
        """The lost rank, or the lowest of several; None when it is not known which."""
        return self.ranks[0] if self.ranks else None


class DisagreementError(PeerError):
    """Ranks met in one collective with different calls; `calls` has the call of each of them."""

    usual_remedy = (
        "make every rank call the same operations in the same order with matching shapes and dtypes"
    )

    def __init__(
        self, message: str, *, calls: Mapping[int, str] | None = None, remedy: str = "", **facts: object
    ) -> None:
        super().__init__(message, remedy=remedy, **facts)
        self.calls: dict[int, str] = dict(sorted((calls or {}).items()))

    def _body(self) -> str:
        return "\n".join([self.message, *(f"  rank {rank}: {call}" for rank, call in self.calls.items())])


class GroupInterruptedError(PeerError):
    """Another thread took this rank out of its group: what it waited for is over, the group is of no use."""

    usual_remedy = "make a new group with the ranks that remain"


class CorruptDataError(PeerError):
    """Data of a rank does not match the checksum that the rank took; `rank` is that rank (-1: not known)."""

    usual_remedy = "suspect the memory or the network of that rank's machine; leave the rank out and continue"

    def __init__(self, message: str, *, rank: int = -1, remedy: str = "", **facts: object) -> None:
        super().__init__(message, remedy=remedy, **facts)
        self.rank = rank


class RankFailedError(PeerError):
    """A rank's own code raised; `traceback_text` is what it would have printed."""

    usual_remedy = "fix the error in the rank's code shown above"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        traceback_text: str = "",
        remedy: str = "",
        **facts: object,
    ) -> None:
        super().__init__(message, remedy=remedy, **facts)
        self.rank = rank
        self.traceback_text = traceback_text

    @property
    def original(self) -> BaseException | None:
        """The rank's error itself, without its frames; None where it could not be pickled."""
        return self.__cause__ or self.__context__

    def _body(self) -> str:
        return f"{self.message}\n\n{self.traceback_text.rstrip()}\n" if self.traceback_text else self.message


class WireError(PeerError):
    """Bytes that are truncated, too long or not a Paceline message."""

    usual_remedy = "check that both ends run the same Paceline version and that nothing else uses the port"


class PlatformError(PacelineError):
    """The machine, the network or the operating system is the reason."""

    fault = "platform"


class CommTimeoutError(PlatformError, TimeoutError):
    """A wait ended without what it waited for; `waiting_for` names the ranks that did not answer."""

    usual_remedy = "see what the named ranks are doing, or pass a longer timeout"

    def __init__(
        self, message: str, *, waiting_for: Iterable[int] = (), remedy: str = "", **facts: object
    ) -> None:
        super().__init__(message, remedy=remedy, **facts)
        self.waiting_for: tuple[int, ...] = tuple(sorted(set(waiting_for)))


class ResourceError(PlatformError):
    """Memory, ports, descriptors or processes ran out."""

    usual_remedy = "free the resource, raise its limit (`ulimit -a`), or use fewer workers"


class RendezvousError(PlatformError):
    """Ranks could not find each other."""

    usual_remedy = "check that every rank was started with the same address, port and world size"


class ReplicasDifferError(PlatformError):
    """Ranks that must hold the same state do not; `ranks` are those that are odd, or all where no majority
    says which rank is right."""

    usual_remedy = (
        'start again with resume="auto", which continues from the newest version that all ranks agreed on; '
        "suspect an optimizer that has other settings on a rank, the memory of that rank's machine, or a "
        "modifier or a model that depends on the rank, on time or on randomness that is not seeded"
    )

    def __init__(self, message: str, *, ranks: Iterable[int] = (), remedy: str = "", **facts: object) -> None:
        super().__init__(message, remedy=remedy, **facts)
        self.ranks: tuple[int, ...] = tuple(sorted(set(ranks)))


class UnavailableError(PlatformError):
    """A backend or an optional package is not on this machine."""

    usual_remedy = "install what is missing or choose another backend"


GROUP_FAILURES = (PeerError, CommTimeoutError)
"""What a collective raises when the cause is another rank, or the group itself."""


def _rebuild(
    cls: type[PacelineError], args: tuple[object, ...], state: dict[str, Any], cause: BaseException | None
) -> PacelineError:
    # __init__ is not called: subclasses are free to have any signature.
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    if cause is not None:
        error.__cause__ = cause
    return error


def _survives_pickle(value: object) -> bool:
    # Loading is tried too: many foreign exceptions pickle well and fail only on the way back.
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True
