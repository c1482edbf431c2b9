"""What one worker does in a job that is looked after: build, join, train with whoever is there, hand over.

The same loop as in worker.py; what happens when members come and go is in membership.py. Must not know how
the worker was started, nor what the supervisor decides.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.comm import default_group
from paceline.comm.context import DistributedContext
from paceline.comm.cost import Links
from paceline.comm.rendezvous import alone
from paceline.core import own_frames
from paceline.core.chaos import Chaos
from paceline.core.control import address, crew
from paceline.core.control.host import host_identity, host_name
from paceline.core.control.member_link import Address, MemberLink
from paceline.core.control.messages import Injected
from paceline.core.control.unheard import START_OVER_EXIT_CODE
from paceline.core.errors import PacelineError
from paceline.core.events import FaultInjected, to_json
from paceline.core.listening import Listening
from paceline.core.phase_page import PhasePage, page_file
from paceline.core.tls import Tls
from paceline.train import last_save, last_words, run_setup
from paceline.train.assembly import Assembled, LookedAfter, local_place
from paceline.train.chaos import Injector
from paceline.train.ending import conclude, history_of
from paceline.train.gradients import Flat
from paceline.train.history import History
from paceline.train.membership import Membership
from paceline.train.phases import Phases
from paceline.train.run import Run
from paceline.train.run_folder import RunFolder
from paceline.train.seat import ReleasedError, Seat, StartOverError, SupervisorGoneError
from paceline.train.signals import SUPERVISOR_LOST_EXIT_CODE, StopRequest, listening
from paceline.train.state import quick_hash
from paceline.train.summation import Checks
from paceline.train.team import Team
from paceline.train.worker import Built, Trained, TrainJob, build, new_team, trained, walk_to_the_end

_log = logging.getLogger(__name__)

_DEFAULT_TIMEOUT = 300.0
_ANNOUNCE_SECONDS = 2.0  # a supervisor answers within a few milliseconds; longer would look like a hang
_BACK_SECONDS = 3.0  # less than what looks like a hang
_WITH_RESULT = 2  # ranks of a machine that send the result: the first may be killed with it in its hands


@dataclass(frozen=True)
class Place:
    """What the starter of this worker says about its seat. `attempt` counts the slot's workers from 1."""

    member: int
    slot: int
    attempt: int
    address: Address
    secret: bytes
    links: Links
    patience: float
    start_seconds: float = 300.0
    chaos: str | None = None
    tls: Tls | None = None
    lookup: Callable[[], Address | None] | None = None
    listen: str = "127.0.0.1"  # where other members of a view can reach this one
    ports: str = ""  # of which range, for every listener of this worker


def train_member(job: TrainJob, place: Place) -> Trained:
    """Trains until the run is over or this worker is let go. Raises SystemExit with a code where the process
    is to end with one."""
    if job.process is not None:
        job.process.settle()
    config, stop = job.config, StopRequest()
    sees = _sees_folder(job, place)
    folder = Path(job.folder) if sees and job.folder is not None else None
    with ExitStack() as stack:
        listener = stack.enter_context(Listening(place.ports).open(place.listen))
        context = DistributedContext.from_transport(alone(), links=place.links)
        # paceline.get_rank() is to know of each group that this worker will be in.
        team = new_team(context, config, announce=default_group.offer)
        stack.callback(lambda: team.context.close())
        chaos = Chaos() if place.chaos is None else Chaos(place.chaos)
        link: MemberLink  # faults come after it is there
        injector = Injector(
            chaos,
            slot=place.slot,
            attempt=place.attempt,
            mute=lambda seconds: link.mute(seconds),
            announce=lambda event, before, once: _announce(link, event, before, once=once),
        )
        page = _page(job, place, stack)
        phases = Phases(injector.at, page)
        seat = Seat(
            member=place.member,
            slot=place.slot,
            host=host_identity(),
            hostname=host_name(),
            secret=place.secret,
            links=place.links,
            comm_timeout=config.timeout or _DEFAULT_TIMEOUT,
            patience=place.patience,
            folder=folder,
            ports=place.ports,
        )
        membership = Membership(seat, team, phases, stop, injector, listener)
        stack.callback(membership.close)
        link = MemberLink(
            place.address,
            place.secret,
            membership.hello,
            membership.beat,
            membership.hear,
            tls=place.tls,
            lookup=place.lookup,
            unheard=membership.unheard,
            runs=page.tick if page is not None else lambda: None,
        )
        stack.enter_context(listening(membership.leave, to_the_end=True))
        stack.enter_context(run_setup.prepared(config))
        started = time.perf_counter()
        built = build(job, stack, place.slot)
        checksums = config.fault_tolerance.checksums
        if checksums is None and "corrupt" in chaos.kinds:
            checksums = True  # what is damaged on purpose is to be found
        if not sees:
            _log.info("this machine does not see %s: others write the checkpoints", job.folder)
        checks = Checks(checksums, _tamper(injector, phases))
        looked_after = LookedAfter(membership, membership.tell, place.slot, checks, sees)
        assembled = Assembled(team, built.given, built.device, stop, looked_after=looked_after, phases=phases)
        stack.push(assembled)
        run = assembled.run(built.evaluation(team))
        membership.fingerprint = dict(assembled.fingerprint)
        membership.model = quick_hash(built.module)
        membership.attach(link, assembled, run)
        injector.has_met(link.start(place.start_seconds).injected)
        stack.callback(link.close)
        if folder is not None:
            # Not before: who has not been let in yet has nothing to save, and is not worth a wait.
            stack.enter_context(crew.at_work(folder))
        # What a worker of another machine returns reaches nobody.
        sends = _WITH_RESULT if place.lookup is not None else 0
        return _train(membership, run, built, assembled, started, sends)


def _train(
    membership: Membership,
    run: Run,
    built: Built,
    assembled: Assembled,
    started: float,
    sends: int,
) -> Trained:
    history: History | None = None
    try:
        membership.meet_again(run, None)
        ending = "again"
        while ending == "again":
            walk_to_the_end(run, built, assembled)
            history = conclude(run, assembled, started)
            ending = membership.finish(run, run.final_hashes[0][0])
        if ending == "orphaned":
            last_words.leave(membership, assembled)
            raise SystemExit(SUPERVISOR_LOST_EXIT_CODE)
    except ReleasedError as released:
        _log.info("let go: %s", released)
        if released.code:
            raise SystemExit(released.code) from None
        if not run.concluded:
            return Trained(None, {}, None)
    except SupervisorGoneError as gone:
        _save_alone(membership, run, assembled, str(gone))
        last_words.leave(membership, assembled)
        raise SystemExit(SUPERVISOR_LOST_EXIT_CODE) from None
    except StartOverError as over:
        _log.warning("this worker starts over: %s", over)
        if membership.link is not None:
            membership.link.close()
        # Not an exception, which would count as a mistake of the program's: the process ends and is replaced.
        os._exit(START_OVER_EXIT_CODE)
    except Exception as error:
        _failed(membership, run, assembled, error)
        raise
    if _rank_here(assembled.team) >= sends:
        return trained(run, built.module, None)
    return trained(run, built.module, history or history_of(run, assembled, started))


def _rank_here(team: Team) -> int:
    """This rank's number among those of its machine."""
    topology = team.context.transport.topology
    return topology.ranks_on(topology.host_of[team.rank]).index(team.rank)


def _failed(membership: Membership, run: Run, assembled: Assembled, error: Exception) -> None:
    """This worker's code raised. Its model is at a step boundary, because a step is a transaction: what it
    holds is saved, by it alone where nobody else has it, else together with the others, if they are to."""
    phase, text = membership.phase, own_frames.folded(error)
    alone = assembled.team.world_size == 1
    holds = membership.may_save
    if holds and alone:
        # Now: where the error is forgiven, another worker goes on from here.
        last_save.save_here(run, assembled)
    membership.failed(error, text, phase=phase, holds=holds and not alone)
    if not holds or alone:
        return
    try:
        membership.meet_again(run, None)
        if run.failing:
            run.conclude()
            membership.finish(run, run.final_hashes[0][0])
    except ReleasedError as released:
        _log.info("let go: %s", released)
    except SupervisorGoneError as gone:
        _save_alone(membership, run, assembled, str(gone))
        last_words.leave(membership, assembled)
    except (PacelineError, StartOverError) as again:
        _log.error("the state of step %d could not be saved: %s", run.position.step, again)


def _save_alone(membership: Membership, run: Run, assembled: Assembled, why: str) -> None:
    """The group is broken and nobody puts it together: the first who is left saves what all of them have."""
    _log.warning("%s, and the group is broken", why)
    if membership.is_first_alive:
        last_save.save_alone(run, assembled)


def _sees_folder(job: TrainJob, place: Place) -> bool:
    """Whether the run's folder is here, and the place of its checkpoints: on the supervisor's machine always,
    on others if what supervisor and caller wrote there is."""
    if place.lookup is not None or job.folder is None:
        return True
    folder = RunFolder(job.folder)
    elsewhere = local_place(folder, job.config)
    try:
        if address.read_secret(folder.path) != place.secret:
            return False
        return elsewhere is None or (elsewhere / ".run").read_text() == folder.lock_file.read_text()
    except (OSError, PacelineError):
        return False


def _page(job: TrainJob, place: Place, stack: ExitStack) -> PhasePage | None:
    if job.folder is None or place.lookup is None:
        return None  # only the supervisor's own machine shares memory with it
    try:
        page = PhasePage(page_file(job.folder, place.member))
    except OSError as error:
        # A full disk: heartbeats say the same, a little later.
        _log.warning("the phase of this worker is not kept: %s", error.strerror)
        return None
    stack.callback(page.close)
    return page


def _announce(link: MemberLink, event: FaultInjected, before: int, *, once: bool) -> bool:
    """Tells the supervisor that a fault on demand is about to act; whether it knows. One that is to come once
    waits a moment for a supervisor that is being started again. Without one it is not even tried: it might be
    heard later, when nothing has come."""
    injected = Injected(index=event.index, before=before, line=to_json(event))
    # Of one absence only its beginning: what is due in every phase must not hold each of them up.
    while once and 0.0 < link.away < _BACK_SECONDS:
        time.sleep(0.01)
    if not link.away:
        return link.deliver(injected, _ANNOUNCE_SECONDS)
    if not once:
        link.send(injected)
    return False


def _tamper(injector: Injector, phases: Phases) -> Callable[[Flat], None]:
    def flip(flat: Flat) -> None:
        if injector.corrupt(phases.step):
            memory = flat.memory[torch.float32].view(torch.int32)
            memory[len(memory) // 2] ^= 1 << 20

    return flip
