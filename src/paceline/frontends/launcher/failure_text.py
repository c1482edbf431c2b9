"""What the launcher says when ranks fail: the first one first, with its traceback and last lines. Pure."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

from paceline.core.traceback_filter import last_place
from paceline.core.wording import ranks as rank_names
from paceline.engines.local.script_ranks import RankEnd
from paceline.frontends.launcher.launch_config import LaunchConfig
from paceline.frontends.launcher.node_meeting import NodeFailure
from paceline.frontends.launcher.rank_environment import Placement

_SAYS = "paceline run:"
_OUR_MODULES = re.compile(r"\Apaceline\.(?:\w+\.)+")  # in front of the name of an error
_TORCHS_PREFIX = re.compile(r"\A\[rank\d+\]: ")  # of a traceback, once torch.distributed has a group


def describe(
    failure: NodeFailure, failed: Sequence[RankEnd], place: Placement, config: LaunchConfig, *, over: bool
) -> str:
    """Describe the failure of an attempt. `failed`: ranks of this node, the first failure in front."""
    if failure.rank < 0 or failure.node != config.node_rank or not failed:
        where = "" if failure.rank < 0 else f" on node {failure.node}"
        return "\n".join([f"{_SAYS} {failure.what}{where}", *_as_well(failed, "")])
    first, *others = failed
    who = f"rank {first.rank} of {place.world_size}"
    lines = [f"{_SAYS} {who} failed first (pid {first.pid}, {socket.gethostname()}): it {_how(first)}"]
    if first.report is not None and first.report.exit_code is None:
        lines.append(first.report.traceback_text.rstrip())
    elif first.frames:
        lines.append("  it was at " + "\n  called from ".join(first.frames))
    lines += _last_lines(first) if over else []
    lines += _as_well(others, _how(first)) if over else []
    return "\n".join(lines)


def restart(place: Placement, attempt: int, most: int) -> str:
    """Announce the next attempt."""
    who = f"all {place.world_size} ranks start" if place.world_size > 1 else "the rank starts"
    return f"{_SAYS} {who} again (restart {attempt + 1} of {most})"


def repaired(end: RankEnd, times: int, most: int) -> str:
    """Announce that one rank is started again while the others go on."""
    return (
        f"{_SAYS} rank {end.rank} (pid {end.pid}) {end.how}; it starts again alone ({times} of {most}), and "
        "the run goes on"
    )


def _how(end: RankEnd) -> str:
    report = end.report
    if report is None:
        return end.how
    if report.exit_code is not None:
        return f"called sys.exit({report.exit_code})"
    lines = report.summary.splitlines() or [""]
    # The text of an error of syntax begins with its place.
    return f"raised {_OUR_MODULES.sub('', lines[-1] if lines[0].startswith('File ') else lines[0])}"


def _as_well(others: Sequence[RankEnd], first: str) -> list[str]:
    """Name the other ranks that failed, those that failed alike together. `first`: how the first one did."""
    groups: dict[str, list[RankEnd]] = {}
    for end in others:
        groups.setdefault(_how(end), []).append(end)
    lines = []
    for how, ends in groups.items():
        report = ends[0].report
        place = "" if report is None or how == first else last_place(report.traceback_text)
        lines.append(
            f"{rank_names(end.rank for end in ends)} failed as well"
            + ("" if how == first else f"{place}: {'it' if len(ends) == 1 else 'each'} {how}")
        )
    return lines


def _last_lines(end: RankEnd) -> list[str]:
    known = set(end.report.traceback_text.splitlines()) if end.report is not None else set()
    lines = [line for line in end.last_lines if _TORCHS_PREFIX.sub("", line) not in known]
    return [f"last lines of rank {end.rank}:", *(f"  {line}" for line in lines)] if lines else []
