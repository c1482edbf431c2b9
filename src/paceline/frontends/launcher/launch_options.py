"""The command line of `paceline run`: its own options before or after the script, those of torchrun before
it, everything else the script's.

Options are written with dashes or underscores, with a space or `=` before the value, as for torchrun; those
of torchrun that mean nothing here are refused by name. An option that is not on the command line is taken
from PET_NAME in the environment, where torchrun takes it from, too. Pure.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, final

from paceline.comm.rendezvous.environment import parse_address
from paceline.core.errors import UsageError
from paceline.core.wording import listed
from paceline.frontends.launcher.launch_config import LaunchConfig
from paceline.frontends.launcher.launch_program import Program


@final
@dataclass(frozen=True)
class _Option:
    """An option. `anywhere`: it may stand after the script. `flag`: it has no value. `refused`: what to do
    instead of one of torchrun's that has no meaning here."""

    name: str
    summary: str = ""
    short: str = ""
    anywhere: bool = False
    flag: bool = False
    refused: str = ""


_TO_A_FILE: Final = (
    "the lines of all ranks come here, each with its rank in front: 2>&1 | tee FILE keeps them"
)
_OPTIONS: Final = (
    _Option("nproc-per-node", "Ranks on this node: a number, gpu, cpu or auto.", anywhere=True),
    _Option("nnodes", "How many nodes the job has; each runs this command.", anywhere=True),
    _Option("node-rank", "Which of the nodes this is, from 0.", anywhere=True),
    _Option("master-addr", "The host of node 0.", anywhere=True),
    _Option(
        "master-port",
        "Where the nodes' launchers meet there (29500); one node: where its ranks do.",
        anywhere=True,
    ),
    _Option(
        "backend", "Of Paceline's groups that ask for none: auto, gloo, nccl, mpi or shm.", anywhere=True
    ),
    _Option("max-restarts", "How often all ranks start again after a failure (3).", anywhere=True),
    _Option("monitor-interval", "Seconds between two signs of life of the nodes (1).", anywhere=True),
    _Option("start-timeout", "Seconds until all nodes must have come (600).", anywhere=True),
    _Option("shutdown-timeout", "Seconds that ranks have to end after a signal (30)."),
    _Option("module", "Run a module, as python -m does.", short="-m", flag=True),
    _Option("no-python", "Run the program itself, not with Python.", flag=True),
    _Option("local-ranks-filter", "Show the output of these ranks of the node only: 0,2."),
    _Option("rdzv-id", "A name for the job, in TORCHELASTIC_RUN_ID."),
    _Option("role", "The ranks' ROLE_NAME."),
    _Option("standalone", "One node, whatever else is said about where nodes meet.", flag=True),
    _Option("rdzv-endpoint", "HOST:PORT, for --master-addr and --master-port."),
    _Option("rdzv-backend", "static or c10d: both mean the launchers' own meeting."),
    _Option("rdzv-conf", "timeout=SECONDS or join_timeout=SECONDS, for --start-timeout."),
    _Option("run-path", "Means nothing here: scripts run that way.", flag=True),
    _Option("start-method", "Means nothing here: ranks are forked from a process that has imported torch."),
    _Option("log-dir", refused=_TO_A_FILE),
    _Option("redirects", short="-r", refused=_TO_A_FILE),
    _Option("tee", short="-t", refused=_TO_A_FILE),
    _Option("logs-specs", refused=_TO_A_FILE),
    _Option("duplicate-stdout-filters", refused=_TO_A_FILE),
    _Option("duplicate-stderr-filters", refused=_TO_A_FILE),
    _Option("event-log-handler", refused="leave it out: what happens is said on standard error"),
    _Option("local-addr", refused="PACELINE_INTERFACE=NAME chooses the interface that node 0 listens on"),
    _Option("numa-binding", refused="bind the launcher: numactl --cpunodebind=N paceline run ..."),
    _Option(
        "signals-to-handle", refused="SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are passed on"
    ),
    _Option("virtual-local-rank", flag=True, refused="use LOCAL_RANK in the script: torch.cuda.set_device"),
)
_BY_SPELLING: Final = {
    spelling: option
    for option in _OPTIONS
    for spelling in (f"--{option.name}", f"--{option.name.replace('-', '_')}", option.short)
    if spelling
}
# torchrun's options that PET_NAME may set; Paceline's own have no such name.
_OURS: Final = ("backend", "start-timeout")


@final
@dataclass(frozen=True)
class LaunchCommand:
    """What a command line asks for."""

    config: LaunchConfig
    program: Program
    note: str = ""


def help_text() -> str:
    """Return a line for each option that has a meaning, in two blocks: anywhere, and before the script."""
    shown = [option for option in _OPTIONS if not option.refused]
    width = max(len(_spelled(option)) for option in shown) + 2
    blocks = [
        "\n".join(
            f"{_spelled(option):<{width}}{option.summary}" for option in shown if option.anywhere is where
        )
        for where in (True, False)
    ]
    return f"Before or after the script:\n{blocks[0]}\nBefore the script:\n{blocks[1]}"


def _spelled(option: _Option) -> str:
    short = f"{option.short}, " if option.short else ""
    return f"  {short}--{option.name}{'' if option.flag else ' VALUE'}"


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether --help or -h stands among the launcher's own options; behind the script it is the
    script's."""
    words = iter(arguments)
    for word in words:
        if word in ("-h", "--help"):
            return True
        name, equals, _ = word.partition("=")
        option = _BY_SPELLING.get(name)
        if option is None:
            return False
        if not option.flag and not equals:
            next(words, None)  # its value
    return False


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> LaunchCommand:
    """Read a command line, without the words `paceline run`."""
    given: dict[str, str] = {}
    words, behind = _take_options(list(arguments), given)
    before = len(given) - len(behind)
    for option in _OPTIONS:
        value = environment.get(f"PET_{option.name.replace('-', '_').upper()}", "")
        if value and option.name not in given and option.name not in _OURS and not option.refused:
            given[option.name] = value
    if not words:
        raise UsageError(
            "no script is given", remedy="paceline run train.py --nproc-per-node 4; see paceline run --help"
        )
    is_module, executed = _is_set(given, "module"), _is_set(given, "no-python")
    if is_module and executed:
        raise UsageError("--module and --no-python contradict each other", remedy="leave one of them out")
    program = Program(words[0], tuple(words[1:]), is_module, executed)
    note = ""
    if before and behind:
        # The habit of torchrun, where all that stands behind the script is the script's.
        note = f"paceline run: {listed(behind)} behind the script is the launcher's; -- makes it the script's"
    return LaunchCommand(LaunchConfig(**_settings(given)), program, note)


def _take_options(words: list[str], given: dict[str, str]) -> tuple[list[str], list[str]]:
    """Put the launcher's options into `given`; return what is left, the script first, and which options stood
    behind the script. All after `--` is the script's."""
    left: list[str] = []
    behind: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            return [*left, *words], behind
        name, equals, value = word.partition("=")
        option = _BY_SPELLING.get(name)
        if option is None and not left and word.startswith("-"):
            near = get_close_matches(name, [*_BY_SPELLING], n=1)
            raise UsageError(
                f"{name} stands before the script, and is no option of paceline run",
                remedy=(f"did you mean {near[0]}? " if near else "")
                + "options of the script come after it; see paceline run --help",
            )
        if option is None or (left and not option.anywhere):
            left.append(word)
            continue
        if option.refused:
            raise UsageError(f"{name} of torchrun has no meaning here", remedy=option.refused)
        if left:
            behind.append(name)
        if not option.flag and not equals:
            if not words:
                raise UsageError(f"{name} needs a value", remedy=f"write {name} VALUE or {name}=VALUE")
            value = words.pop(0)
        given[option.name] = value if equals or not option.flag else "1"
    return left, behind


def _is_set(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "0").lower() not in ("", "0", "false")


def _settings(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the keywords of a LaunchConfig."""
    settings: dict[str, Any] = _place(given)
    count = given.get("nproc-per-node")
    if count is not None:
        settings["nproc_per_node"] = int(count) if count.lstrip("-").isdecimal() else count
    for name in ("node-rank", "max-restarts"):
        if name in given:
            settings[name.replace("-", "_")] = _whole(name, given[name])
    for name in ("monitor-interval", "start-timeout", "shutdown-timeout"):
        if name in given:
            settings[name.replace("-", "_")] = _seconds(f"--{name}", given[name])
    for name, key in (("backend", "backend"), ("rdzv-id", "run_id"), ("role", "role")):
        if name in given:
            settings[key] = given[name]
    if given.get("local-ranks-filter"):
        words = given["local-ranks-filter"].split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise UsageError(
                f"--local-ranks-filter {given['local-ranks-filter']}",
                remedy="name ranks of this node, from 0: --local-ranks-filter 0,2",
            )
        settings["shown_ranks"] = tuple(map(int, words))
    if _is_set(given, "standalone"):
        settings["run_id"] = str(uuid.uuid4())
    return settings


def _place(given: Mapping[str, str]) -> dict[str, Any]:
    """Return how many nodes there are and where they meet."""
    settings: dict[str, Any] = {"nnodes": _nodes(given.get("nnodes", "1"))}
    backend = given.get("rdzv-backend", "static")
    if backend not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {backend}: the launchers meet at node 0, without another service",
            remedy="leave it out, and give --master-addr and --master-port",
        )
    if _is_set(given, "standalone"):
        if settings["nnodes"] > 1:
            raise UsageError(
                f"--standalone with --nnodes {given['nnodes']}: it means one node", remedy="leave one out"
            )
        return settings
    if settings["nnodes"] > 1 and "node-rank" not in given:
        raise UsageError(
            f"--nnodes {given['nnodes']} without --node-rank",
            remedy="give every node its own number, from 0: --node-rank $SLURM_NODEID",
        )
    endpoint = given.get("rdzv-endpoint", "")
    if endpoint:
        host, _, port = endpoint.rpartition(":")
        if settings["nnodes"] == 1 or port == "0":
            settings["master_addr"] = host or endpoint
        else:
            address = parse_address(endpoint if host else f"{endpoint}:29400", "--rdzv-endpoint")
            settings |= {"master_addr": address.host, "master_port": address.port}
    if "master-addr" in given:
        settings["master_addr"] = given["master-addr"].strip("[]")
    if "master-port" in given:
        settings["master_port"] = _whole("master-port", given["master-port"])
    for part in filter(None, given.get("rdzv-conf", "").split(",")):
        key, _, value = part.partition("=")
        if key.strip() in ("timeout", "join_timeout"):
            settings["start_timeout"] = _seconds(f"--rdzv-conf {key.strip()}", value)
    return settings


def _nodes(text: str) -> int:
    least, colon, most = text.partition(":")
    if colon and least != most:
        raise UsageError(
            f"--nnodes {text}: a range of nodes",
            remedy="give one number; workers of a Trainer come and go while it trains: see paceline join",
        )
    return _whole("nnodes", least)


def _whole(name: str, text: str) -> int:
    if not text.strip().lstrip("-").isdecimal():
        raise UsageError(f"--{name} {text}", remedy=f"--{name} is a whole number")
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name} {text}", remedy=f"{name} is a number of seconds") from None
