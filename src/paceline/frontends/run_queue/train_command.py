"""The command that starts a run of the queue: `paceline train`, continued from what is saved."""

from __future__ import annotations

from paceline.frontends.run_queue.queued_run import RunRequest


def train_command(request: RunRequest, workers: int, shards: int | None = None) -> list[str]:
    """Return the words. The run is made for the most workers that it may have, so that what comes out does
    not depend on how many were free; `shards`: those that it has already, which it cannot outgrow."""
    most = request.most if shards is None else max(request.least, min(request.most, shards))
    return [
        *(request.python, "-m", "paceline", "train", *request.options),
        *_size(request, workers),
        *("--min-workers", str(request.least)),
        *("--set", f"fault_tolerance.max_workers={most}"),
        *("--run-dir", request.run_dir, "--resume", "auto"),
        *(("--", *request.arguments) if request.arguments else ()),
    ]


def _size(request: RunRequest, workers: int) -> tuple[str, str]:
    # An engine's nodes have a number of workers each, which `--workers-per-node` among the options says.
    return ("--nodes", str(workers // request.per_node)) if request.per_node else ("--workers", str(workers))
