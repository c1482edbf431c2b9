"""A run that is handed over to Ray's job submission: the head runs `paceline train`."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from paceline.control.spool import STOPPED_EXIT_CODE
from paceline.core.errors import UnavailableError, UsageError
from paceline.engines.batch import BatchState, BatchStatus
from paceline.engines.engine import EngineRequest
from paceline.engines.ray import ray_connection as connection
from paceline.engines.ray.ray_settings import LOCAL, RaySettings

_DASHBOARD_PORT: Final = 8265
# Of Ray, which takes the first of them that is set.
_VARIABLES: Final = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_STATES: Final[dict[str, BatchState]] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "STOPPED": "stopped",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
}


def dashboard_of(settings: RaySettings) -> str:
    """Return where the head's dashboard is, which takes jobs."""
    if settings.dashboard:
        return settings.dashboard
    address = settings.address
    if address in (None, "auto"):
        address = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "auto")
    if address.startswith(("http://", "https://")):
        return address
    if address in ("auto", LOCAL):
        return f"http://127.0.0.1:{_DASHBOARD_PORT}"
    host = urllib.parse.urlsplit(address if "://" in address else f"ray://{address}").hostname or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{_DASHBOARD_PORT}"


def check(settings: RaySettings) -> None:
    """Raise UnavailableError where no dashboard answers: nothing else of a cluster is needed to hand over."""
    _client(settings)


def submit(settings: RaySettings, request: EngineRequest) -> str:
    """Hand the run over; return Ray's submission id."""
    client = _client(settings)
    try:
        return str(client.submit_job(**request))
    except Exception as error:
        raise UnavailableError(
            f"Ray's dashboard at {dashboard_of(settings)} refused the job: {_first_line(error)}",
            remedy="check runtime_env and that the script's folder can be sent (working_dir)",
        ) from error


def status(settings: RaySettings, identifier: str) -> BatchStatus:
    info = _asked(settings, identifier, "get_job_info")
    return status_of(str(info.status.value), info.driver_exit_code, info.message or "")


def status_of(word: str, code: int | None, message: str) -> BatchStatus:
    """Return what became of a job, from Ray's word and the driver's exit code."""
    # A run that has saved and left at its time limit or by a signal, which is a failure to Ray.
    return BatchStatus("stopped" if code == STOPPED_EXIT_CODE else _STATES[word], code, message)


def log(settings: RaySettings, identifier: str) -> str:
    return str(_asked(settings, identifier, "get_job_logs"))


def stop(settings: RaySettings, identifier: str) -> None:
    _asked(settings, identifier, "stop_job")


def _asked(settings: RaySettings, identifier: str, question: str) -> Any:
    client = _client(settings)
    try:
        return getattr(client, question)(identifier)
    except RuntimeError as error:
        raise UsageError(
            f"Ray at {dashboard_of(settings)} does not know the job {identifier!r}: {_first_line(error)}",
            remedy="`ray job list` has the jobs of a cluster",
        ) from error


def _client(settings: RaySettings) -> Any:
    where = dashboard_of(settings)
    with connection.needing_ray():
        from ray.job_submission import JobSubmissionClient
    try:
        with _without_variables():
            return JobSubmissionClient(where)
    except Exception as error:
        raise UnavailableError(
            f"no Ray dashboard answers at {where}, which takes jobs: {_first_line(error)}",
            remedy="start the head with its dashboard (pip install 'paceline[ray]'; ray start --head), or "
            "give its address: Ray(dashboard='http://HEAD:8265')",
        ) from error


@contextmanager
def _without_variables() -> Iterator[None]:
    """Hide the addresses in the environment, which Ray takes instead of the one that it is given."""
    hidden = {name: os.environ.pop(name) for name in _VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
