"""What runs in each worker of a job that is looked after: takes its seat, trains, sends its result.

The fork server imports this module once, before any worker, and with it torch. Must not know how processes
start, nor what the supervisor decides.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

from paceline.comm.cost import Links
from paceline.core.control import address
from paceline.core.tls import Tls
from paceline.engines.local import call
from paceline.engines.local.child import Task
from paceline.frontends import tensor_payload
from paceline.train.member_worker import Place


def main(task: Task) -> int:
    """Entry of the local engine; its result is the descriptor of a payload."""
    __tracebackhide__ = True
    work = call.unpack(task.payload)
    task.shared = work.classes
    try:
        result = work.function(*work.args, _place(dict(task.options)))
        return call.pack_result(result, work, task.rank, tensor_payload.reducers())
    except SystemExit:
        raise  # reported by the engine, with its code
    except BaseException as error:
        task.fail(error)
        raise


def _place(options: dict[str, Any]) -> Place:
    host, port = options["address"]
    tls = options.get("tls")
    folder = options.get("folder")
    return Place(
        member=int(options["member"]),
        slot=int(options["slot"]),
        attempt=int(options.get("attempt", 1)),
        address=(str(host), int(port)),
        secret=bytes.fromhex(str(options["secret"])),
        links=Links.from_plain(cast("dict[str, object]", options["links"])),
        patience=float(options["patience"]),
        chaos=options.get("chaos"),
        tls=None if not tls else Tls(*(Path(part) for part in tls)),
        lookup=None if not folder else partial(address.lookup, Path(folder)),
        listen=str(options.get("listen", "127.0.0.1")),
        ports=str(options.get("ports", "")),
    )
