"""A run that is handed over to Ray's job submission: the head runs `paceline train`."""

from __future__ import annotations

import http
import os
import re
import secrets
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
# Of Ray's client, which raises it as RuntimeError.
_ANSWER: Final = re.compile(r"Request failed with status code (\d+)")
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
    """Hand the run over; return Ray's submission id. Where Ray's answer does not come, stop what it may have
    begun."""
    client = _client(settings)
    identifier = f"paceline-{secrets.token_hex(8)}"
    where = f"Ray's dashboard at {dashboard_of(settings)}"
    try:
        return str(client.submit_job(**request, submission_id=identifier))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_stop_unanswered(client, settings, identifier)) from None
    except Exception as error:
        if not _is_unanswered(error):
            raise UnavailableError(
                f"{where} refused the job: {_reason(error)}",
                remedy="check runtime_env and that the script's folder can be sent (working_dir)",
            ) from error
        unanswered = UnavailableError(
            f"{where} did not say whether it takes the job: {_reason(error)}",
            remedy="see that the head runs, and that what is between here and there lets long requests pass",
        )
        unanswered.add_note(_stop_unanswered(client, settings, identifier))
        raise unanswered from error


def _is_unanswered(error: Exception) -> bool:
    """Return whether a request may have been carried out although this came of it."""
    code = _status(error)
    # What the package requests raises has a request, other errors precede one.
    return code >= http.HTTPStatus.INTERNAL_SERVER_ERROR if code else hasattr(error, "request")


def _status(error: BaseException) -> int:
    """Return the status of HTTP that an error names; 0: none."""
    found = _ANSWER.match(str(error)) if isinstance(error, RuntimeError) else None
    return int(found.group(1)) if found is not None else 0


def _stop_unanswered(client: Any, settings: RaySettings, identifier: str) -> str:
    """Stop the job of a request that was not answered; return what is known of it."""
    known = "whether it was taken is not known"
    try:
        if client.stop_job(identifier):
            return f"job {identifier} was taken all the same, and is stopped"
    except (RuntimeError, OSError, ValueError, KeyboardInterrupt) as error:
        if _status(error) == http.HTTPStatus.NOT_FOUND:
            known = "Ray does not know it now"
    command = f"ray job stop --address {dashboard_of(settings)} {identifier}"
    return f"job {identifier}: {known}; `{command}` ends it"


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
    where = f"Ray at {dashboard_of(settings)}"
    try:
        return getattr(client, question)(identifier)
    except (RuntimeError, OSError, ValueError) as error:  # of Ray's client, of requests, of what is not JSON
        code, reason = _status(error), _reason(error)
        if code == http.HTTPStatus.NOT_FOUND:
            raise UsageError(
                f"{where} does not know the job {identifier!r}: {reason}",
                remedy="`ray job list` has the jobs of a cluster",
            ) from error
        if 0 < code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UsageError(
                f"{where} refuses what is asked about the job {identifier!r}: {reason}",
                remedy="see that `paceline submit` or `ray job submit` made the job",
            ) from error
        raise UnavailableError(
            f"{where} cannot be asked about the job {identifier!r}: {reason}",
            remedy="see whether the head and its dashboard are up, and ask again",
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
            f"no Ray dashboard answers at {where}, which takes jobs: {_reason(error)}",
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


def _reason(error: Exception) -> str:
    """Return an error's first line; of a traceback that the dashboard sends, its last one."""
    text = str(error).rstrip(". \n") or type(error).__name__  # Ray ends what it quotes with a full stop
    first, *more = text.strip().splitlines()
    return first.partition("Traceback")[0] + more[-1] if more and "Traceback" in first else first
