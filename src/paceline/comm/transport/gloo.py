"""A Gloo group for those who ask for torch's own all-reduce by name, and a way out of a wait that will not
end.

Gloo does not know who connects to it: its listener takes any connection, and nothing that it carries is
authenticated. So there is no such group until all ranks have called for it (algorithm="native"); Paceline's
own algorithms never use it. The ranks tell each other where they listen over the mesh. Gloo's waits cannot
be cancelled. The way out uses what Gloo does when a wait times out: it closes every connection of the
group, and with that every wait for a receive ends. `abort` waits a millisecond for a message that is never
sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from paceline.comm.calls import RankState
from paceline.comm.transport.mesh import Mesh
from paceline.comm.transport.watch import LOOK_SECONDS

_FOREVER = timedelta(days=1)
_UNUSED_TAG = 0


def open_group(mesh: Mesh, address: str, deadline: float) -> Any:
    """This rank's end of a Gloo group of all ranks of the mesh, who all make it now."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
    options._threads = 1
    group: Any = ProcessGroupGloo(_NoteStore(mesh, deadline), mesh.rank, mesh.world_size, options)
    group.set_timeout(_FOREVER)
    return group


def abort(group: Any, peers: Sequence[int]) -> None:
    """Makes every wait on a Gloo group end with an error, here and now; the group is of no use afterwards."""
    for peer in peers:
        try:
            group.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            # A connection that is closed already says so at once; the others need one that times out.
            if "imed out" in str(error):
                return


@final
class _NoteStore(Store):
    """What a process group of torch needs of a store to come up: every key is set by one rank, once."""

    def __init__(self, mesh: Mesh, deadline: float) -> None:
        super().__init__()
        self._mesh = mesh
        self._deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        self._mesh.note(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._mesh.notes[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._mesh.notes for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        while True:
            self._mesh.check_open()
            seen = self._mesh.version
            if self.check(keys):
                return
            gone = [rank for rank, peer in self._mesh.peers().items() if peer.state is not RankState.RUNNING]
            if gone or time.monotonic() >= self._deadline:
                raise TimeoutError(
                    f"{', '.join(keys)} did not come" + (f": ranks {gone} left" if gone else "")
                )
            self._mesh.wait(seen, LOOK_SECONDS)
