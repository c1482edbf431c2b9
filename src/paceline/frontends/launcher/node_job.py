"""One job on one node: starts its ranks, passes on what they print, and starts all of them again when one
fails, together with the launchers of the other nodes.

A rank that is lost around a call of a Trainer is started again alone: its workers were not lost with it, or
are repaired by their supervisor (joint_calls.py). Ranks are children of the fork server, which kills them
when this process is gone.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, final

from paceline.core.errors import CommTimeoutError
from paceline.core.wording import ranks as rank_names
from paceline.engines.local import launch, output_relay
from paceline.engines.local.engine_messages import LaunchOrder
from paceline.engines.local.output_relay import RankOutput
from paceline.engines.local.script_ranks import RankEnd, ScriptRanks, first_failure
from paceline.frontends.launcher import failure_text, script_rank
from paceline.frontends.launcher.call_relay import CallRelay
from paceline.frontends.launcher.launch_config import LaunchConfig
from paceline.frontends.launcher.launch_program import Program, paths_of_a_fresh_python
from paceline.frontends.launcher.launch_signals import PASSED_ON, SignalInbox
from paceline.frontends.launcher.node_meeting import JobMeeting, NodeFailure
from paceline.frontends.launcher.rank_environment import Placement, rank_environment
from paceline.frontends.launcher.script_rank import ScriptOptions
from paceline.train.stop_signals import STOPPED_EXIT_CODE

_TURN_SECONDS: Final = 1.0


@final
class NodeJob:
    """One job on this node, from its first attempt to its last."""

    def __init__(
        self,
        config: LaunchConfig,
        program: Program,
        meeting: JobMeeting,
        ranks: ScriptRanks,
        calls: CallRelay,
        signals: SignalInbox,
    ) -> None:
        self._config = config
        self._program = program
        self._meeting = meeting
        self._ranks = ranks
        self._calls = calls
        self._signals = signals
        self._asked = 0  # the signal that ends the job
        self._sent: set[int] = set()  # signals of this attempt to its ranks
        self._stopped_at = float("inf")
        self._deadline = float("inf")
        self._repairs = dict.fromkeys(range(config.ranks_here), 0)

    def run(self) -> int:
        """Attempt until one ends well, is asked to end, or was the last."""
        for attempt in itertools.count():
            place = self._meeting.begin(attempt)
            ends = self._attempt(place)
            failed = self._failed(ends)
            if failed or self._asked:
                self._meeting.fail(self._failure(failed))
            self._meeting.await_end(attempt)
            failure = self._meeting.failure
            if self._asked:
                return self._meeting.finish(_code_when_asked(ends, self._asked))
            if failure is None:
                return self._meeting.finish(0)
            over = failure.final or attempt >= self._meeting.max_restarts
            self._say(failure_text.describe(failure, failed, place, self._config, over=over))
            if over:
                return self._meeting.finish(failure.exit_code)
            host = socket.gethostname()
            self._calls.losses = [
                {"rank": end.rank, "pid": end.pid, "host": host, "how": end.how, "when": end.when}
                for end in failed
            ]
            self._say(failure_text.restart(place, attempt, self._meeting.max_restarts))
        raise AssertionError("unreachable")

    def _attempt(self, place: Placement) -> list[RankEnd]:
        """Run all ranks of this node to their end."""
        self._sent.clear()
        self._calls.begin_attempt()
        self._stopped_at = self._deadline = float("inf")
        outputs = [
            RankOutput(
                place.first_rank + local, not self._config.shown_ranks or local in self._config.shown_ranks
            )
            for local in range(self._config.ranks_here)
        ]
        for local, output in enumerate(outputs):
            self._ranks.start(self._order(place, local), output)
        limit = time.monotonic() + self._config.start_timeout
        ends: list[RankEnd] = []
        while self._ranks.running:
            self._ranks.listen(min(_TURN_SECONDS, self._deadline - time.monotonic()))
            self._pass_signals_on()
            for rank in self._ranks.ended():
                self._refuse(rank.worker.refusal)
                end = self._ranks.remove(rank)
                under_way = self._calls.is_under_way  # with this rank in it, or another
                self._calls.forget(rank)
                local = rank.rank - place.first_rank
                if under_way and self._can_repair(end, local):
                    self._repairs[local] += 1
                    self._say(failure_text.repaired(end, self._repairs[local], self._config.max_restarts))
                    self._ranks.start(self._order(place, local), outputs[local])
                else:
                    ends.append(end)
            self._stop_after_a_failure(ends)
            self._check_started(limit)
        return ends

    def _order(self, place: Placement, local: int) -> LaunchOrder:
        variables = rank_environment(os.environ, self._config, place, local)
        options = ScriptOptions(
            program=self._program.name,
            arguments=list(self._program.arguments),
            variables=variables,
            is_module=self._program.is_module,
            executed=self._program.executed,
            single_node=self._config.nnodes == 1,
        )
        order = launch.order_from_caller(script_rank.ENTRY, 1, script_rank.PRELOAD, None, options.to_plain())
        return replace(
            order,
            sys_path=tuple(paths_of_a_fresh_python(order.sys_path)),
            environ=variables,
            first_rank=place.first_rank + local,
            world_size=place.world_size,
        )

    def _stop_after_a_failure(self, ends: Sequence[RankEnd]) -> None:
        """Have the others end once a rank has failed, here or on another node."""
        failed = [end for end in ends if end.has_failed]
        survive = self._calls.leaves_survivors(end.rank for end in failed)
        if self._stopped_at < float("inf") or (survive and self._meeting.failure is None):
            return
        # One that was killed may be started again alone: that is decided when no message of it is to come.
        raised = any(rank.has_failed and not rank.was_killed for rank in self._ranks.running.values())
        if self._meeting.failure is None and self._sent and all(map(self._meant_the_end, failed)):
            if failed:
                self._allow_time()  # all of them have got the signal, and each saves in its own time
        elif failed or raised or self._meeting.failure is not None:
            self._stop(signal.SIGTERM)

    def _meant_the_end(self, end: RankEnd) -> bool:
        """Return whether a signal that was passed on meant the end to a rank: it died of it, or saved."""
        codes = {*(128 + number for number in PASSED_ON), STOPPED_EXIT_CODE}
        return end.exit_code in codes and not self._sent.isdisjoint(PASSED_ON)

    def _allow_time(self) -> None:
        self._stopped_at = time.monotonic()
        self._deadline = self._stopped_at + self._config.shutdown_timeout

    def _stop(self, number: int) -> None:
        self._allow_time()
        self._sent.add(number)
        for rank in self._ranks.running.values():
            # One that has raised ends by itself, and may have much to write before.
            if not rank.has_failed:
                rank.worker.signal(number)

    def _pass_signals_on(self) -> None:
        for number in self._signals.take():
            if number in PASSED_ON:
                self._sent.add(number)
                self._ranks.signal(number)
            elif self._asked:
                self._deadline = 0.0  # asked twice: now
            else:
                self._asked = number
                self._stop(number)
        if time.monotonic() >= self._deadline:
            self._deadline = float("inf")
            self._sent.add(signal.SIGKILL)
            self._ranks.kill()

    def _can_repair(self, end: RankEnd, local: int) -> bool:
        lost = end.status is not None and end.status < 0 and end.report is None
        again = self._repairs[local] < self._config.max_restarts
        return lost and again and self._stopped_at == float("inf")

    def _failed(self, ends: Sequence[RankEnd]) -> list[RankEnd]:
        """Return the ranks that failed by themselves, the one that was first in front."""
        lost = [end.rank for end in ends if end.has_failed]
        if self._calls.leaves_survivors(lost) and len(lost) < len(ends):
            return []
        failed = [end for end in ends if end.has_failed and not self._was_stopped(end)]
        if not failed:
            return []
        first = first_failure(failed)
        return [first, *(end for end in failed if end is not first)]

    def _was_stopped(self, end: RankEnd) -> bool:
        """Return whether a rank ended because this launcher had it end. One that was killed may be noticed
        later than a peer that fails because of it."""
        killed = end.status is not None and end.status < 0 and -end.status not in self._sent
        return end.when > self._stopped_at and not killed

    def _failure(self, failed: Sequence[RankEnd]) -> NodeFailure:
        """Return what the other nodes are to know of this one's attempt."""
        node = self._config.node_rank
        if self._asked:
            name = signal.Signals(self._asked).name
            return NodeFailure(
                node, -1, 128 + self._asked, f"{name} ended the job on node {node}", final=True
            )
        first = failed[0]
        what = f"rank {first.rank} (pid {first.pid}) {first.how}"
        # An error of a joint call is one that the script would meet again.
        final = self._meant_the_end(first) or self._calls.has_failed
        return NodeFailure(node, first.rank, first.exit_code, what, final, first.is_echo)

    def _refuse(self, refusal: BaseException | None) -> None:
        if refusal is not None:
            raise refusal

    def _check_started(self, limit: float) -> None:
        late = [number for number, rank in self._ranks.running.items() if not rank.worker.is_ready]
        if late and time.monotonic() >= limit:
            raise CommTimeoutError(
                f"{rank_names(late)} did not start within {self._config.start_timeout:g} s",
                waiting_for=late,
                remedy="importing torch seems to hang: try `python -c 'import torch'`",
            )

    def _say(self, text: str) -> None:
        output_relay.write_all(2, f"{text}\n".encode())


def _code_when_asked(ends: Sequence[RankEnd], number: int) -> int:
    """Return the exit code of a job that a signal ended: the ranks' own where they chose one."""
    codes = {end.status for end in ends}
    chosen = sorted(code for code in codes if code is not None and code > 0)
    if chosen:
        return chosen[0]
    return 0 if codes == {0} else 128 + number
