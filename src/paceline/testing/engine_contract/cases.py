"""The cases of the contract; see the package."""

from __future__ import annotations

import contextlib
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar, final

from paceline.core import events, journal
from paceline.engines.engine import Engine
from paceline.testing.engine_contract.lab import EngineLab

PATIENCE_SECONDS: Final = 90.0
_PROGRAM: Final = (sys.executable, "-m", "paceline.testing.engine_contract.run")

E = TypeVar("E", bound=events.Event)


def check_faults(lab: EngineLab, folder: Path, nodes: int = 2, workers_per_node: int = 2) -> ContractRun:
    """Kill a worker, kill an agent, lose a node, add a node, in one run. Returns the run, for more checks."""
    expected = undisturbed_hash(folder)
    with ContractRun.started(lab, folder / "run", lab.engine(nodes, workers_per_node)) as run:
        full = nodes * workers_per_node
        run.until_size(full)
        first, last = run.nodes[0], run.nodes[-1]

        before = run.view
        lab.kill_process(last, before.pids[before.hosts.index(last)])
        run.until_size(full, after=before.generation)

        before = run.view
        lab.kill_agent(run.nodes[-1])
        run.until_size(full - workers_per_node, after=before.generation)
        run.until_size(full, after=run.view.generation)

        before = run.view
        lost = next(node for node in run.nodes if node != first) if nodes > 1 else first
        lab.lose_node(lost)
        run.until(lambda: lost not in run.view.hosts, f"the view is without {lost}")
        progress = run.last_step
        run.until(lambda: run.last_step > progress + 1, f"training goes on without {lost}")
        if not lab.has_spare_node:
            before = run.view
            assert len(before.members) == full - workers_per_node, before
        lab.add_node()
        run.until_size(full, after=before.generation)

        assert run.finish() == expected
        run.check_once()
    assert not lab.left_running(), lab.left_running()
    return run


def check_stop_and_resume(lab: EngineLab, folder: Path, nodes: int = 2, other_nodes: int = 3) -> ContractRun:
    """Stop a run, see that its agents' lines came and nothing is left, and resume it on another number of
    nodes."""
    expected = undisturbed_hash(folder)
    with ContractRun.started(lab, folder / "run", lab.engine(nodes, 1)) as run:
        run.until_size(nodes)
        run.until(lambda: run.last_step >= 3, "a few steps")
        run.process.send_signal(signal.SIGTERM)
        output, _ = run.process.communicate(timeout=PATIENCE_SECONDS)
        assert run.process.returncode == 75, (run.process.returncode, output)
    shown = set(re.findall(r"^\[([^\]]+)\] .*joined the job", run.output, re.MULTILINE))
    assert len(shown) >= nodes, f"the lines of {nodes} agents are to be shown: {run.output}"
    assert not lab.left_running(), lab.left_running()
    with ContractRun.started(lab, folder / "run", lab.engine(other_nodes, 1), resume="auto") as run:
        run.until_size(other_nodes)
        assert run.finish() == expected
        run.check_once()
    assert not lab.left_running(), lab.left_running()
    return run


def check_caller_killed(lab: EngineLab, folder: Path, nodes: int = 2) -> ContractRun:
    """SIGKILL the caller: the supervisor has the run saved, all agents end, and another start goes on."""
    expected = undisturbed_hash(folder)
    with ContractRun.started(lab, folder / "run", lab.engine(nodes, 1)) as run:
        run.until_size(nodes)
        run.until(lambda: run.last_step >= 3, "a few steps")
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not lab.left_running(), "agents end when the caller is gone")
    with ContractRun.started(lab, folder / "run", lab.engine(nodes, 1), resume="auto") as run:
        assert run.finish() == expected
        run.check_once()
    assert not lab.left_running(), lab.left_running()
    return run


def undisturbed_hash(folder: Path) -> str:
    """Train in one process without a supervisor; return the hash."""
    gate = folder / "open"
    gate.touch()
    program = [*_PROGRAM, str(folder / "undisturbed"), str(gate), "-"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> float:
    """Wait for a condition; return the seconds, TimeoutError where it is not met."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(what)
        time.sleep(0.01)
    return time.monotonic() - begun


@final
class ContractRun:
    """A run on an engine under way, and what its journal says."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, gate: Path) -> None:
        self.process, self.folder, self._gate = process, folder, gate
        self.output = ""
        self._events: list[events.Event] = []
        self._offset = 0

    @classmethod
    @contextlib.contextmanager
    def started(cls, lab: EngineLab, folder: Path, engine: Engine, resume: str = "") -> Iterator[ContractRun]:
        """Start the caller's process; it is killed at the end where it still runs."""
        gate, settings, log = folder.with_name("gate"), folder.with_name("engine"), folder.with_name("log")
        gate.unlink(missing_ok=True)
        settings.write_bytes(pickle.dumps(engine))
        begun = folder / "journal.jsonl"
        offset = begun.stat().st_size if begun.exists() else 0
        with log.open("w") as errors:
            command = [*_PROGRAM, str(folder), str(gate), str(settings), *([resume] if resume else [])]
            process = lab.start(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            run = cls(process, folder, gate)
            run._offset = offset
            try:
                yield run
            except BaseException as error:
                error.add_note(f"the caller's log:\n{log.read_text()[-6000:]}")
                raise
            finally:
                run.output = log.read_text()
                if process.poll() is None:
                    process.kill()
                process.communicate()

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of a kind, of this start of the run."""
        file = self.folder / "journal.jsonl"
        if file.exists():
            chunk = journal.read(file, self._offset)
            self._events += chunk.events
            self._offset = chunk.offset
        return [event for event in self._events if isinstance(event, kind)]

    @property
    def view(self) -> events.ViewChanged:
        return self.of(events.ViewChanged)[-1]

    @property
    def nodes(self) -> list[str]:
        """The nodes of the present view, in the order of their first ranks."""
        return list(dict.fromkeys(self.view.hosts))

    @property
    def last_step(self) -> int:
        return max((event.step for event in self.of(events.StepCommitted)), default=0)

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for a condition; return the seconds."""

        def is_met() -> bool:
            if not condition() and self.process.poll() is not None:
                raise AssertionError(f"{what}: the run ended with code {self.process.returncode}")
            return condition()

        try:
            return wait_until(is_met, what)
        except TimeoutError as error:
            error.add_note(f"the last views: {self.of(events.ViewChanged)[-3:]}")
            raise

    def until_size(self, workers: int, after: int = 0) -> float:
        """Wait for a view of that many workers, of a later generation, that has taken a step."""

        def is_there() -> bool:
            views = self.of(events.ViewChanged)
            if not views or views[-1].generation <= after or len(views[-1].members) != workers:
                return False
            return self.last_step > views[-1].step

        return self.until(is_there, f"a view of {workers} workers")

    def finish(self) -> str:
        """Let the run go to its end; return the hash that it printed."""
        self._gate.touch()
        printed, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        assert self.process.returncode == 0, (self.process.returncode, printed)
        return printed.split()[-1]

    def check_once(self) -> None:
        """Check that every sample was applied exactly once."""
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "audit", str(self.folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
