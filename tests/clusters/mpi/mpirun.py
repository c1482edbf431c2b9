"""Runs under mpirun for tests: the program of the engines' contract, on the ranks of one mpirun."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import psutil
from tests.waiting import wait_for

from paceline.engines.mpi.mpi_engine import Mpi
from paceline.testing.engine_contract.cases import ContractRun

ROOT: Final = Path(__file__).parents[3]
MARK: Final = "PACELINE_TEST_MPIRUN"
_PROGRAM: Final = (sys.executable, "-m", "paceline.testing.engine_contract.run")


def find_mpirun(version: str) -> str:
    """Return the path of an mpirun of Open MPI with this first number; empty where there is none."""
    for candidate in (str(Path(sys.executable).parent / "mpirun"), "/usr/bin/mpirun", "mpirun"):
        path = shutil.which(candidate)
        if path is None:
            continue
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if f"(Open MPI) {version}." in shown:
            return path
    return ""


@final
class MpiRun:
    """A run on the ranks of an mpirun: what it does is in its journal, what it says in its log."""

    def __init__(
        self,
        folder: Path,
        mpirun: str,
        *options: str,
        ranks: int,
        resume: str = "",
        program: Sequence[str] = (),
    ) -> None:
        self._mark, self._log = uuid.uuid4().hex, folder / "log"
        self._gate = gate = folder / "gate"
        settings = folder / "engine"
        gate.unlink(missing_ok=True)
        settings.write_bytes(pickle.dumps(Mpi()))
        arguments = [str(folder / "run"), str(gate), str(settings), *([resume] if resume else [])]
        self._program = list(program) or [*_PROGRAM, *arguments]
        command = [mpirun, "--allow-run-as-root", "--oversubscribe", *options, "-n", str(ranks)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", MARK: self._mark}
        self._printed = folder / "printed"
        with self._log.open("w") as log, self._printed.open("w") as printed:
            self.process = subprocess.Popen(
                [*command, *self._program],
                env=environment, cwd=ROOT, stdout=printed, stderr=log, text=True,
            )  # fmt: skip
        self.events = ContractRun(self.process, folder / "run", gate)

    @property
    def log(self) -> str:
        """What it wrote, and what mpirun itself says."""
        return self._log.read_text() + self._printed.read_text()

    def processes(self) -> list[psutil.Process]:
        """Return all that mpirun has started, workers included: they have the mark in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # it has ended, or is not ours
        return found

    def kill_rank(self, rank: int) -> None:
        """SIGKILL the process of a rank, which runs the script."""
        (process,) = (
            process
            for process in self.processes()
            if process.environ().get("OMPI_COMM_WORLD_RANK") == str(rank)
            and process.cmdline()[1:] == self._program[1:]
        )
        process.send_signal(signal.SIGKILL)

    def finish(self) -> list[str]:
        """Let the run go to its end; return the hash that every rank printed."""
        self._gate.touch()
        self.process.wait(timeout=120)
        assert self.process.returncode == 0, (self.process.returncode, self.log)
        # mpirun may put the lines of two ranks behind each other.
        return re.findall("hash ([0-9a-f]{64})", self._printed.read_text())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(timeout=60)
        wait_for(lambda: not self.processes(), "nothing is left running")


@contextmanager
def mpi_run(
    folder: Path, mpirun: str, *options: str, ranks: int, resume: str = "", program: Sequence[str] = ()
) -> Iterator[MpiRun]:
    """Start a run; end what is left of it, and see that it is gone. `program`: in place of the contract's
    own, which gets `resume`."""
    run = MpiRun(folder, mpirun, *options, ranks=ranks, resume=resume, program=program)
    try:
        yield run
    except BaseException as error:
        error.add_note(f"the log of mpirun:\n{run.log[-6000:]}")
        raise
    finally:
        run.close()
