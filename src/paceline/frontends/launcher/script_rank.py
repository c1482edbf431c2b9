"""A rank of `paceline run`, from the fork to the end of its script.

Makes the process what Python would have been: the script is `__main__`, streams are unbuffered as torchrun's
are, variables are the rank's. Where another program is to be run, that program takes the process over.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from paceline.core.plain_options import PlainOptions
from paceline.engines.local import memfd_pickle, script_main
from paceline.engines.local.failure_report import ended_well
from paceline.engines.local.forked_rank import Output, RankTask
from paceline.frontends import launcher_link

ENTRY = "paceline.frontends.launcher.script_rank:main"
# Torch, and what every data-parallel script imports when it makes its model parallel.
PRELOAD = ("torch", "torch.distributed", "torch.utils.data.distributed", "torch._dynamo", __name__)


@final
@dataclass(frozen=True)
class ScriptOptions(PlainOptions):
    """What a rank runs.

    program      a script, a module's name, or with `executed` the path of a program
    variables    of the environment, those that this rank has to itself among them
    single_node  whether all ranks share this host, and their launcher
    """

    program: str
    arguments: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    is_module: bool = False
    executed: bool = False
    single_node: bool = True


def main(task: RankTask) -> int:
    """Run the script as this rank; return the descriptor of an empty result."""
    __tracebackhide__ = True
    options = ScriptOptions.from_plain(task.options)
    stdin, stdout, stderr, link = task.descriptors
    take_streams(stdin, stdout, stderr)
    _take_variables(options.variables)
    if options.executed:
        _become(options)
    launcher_link.open_link(link, task.rank, task.workers, joint=options.single_node)
    keep_last_group()
    # First registered, last called: after everything that the script itself does at its end.
    atexit.register(flush_files)
    try:
        script_main.become_main(options.program, options.arguments, is_module=options.is_module)
    except SystemExit as end:
        if not ended_well(end):
            if not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            raise
    except KeyboardInterrupt as error:
        _call_own_hook(error)
        # As shells count a process that Ctrl-C ended.
        raise SystemExit(128 + signal.SIGINT) from error
    except BaseException as error:
        _call_own_hook(error)
        raise
    return memfd_pickle.dump(None)


def _call_own_hook(error: BaseException) -> None:
    """Call the hook for errors that the script has set, with the frames from its first line on. Without one
    nothing is printed here: the launcher shows the traceback of the rank that failed first."""
    of_torch = (getattr(sys.excepthook, "__module__", None) or "").partition(".")[0] == "torch"
    if of_torch or sys.excepthook is sys.__excepthook__:
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_locals.get("__tracebackhide__"):
        trace = trace.tb_next
    sys.excepthook(type(error), error, trace)


def _become(options: ScriptOptions) -> None:
    try:
        os.execvp(options.program, [options.program, *options.arguments])
    except OSError as error:
        print(f"{options.program} cannot be run: {error.strerror}", file=sys.stderr)
        # As shells do for what cannot be found, or cannot be run.
        raise SystemExit(127 if isinstance(error, FileNotFoundError) else 126) from None


def _take_variables(variables: Mapping[str, str]) -> None:
    """Replace the environment. The fork server's way of sharing the cores set one variable that a script
    which is started alone does not have."""
    for name in [name for name in os.environ if name not in variables]:
        del os.environ[name]
    os.environ.update(variables)
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        # Where processes that the script spawns look for it.
        process.__dict__["ORIGINAL_DIR"] = os.path.abspath(os.curdir)


def take_streams(stdin: int, stdout: int, stderr: int) -> None:
    """Make these descriptors standard input, output and error of the process; what is written to the latter
    two is passed on at once."""
    for descriptor, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    source = io.BufferedReader(io.FileIO(0, "rb", closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(source, encoding="utf-8")  # type: ignore[misc]
    for name, target, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = Output(target, "wb", closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def keep_last_group() -> None:
    """Have the groups of torch.distributed that the script destroys last live until the process ends.

    Torch's thread of a Gloo group may still hold the tensors of the last collective when the script drops its
    model, and the group with it: the main thread then waits for that thread with the interpreter's lock,
    which the thread needs to let go of the tensors.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    destroy = distributed.destroy_process_group
    kept: list[Any] = []

    @functools.wraps(destroy)
    def destroy_and_keep(group: Any = None) -> None:
        every = group is None or group is distributed.group.WORLD
        kept[:] = distributed.distributed_c10d._world.pg_map if every else [group]
        destroy(group)

    modules: tuple[Any, ...] = (distributed, distributed.distributed_c10d)
    for module in modules:
        module.destroy_process_group = destroy_and_keep


def flush_files() -> None:
    """Write out files that the script left open. The rank ends without taking the interpreter apart, which
    would have done so."""
    for one in gc.get_objects():
        if isinstance(one, io.IOBase):
            with contextlib.suppress(OSError, ValueError):
                one.flush()
