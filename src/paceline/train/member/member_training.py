"""Worker entry point under a supervisor: build the model, join the current view, train, transfer state when
membership changes, and save where no supervisor is left.

The loop is that of worker_jobs.py; views are in membership.py.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from paceline.checkpoint.store import CheckpointStore
from paceline.comm import default_group
from paceline.comm.context import DistributedContext
from paceline.comm.cost import LinkCosts
from paceline.comm.rendezvous.transport_setup import single_rank
from paceline.control import liveness_lock, supervisor_address
from paceline.control.control_client import ControlClient
from paceline.control.messages import InjectionRequest
from paceline.control.spool import START_OVER_EXIT_CODE
from paceline.control.worker_options import WorkerOptions
from paceline.core import traceback_filter
from paceline.core.chaos_spec import Chaos
from paceline.core.errors import PacelineError, UsageError
from paceline.core.events import FaultInjected, to_json
from paceline.core.host import host_name
from paceline.core.listen_address import ListenAddress
from paceline.core.phase_page import PhasePage, page_file
from paceline.core.time_limits import START_SECONDS
from paceline.train.history import History
from paceline.train.loop import process_setup
from paceline.train.loop.finalize import conclude, history_of, save_alone, save_in_group
from paceline.train.loop.run import Run
from paceline.train.loop.run_builder import RunBuilder, SupervisedHooks, local_place
from paceline.train.loop.worker_jobs import (
    BuiltModel,
    TrainJob,
    TrainResult,
    build,
    conclude_again,
    new_team,
    train_to_end,
    trained,
)
from paceline.train.member.fault_injection import FaultInjector
from paceline.train.member.machine_shell import MachineShell
from paceline.train.member.membership import Membership, OrphanedError, ReleasedError, StartOverError
from paceline.train.member.outbox import Outbox
from paceline.train.member.step_reports import StepReports
from paceline.train.phases import Phases
from paceline.train.state.run_folder import RunFolder
from paceline.train.step.gradient_memory import FlatGradients
from paceline.train.step.gradient_reducer import GradientChecks
from paceline.train.stop_signals import SAME_SIGNAL_SECONDS, SUPERVISOR_LOST_EXIT_CODE, StopRequest, listening
from paceline.train.team import Team

_log = logging.getLogger(__name__)

_ANNOUNCE_TIMEOUT = 2.0  # a supervisor answers within a few milliseconds; longer would look like a hang
_RECONNECT_SECONDS = 3.0  # less than what looks like a hang
_RESULT_SENDERS = 2  # per host; two senders: the first may be killed before its result is read


def train_member(job: TrainJob, options: WorkerOptions) -> TrainResult:
    """Train until the run is over or the supervisor dismisses this worker. Raise SystemExit where the
    process has to end with an exit code."""
    if job.process is not None:
        job.process.apply()
    config, stop, leave = job.config, StopRequest(), StopRequest()
    sees_folder = _sees_folder(job, options)
    if options.returns_from_agents and not sees_folder:
        _check_storage(job)
    folder = Path(job.folder) if sees_folder and job.folder is not None else None
    with ExitStack() as stack:
        listener = stack.enter_context(ListenAddress(options.ports).open(options.listen))
        before_views = single_rank([options.slot])
        context = DistributedContext.from_transport(before_views, links=LinkCosts.from_plain(options.links))
        # paceline.get_rank() follows the group of this worker.
        team = new_team(context, config, announce=default_group.offer)
        stack.callback(lambda: team.context.close())
        page = _page(job, options, stack)
        client = ControlClient(
            options.address,
            bytes.fromhex(options.secret),
            tls=options.tls,
            # Finds a supervisor that was restarted.
            lookup=partial(supervisor_address.lookup, Path(options.folder)) if options.folder else None,
            on_turn=page.tick if page is not None else lambda: None,
        )
        chaos = Chaos() if options.chaos is None else Chaos(options.chaos)
        injector = FaultInjector(
            chaos,
            slot=options.slot,
            attempt=options.attempt,
            mute=client.mute,
            announce=partial(_announce, client),
        )
        checksums = config.fault_tolerance.checksums
        if checksums is None and "corrupt" in chaos.kinds:
            checksums = True  # damage that is injected has to be found
        phases = Phases(injector.at, page)
        shell = MachineShell(options, client, team, phases, stop, folder)
        outbox = Outbox(client, team)
        reports = StepReports(shell, client, outbox, team, injector)
        # A scheduler signals every process of its job, and this worker's agent passes the signal on.
        stack.enter_context(listening(leave.ask, to_the_end=True, same_seconds=SAME_SIGNAL_SECONDS))
        stack.enter_context(process_setup.prepared(config))
        started = time.perf_counter()
        built = build(job, stack, options.slot)
        if not sees_folder:
            _log.info("this host does not see %s: others write the checkpoints", job.folder)
        hooks = SupervisedHooks(
            reports,
            reports,
            outbox.tell,
            lambda: client.acked_at,
            options.slot,
            GradientChecks(checksums, partial(_tamper, injector, phases)),
            sees_folder,
        )
        builder = RunBuilder(team, built.spec, built.device, stop, hooks=hooks, phases=phases)
        run = stack.enter_context(builder).run(built.evaluation(team))
        membership = Membership(options, run, shell, client, outbox, reports, leave, listener)
        stack.callback(membership.close)
        injector.has_met(client.start(membership, START_SECONDS).injected)
        stack.callback(client.close)
        if folder is not None:
            # Not before: a worker that was not accepted has nothing to save, and no restart waits for it.
            stack.enter_context(liveness_lock.held(folder))
        return _train(membership, run, built, started, options)


def _train(
    membership: Membership, run: Run, built: BuiltModel, started: float, options: WorkerOptions
) -> TrainResult:
    history: History | None = None
    try:
        membership.join()
        ending = "again"
        while ending == "again":
            train_to_end(run, built, membership.rejoin)
            history = conclude(run, started)
            ending = _finish(membership, run)
        if ending == "orphaned":
            membership.spool_undelivered()
            raise SystemExit(SUPERVISOR_LOST_EXIT_CODE)
    except ReleasedError as released:
        _log.info("released: %s", released)
        if released.code:
            raise SystemExit(released.code) from None
        if not run.state.agenda.concluded:
            return TrainResult(None, {}, None)
    except OrphanedError as orphaned:
        _save_as_orphan(membership, run, str(orphaned))
        raise SystemExit(SUPERVISOR_LOST_EXIT_CODE) from None
    except StartOverError as over:
        _log.warning("this worker starts over: %s", over)
        membership.close_connection()
        # Not an exception, which would count as an error of the program: the process ends and is replaced.
        os._exit(START_OVER_EXIT_CODE)
    except Exception as error:
        handle_failure(membership, run, error)
        raise
    if not _returns_result(run.parts.team, options):
        return trained(run, built.module, None)
    return trained(run, built.module, history or history_of(run, started))


def _returns_result(team: Team, options: WorkerOptions) -> bool:
    """Return whether this worker sends the whole result to the caller, or another one does."""
    topology = team.context.transport.topology
    if options.folder:
        return topology.ranks_on(topology.host_of[team.rank]).index(team.rank) < _RESULT_SENDERS
    if not options.returns_from_agents:
        return False
    # Over the network, so as few as possible; of different hosts, where there are: a host may be lost.
    first_ranks = sorted(min(topology.ranks_on(host)) for host in {*topology.host_of})
    return team.rank in [*first_ranks, 1][:_RESULT_SENDERS]


def _finish(membership: Membership, run: Run) -> Literal["dismissed", "orphaned", "again"]:
    """Stay until every member is finished, in each view that comes meanwhile. "again": the group went back to
    a checkpoint, so that steps have to be done again."""
    while True:
        ending = membership.finish(run.state.final_hashes[0][0])
        if ending != "needed":
            return ending
        membership.join()
        if not conclude_again(run, membership.rejoin):
            return "again"


def handle_failure(membership: Membership, run: Run, error: Exception) -> None:
    """Report that this worker's code raised, and save what it holds.

    Its model is at a step boundary, because a step is a transaction.
    """
    phase, text = run.parts.phases.name, traceback_filter.user_frames_of(error)
    saving = membership.saving_after_error
    if saving == "alone":
        # Before the report: where the error is forgiven, another worker continues from here.
        save_in_group(run)
    membership.failed(error, text, phase=phase, holds=saving == "in view")
    if saving != "in view":
        return
    try:
        membership.join()
        if run.state.failing:
            conclude_again(run, membership.rejoin)
            if _finish(membership, run) == "orphaned":
                # The group has saved; what no supervisor has acknowledged is left for the next start.
                membership.spool_undelivered()
    except ReleasedError as released:
        _log.info("released: %s", released)
    except OrphanedError as orphaned:
        _save_as_orphan(membership, run, str(orphaned))
    except (PacelineError, StartOverError) as again:
        _log.error("the state of step %d could not be saved: %s", run.state.position.step, again)


def _save_as_orphan(membership: Membership, run: Run, why: str) -> None:
    """Save what all members hold, if that is for this worker to do, of a group without a supervisor."""
    _log.warning("%s, and the group is broken", why)
    if (unsaved := membership.why_unsaved()) is None:
        save_alone(run)
    else:
        _log.warning("this worker does not save: %s", unsaved)
    membership.spool_undelivered()


def _sees_folder(job: TrainJob, options: WorkerOptions) -> bool:
    """Return whether this host sees the run's folder and its checkpoint storage: the supervisor's host does,
    any other does if it finds there what the supervisor and the caller wrote."""
    if options.folder or job.folder is None:
        return True
    folder = RunFolder(job.folder)
    elsewhere = local_place(folder, job.config)
    try:
        if supervisor_address.read_secret(folder.path) != bytes.fromhex(options.secret):
            return False
        return elsewhere is None or (elsewhere / ".run").read_text() == folder.lock_file.read_text()
    except (OSError, PacelineError):
        return False


def _check_storage(job: TrainJob) -> None:
    """Refuse a node that sees no place for checkpoints, of a run that has all its workers on such nodes."""
    assert job.folder is not None
    url = RunFolder(job.folder).checkpoint_url(job.config)
    if not job.config.checkpoint.enabled or not CheckpointStore(url).storage.exclusive:
        return
    raise UsageError(
        f"{host_name()} does not see the folder of the run's checkpoints, {url}, and the run has no worker "
        "on the machine that has it",
        remedy="put the run into a folder that the nodes share (run_dir=), name a place that all reach "
        "(checkpoint.url='s3://...'), or turn checkpoints off (checkpoint.enabled=False)",
    )


def _page(job: TrainJob, options: WorkerOptions, stack: ExitStack) -> PhasePage | None:
    if job.folder is None or not options.folder:
        return None  # only the supervisor's own host shares memory with it
    try:
        page = PhasePage(page_file(job.folder, options.member))
    except OSError as error:
        # A full disk. Heartbeats carry the phase too, a little later.
        _log.warning("the phase of this worker is not kept: %s", error.strerror)
        return None
    stack.callback(page.close)
    return page


def _announce(client: ControlClient, event: FaultInjected, before: int, *, once: bool) -> bool:
    """Announce a fault that is about to be injected; True: the supervisor has acknowledged it.

    A fault that comes once in a run waits a moment for a supervisor that is being restarted. Without one it
    is not announced: the message might arrive later, although the fault never came.
    """
    injected = InjectionRequest(index=event.index, before=before, line=to_json(event))
    # Only at the beginning of an absence: a fault that is due in every phase must not delay each of them.
    while once and 0.0 < client.away < _RECONNECT_SECONDS:
        time.sleep(0.01)
    if not client.away:
        return client.deliver(injected, _ANNOUNCE_TIMEOUT)
    if not once:
        client.send(injected)
    return False


def _tamper(injector: FaultInjector, phases: Phases, flat: FlatGradients) -> None:
    if injector.corrupt(phases.step):
        memory = flat.memory[torch.float32].view(torch.int32)
        memory[len(memory) // 2] ^= 1 << 20
