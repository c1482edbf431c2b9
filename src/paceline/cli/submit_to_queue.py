"""`paceline submit` for engines that take no run over (ssh, mpi): a queue on this machine starts the run and
keeps it running, without the terminal. All of its workers are the engine's, so that nothing waits in it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, final

import typer

from paceline.cli.queue_request import new_request, run_name
from paceline.core.user_state import state_folder
from paceline.engines.batch import BatchSpec, BatchState, BatchStatus, NewLines, new_lines
from paceline.frontends.run_queue.queue_client import add_run, find_run, want
from paceline.frontends.run_queue.queue_folder import QueueFolder
from paceline.frontends.run_queue.queued_run import ENDED, QueueState
from paceline.frontends.run_queue.serving import start_server

_UNLIMITED: Final = 1_000_000  # workers: the engine's hosts are not the queue's to share
_STATES: Final[dict[QueueState, BatchState]] = {
    "waiting": "pending",
    "running": "running",
    "stopping": "running",
    "held": "stopped",
    "finished": "succeeded",
    "failed": "failed",
    "cancelled": "stopped",
}


@final
class QueueBatch:
    """A `BatchEngine` for one run. `words` are the script and the options of `paceline train`, without the
    number of nodes and the folder of the run, which the queue adds."""

    def __init__(self, words: Sequence[str], job: BatchSpec, run_dir: str | None = None) -> None:
        size = str(job.nodes * job.workers_per_node)
        env = [f"{name}={value}" for name, value in job.environment.items()]
        request = new_request(words, job.arguments, size, _UNLIMITED, env)
        where = "" if run_dir is None else str(Path(run_dir).absolute())
        self._request = replace(request, name=run_name(job.name, job.script), run_dir=where)

    def batch_text(self, job: BatchSpec) -> str:
        """Return the command that the queue would run."""
        request = self._request
        where = ["--run-dir", request.run_dir] if request.run_dir else []
        words = ["paceline", "train", *request.options, "--nodes", str(job.nodes), *where]
        return shlex.join([*words, *(["--", *request.arguments] if request.arguments else [])]) + "\n"

    def submit_batch(self, job: BatchSpec) -> str:
        folder = self._folder()
        folder.change(lambda content: replace(content, capacity=_UNLIMITED))
        run = add_run(folder, self._request)
        start_server(folder)
        how = f"paceline queue ls --queue {shlex.quote(str(folder.path))}"
        typer.echo(f"{run.label} is in a queue of this machine: {how}", err=True)
        return str(run.id)

    def batch_status(self, identifier: str) -> BatchStatus:
        run = find_run(self._folder().read(), identifier)
        return BatchStatus(_STATES[run.state], run.code if run.state == "failed" else None, run.reason)

    def batch_logs(self, identifier: str) -> NewLines:
        log = self._folder().log_of(int(identifier))
        return new_lines(lambda: {identifier: log.read_text(errors="replace") if log.exists() else ""})

    def stop_batch(self, identifier: str) -> None:
        folder = self._folder()
        if find_run(folder.read(), identifier).state not in ENDED:
            want(folder, identifier, "cancel")
            start_server(folder)

    @staticmethod
    def _folder() -> QueueFolder:
        return QueueFolder.at(str(state_folder() / "submitted"))
