"""Journals of runs that never ran: everything a supervised run may go through, from a seed.

Workers die before, inside and after a commit, join and leave, all of them die, the supervisor too; receipts
come in batches and the last ones of a lost worker never do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from paceline.core import events
from paceline.core.events import Event
from paceline.data.permutation import Permutation


@dataclass
class Worker:
    rank: int
    pid: int
    pending: tuple[int, int] | None = None  # committed steps without a receipt yet
    shards: tuple[int, ...] = ()
    step: int = -1  # what it has committed, or was given


@dataclass
class MadeRun:
    """Walks through a made-up run and writes its journal to `journal`."""

    seed: int
    workers: int = 4
    shards: int = 6
    size: int = 53
    batch: int = 8
    epochs: int = 4
    drop_last: bool = False
    trouble: float = 0.15  # the chance that something happens in a step
    audit_every: int = 5
    skips: bool = False
    seconds: float = 0.05
    supervised: bool = True
    begin: float = 1_700_000_000.0
    journal: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.time = self.begin
        self.pid = 100
        self.generation = 0
        self.members: list[Worker] = []
        self.step = self.epoch = self.offset = 0
        self.saved = (0, 0, 0)
        self.version = 0

    # the run

    def run(self) -> list[Event]:
        self.start()
        while self.epoch < self.epochs:
            if self.supervised and self.random.random() < self.trouble:
                self.random.choice(
                    [self.kill, self.kill, self.kill_inside, self.kill_alone, self.join, self.leave,
                     self.join_inside, self.leave_inside, self.restart_supervisor, self.all_die,
                     self.everything_dies]
                )()  # fmt: skip
            else:
                self.commit()
            if self.step % 7 == 0 and self.step > self.saved[0]:
                self.save()
        for worker in self.members:
            self.receipt(worker)
        self.tell(
            events.RunEnded,
            step=self.step,
            epoch=self.epoch - 1,
            reason="finished",
            hash=self.hash(self.step),
        )
        return self.journal

    def start(self) -> None:
        if self.supervised:
            self.tell(events.SupervisorStarted, pid=self.fresh_pid(), attempt=1, address="127.0.0.1:1")
        self.members = [self.worker(rank) for rank in range(self.workers)]
        if self.supervised:
            self.view("all workers came")
        self.tell(
            events.RunStarted,
            workers=self.workers,
            shards=self.shards,
            samples=self.size,
            definition={
                "seed": 3, "shuffle": True, "drop_last": self.drop_last, "global_batch": self.batch,
                "mode": "exact", "dynamic_batch": None,
            },
            fingerprint={},
        )  # fmt: skip

    def planned(self) -> int:
        left = self.size - self.offset
        return 0 if self.drop_last and left < self.batch else min(self.batch, left)

    def commit(self, committers: list[Worker] | None = None, told: bool = True) -> None:
        """One step; those who did not commit themselves get its result from one who did."""
        planned = self.planned()
        step = self.step + 1
        skipped = self.skip(planned) if self.skips else 0
        if told:
            self.tell(
                events.StepCommitted,
                step=step,
                epoch=self.epoch,
                loss=1.0 / step,
                samples=planned - skipped,
                seconds=self.seconds,
                hash=self.hash(step) if step % self.audit_every == 0 else None,
                offset=self.offset,
                taken=planned,
                generation=self.generation,
            )
        for worker in self.members if committers is None else committers:
            if not self.supervised:
                break
            worker.step = step
            first = step if worker.pending is None else worker.pending[0]
            worker.pending = (first, step)
            if step % self.audit_every == 0:
                for shard in worker.shards:
                    self.tell(
                        events.ShardHashed, step=step, shard=shard, rank=worker.rank, hash=f"{step}.{shard}"
                    )
            if self.random.random() < 0.3:
                self.receipt(worker)
        self.advance(planned)

    def advance(self, planned: int) -> None:
        self.step, self.offset = self.step + 1, self.offset + planned
        if self.planned() == 0:
            self.epoch, self.offset = self.epoch + 1, 0

    def skip(self, planned: int) -> int:
        if self.random.random() > 0.2:
            return 0
        ids = Permutation(self.size, 3, self.epoch).take(self.offset, self.offset + planned).tolist()
        chosen = sorted({self.random.choice(ids) for _ in range(2)})
        for sample in chosen:
            self.tell(events.SampleSkipped, step=self.step, epoch=self.epoch, index=sample, reason="broken")
        return len(chosen)

    # trouble

    def kill(self) -> None:
        """Before any member has committed the open step."""
        self.lose(self.victims())

    def kill_inside(self) -> None:
        """Some have committed, some have not; who has hands it to the others."""
        victims = self.victims()
        survivors = [worker for worker in self.members if worker not in victims]
        if not survivors:
            return
        ahead = self.random.sample(survivors, self.random.randint(1, len(survivors)))
        self.commit(ahead + [worker for worker in victims if self.random.random() < 0.5])
        self.lose(victims)

    def kill_alone(self) -> None:
        """Only the first member has committed and told it, and dies: the others do the step again."""
        if len(self.members) < 2:
            return
        first = self.members[0]
        where = self.step, self.epoch, self.offset
        self.commit([first])
        if self.random.random() < 0.5:
            self.receipt(first)
        self.step, self.epoch, self.offset = where
        self.lose([first])
        skips, self.skips = self.skips, False
        self.commit(told=False)
        self.skips = skips

    def join_inside(self) -> None:
        """All stop for a joiner before the last result has come to every one of them."""
        if len(self.members) < self.workers + 2:
            self.commit_to_some()
            self.join()

    def leave_inside(self) -> None:
        if len(self.members) > 1:
            self.commit_to_some()
            self.leave()

    def commit_to_some(self) -> None:
        self.commit(self.random.sample(self.members, self.random.randint(1, len(self.members))))

    def join(self) -> None:
        free = sorted(set(range(self.workers + 2)) - {worker.rank for worker in self.members})
        if free:
            self.members = sorted([*self.members, self.worker(free[0])], key=lambda one: one.rank)
            self.view(f"worker {free[0]} joins")

    def leave(self) -> None:
        if len(self.members) > 1:
            # A member that has the last step stays.
            furthest = max(worker.step for worker in self.members)
            have = [worker for worker in self.members if worker.step == furthest]
            gone = self.random.choice([one for one in self.members if have != [one]])
            self.receipt(gone)
            self.members.remove(gone)
            self.view(f"worker {gone.rank} leaves")

    def restart_supervisor(self) -> None:
        self.tell(events.SupervisorStarted, pid=self.fresh_pid(), attempt=2, address="127.0.0.1:2")

    def all_die(self) -> None:
        """All workers at once: the supervisor goes back to the newest checkpoint."""
        for worker in self.members:
            self.failed(worker)
        self.members = [self.worker(rank) for rank in range(self.workers)]
        self.view("no member is left")
        self.go_back()

    def everything_dies(self) -> None:
        """The supervisor too; the run is started again."""
        self.time += 100.0
        self.tell(events.SupervisorStarted, pid=self.fresh_pid(), attempt=1, address="127.0.0.1:3")
        self.generation = 0
        self.members = [self.worker(rank) for rank in range(self.workers)]
        self.view("all workers came")
        self.go_back()

    def go_back(self) -> None:
        self.step, self.epoch, self.offset = self.saved
        for worker in self.members:
            worker.step = self.step
        self.tell(
            events.RunResumed, version=self.version, step=self.step, epoch=self.epoch, workers=self.workers
        )

    def victims(self) -> list[Worker]:
        count = self.random.randint(1, max(1, len(self.members) - 1))
        return self.random.sample(self.members, min(count, len(self.members) - 1))

    def lose(self, victims: list[Worker]) -> None:
        if not victims:
            return
        noticed = self.time
        for worker in victims:
            self.failed(worker)
        self.members = [worker for worker in self.members if worker not in victims]
        self.view("workers were lost")
        self.tell(
            events.Repaired,
            generation=self.generation,
            seconds=self.time - noticed,
            lost=[worker.rank for worker in victims],
        )
        if self.random.random() < 0.6:
            for worker in victims:
                self.members.append(self.worker(worker.rank))
            self.members.sort(key=lambda one: one.rank)
            self.view("replacements")

    # pieces

    def failed(self, worker: Worker) -> None:
        self.tell(
            events.WorkerFailed,
            rank=worker.rank,
            pid=worker.pid,
            phase=self.random.choice(["forward", "collective", "optimizer"]),
            reason="it was killed by SIGKILL",
            host="here",
            cause=self.random.choice(["crash", "hung", "memory", "raised"]),
        )

    def worker(self, rank: int) -> Worker:
        made = Worker(rank, self.fresh_pid())
        self.tell(events.WorkerStarted, rank=rank, pid=made.pid, host="here")
        return made

    def view(self, reason: str) -> None:
        self.generation += 1
        for worker in self.members:
            self.receipt(worker, self.generation - 1)
        shuffled = list(range(self.shards))
        self.random.shuffle(shuffled)
        for worker in self.members:
            worker.shards = ()
        for position, shard in enumerate(shuffled):
            worker = self.members[position % len(self.members)]
            worker.shards = tuple(sorted((*worker.shards, shard)))
        furthest = max(worker.step for worker in self.members)
        behind = [worker.rank for worker in self.members if worker.step < furthest]
        for worker in self.members:
            worker.step = self.step
        self.tell(
            events.ViewChanged,
            generation=self.generation,
            reason=reason,
            members=[worker.rank for worker in self.members],
            shards=[list(worker.shards) for worker in self.members],
            pids=[worker.pid for worker in self.members],
            hosts=["here"] * len(self.members),
            step=self.step,
            behind=behind,
        )

    def receipt(self, worker: Worker, generation: int | None = None) -> None:
        if worker.pending is None:
            return
        first, last = worker.pending
        worker.pending = None
        self.tell(
            events.StepsReceived,
            rank=worker.rank,
            pid=worker.pid,
            generation=self.generation if generation is None else generation,
            first=first,
            last=last,
            shards=list(worker.shards),
        )

    def save(self) -> None:
        self.version += 1
        self.saved = (self.step, self.epoch, self.offset)
        self.tell(
            events.CheckpointSaved,
            version=self.version,
            step=self.step,
            bytes=1000,
            stall=0.001,
            seconds=0.01,
        )

    def hash(self, step: int) -> str:
        return f"{step:064x}"

    def fresh_pid(self) -> int:
        self.pid += 1
        return self.pid

    def tell(self, kind: type[Event], **fields: object) -> None:
        self.time += self.seconds * self.random.uniform(0.2, 1.0) / 4
        self.journal.append(kind(time=self.time, **fields))
