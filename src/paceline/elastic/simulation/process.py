"""A simulated worker process: its state, its two threads, and its control line.

The control thread hears and beats as long as the process runs. The main thread can hang while the control
thread beats; a stopped process does neither. What the main thread does is in member.py. Must not know the
machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Protocol

from paceline.core.control.messages import Progress
from paceline.elastic.model import Beaten, Event, HasBroken, HasRaised, Joined, ViewPlan, WantsToLeave
from paceline.elastic.simulation.network import Line
from paceline.elastic.simulation.plan import RunPlan
from paceline.elastic.simulation.rounds import Round, Rounds
from paceline.elastic.simulation.timeline import Timeline
from paceline.elastic.simulation.truth import Truth

Act = Callable[[], None]


class Surroundings(Protocol):
    """What a member needs of the world."""

    time: Timeline
    rng: Random
    plan: RunPlan
    truth: Truth
    rounds: Rounds

    def hear(self, event: Event) -> None: ...
    def stored(self, plan: ViewPlan) -> tuple[int, int]: ...
    def store(self, step: int, state: int) -> None: ...
    def raises(self, member: Process, shards: list[int]) -> bool: ...
    def reaches_supervisor(self) -> bool: ...
    def entered(self, member: Process, phase: str) -> None: ...
    def way_to(self, member: Process, peer: int) -> str | None: ...


class Process(ABC):
    """One worker process: what it has, where it is, what it was told, and its two threads."""

    def __init__(self, world: Surroundings, number: int, slot: int, place: int, line: Line):
        self.number = number
        self.slot = slot
        self.place = place
        self.line = line
        self.world = world
        self.time = world.time
        self.alive = True
        self.stopped = False  # both threads: by SIGSTOP, or because ...
        self.gripped = False  # ... a call holds the interpreter's lock; the process runs
        self.stalled_at = 0.0
        self.hung = False  # the main thread
        self.factor = 1.0  # how much slower than others
        self.damages = False  # its next contribution does not match its checksum
        self.turns_bad = False  # its next commit goes wrong
        self.is_bad = False  # its weights are not what they should be
        self.wants_out = ""
        self.dismissed = False
        # what it has
        self.steps = 0
        self.duties = 0
        self.state: int | None = None
        self.computed: dict[int, int] = {}
        self.owns: frozenset[int] = frozenset()  # shards whose private state after `steps` it has
        self.sent: frozenset[int] = frozenset()  # and after the next one, if that is decided
        # where it is
        self.view: ViewPlan | None = None
        self.rank = -1
        self.round: Round | None = None
        self.phase = "start"
        self.training = False
        self.done = False
        self.broken: HasBroken | None = None
        self.raised: HasRaised | None = None  # its code has, and it waits
        self.installing = 0
        # what it was told
        self.asked = 0
        self.abort = False
        self.reported = 0
        self.told_stop = ""
        self.stopping = ""
        self.phase_since = world.time.now
        self.token = 0
        self.parked: Act | None = None
        self.step_began = 0.0
        self.step_mean = 0.0
        self.shard_mean = 0.0
        self.compute_began = 0.0
        self.computing: list[int] = []
        self.per_shard = 0.0

    # threads

    @property
    def stuck(self) -> bool:
        """Whether its main thread will not answer."""
        return not self.alive or self.stopped or self.hung

    @property
    def generation(self) -> int:
        return self.view.generation if self.view is not None else 0

    @property
    def progress(self) -> Progress | None:
        if self.state is None:
            return None
        return (self.steps, self.steps // self.world.plan.epoch_steps, self.duties)

    def main(self, seconds: float, act: Act) -> None:
        """The main thread does this next."""
        self.token += 1
        self.time.after(seconds, self._fire, self.token, act)

    def _fire(self, token: int, act: Act) -> None:
        if token != self.token or not self.alive:
            return
        if self.stuck:
            self.parked = act
        else:
            act()

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.phase_since = self.time.now
        self.world.entered(self, phase)

    def computed_so_far(self) -> int:
        if self.per_shard <= 0:
            return len(self.computing)
        return min(int((self.time.now - self.compute_began) / self.per_shard), len(self.computing))

    def phase_began(self) -> float:
        """Since when it is in its phase, which begins anew with each shard; who hangs, hangs in one."""
        if self.phase != "forward" or self.stuck:
            return self.phase_since
        return max(self.phase_since, self.compute_began + self.computed_so_far() * self.per_shard)

    def stall(self, stopped: bool) -> None:
        """The process is stopped, or its main thread hangs."""
        self.phase_since = self.phase_began()
        if stopped:
            self.stalled_at = self.stalled_at if self.stopped else self.time.now
            self.stopped, self.gripped = True, False
        else:
            self.hung = True
        if self.round is not None:
            self.round.upset(self.number)

    def go_on(self) -> None:
        """What stopped it is over."""
        if not self.alive:
            return
        self.stopped = self.hung = self.gripped = False
        if self.round is not None:
            self.round.resumed()
        parked, self.parked = self.parked, None
        if parked is not None:
            parked()
        if self.asked > self.reported and self.abort and not self.stuck:
            self.react()

    def slept(self, seconds: float) -> None:
        """The machine was suspended: monotonic clocks stood still."""
        self.phase_since += seconds
        self.stalled_at += seconds
        self.step_began += seconds
        self.compute_began += seconds

    def die(self) -> None:
        self.alive = False
        self.token += 1
        if self.round is not None:
            self.round.upset(self.number)

    # the control thread

    def send(self, event: Event) -> None:
        if self.alive:
            self.line.send_up(not isinstance(event, Beaten), self.world.hear, event)

    def boot(self) -> None:
        """The process is up: say hello and beat."""
        if not self.alive:
            return
        if self.stopped or not self.world.reaches_supervisor():
            self.time.after(0.2, self.boot)
            return
        self.line.connect()
        self.enter("wait")
        self.send(Joined(self.number, self.slot, self.place))
        self.beat()

    def beat(self) -> None:
        if not self.alive:
            return
        heartbeat = self.world.plan.settings.heartbeat
        self.time.after(heartbeat, self.beat)
        if self.stopped or not self.line.up:
            return
        waits = self.round.waits_for(self.number) if self.round is not None else ()
        lasted = self.time.now - self.phase_began()
        self.send(
            Beaten(self.number, self.phase, lasted, self.progress, waits, self.shard_mean, self.step_mean)
        )

    def lose_line(self, away: float) -> None:
        """The connection is cut; connect again after a while."""
        self.line.cut()
        self.time.after(away, self.reconnect)

    def reconnect(self) -> None:
        """Say who we are, and again what may have been lost."""
        if not self.alive or self.line.up:
            return
        if self.stopped or not self.world.reaches_supervisor():
            self.time.after(0.2, self.reconnect)
            return
        self.line.connect()
        self.send(Joined(self.number, self.slot, self.place, self.generation, self.progress))
        if self.wants_out:
            self.send(WantsToLeave(self.number, self.wants_out))
        if self.done:
            self.say_done()
        elif self.raised is not None:
            self.send(self.raised)
        elif self.broken is not None and self.broken.generation == self.installing:
            self.send(self.broken)

    def wait_raised(self, raised: HasRaised) -> None:
        """Its code raised: the step is abandoned, and others say what follows."""
        self.raised = raised
        self.token += 1
        self.training = False
        self.computing = []
        self.enter("wait")
        self.send(raised)
        if self.asked > self.reported and self.asked > self.generation and not self.stuck:
            self.react()

    def leave(self, reason: str) -> None:
        """It was asked to go."""
        self.wants_out = reason
        self.send(WantsToLeave(self.number, reason))

    @abstractmethod
    def react(self) -> None:
        """It was asked to stop."""

    @abstractmethod
    def say_done(self) -> None:
        """Say that it came to the end."""

    @abstractmethod
    def completed(self, round: Round) -> None:
        """A collective has ended here."""

    @abstractmethod
    def broke(self, round: Round, accused: tuple[int, ...], unreachable: tuple[int, ...]) -> None:
        """A collective has failed here."""
