"""`paceline submit --wait`: show what a run that was handed over writes and waits for, until it is over."""

from __future__ import annotations

from typing import Final

import typer

from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import CommTimeoutError, PacelineError, PeerLostError, UnavailableError
from paceline.core.untrusted import printable
from paceline.engines.batch import BatchEngine, BatchStatus

_POLL_SECONDS: Final = 1.0
_AWAY_SECONDS: Final = 600.0  # after which an engine that does not answer is asked no more


def follow(engine: BatchEngine, identifier: str, clock: Clock | None = None) -> int:
    """Show the log of a run, and what it waits for, until it is over; return its exit code."""
    clock = clock or MonotonicClock()
    new_lines = engine.batch_logs(identifier)
    has_run, told = False, ""
    answered_at = clock.now()
    try:
        while True:
            try:
                status = engine.batch_status(identifier)
                has_run |= status.state == "running"
                # A pod that was drained takes what was known of its run along.
                is_over = status.is_over and not (status.never_ran and has_run)
                answered_at = clock.now()
                # An engine gives a long log in parts. The rest of a log that grows comes with the next look.
                while lines := new_lines(is_over):
                    for line in lines:
                        typer.echo(printable(line))
                    if not is_over:
                        break
            except (UnavailableError, CommTimeoutError) as error:
                # The run does not need this terminal, nor what is asked about it.
                if clock.now() - answered_at > _AWAY_SECONDS:
                    error.add_note(f"{identifier} may run on; it is not waited for")
                    raise
                told = _say(f"{error.message}; it is asked again", told)
            else:
                if is_over:
                    break
                waits = status.state != "running" and bool(status.reason)
                told = _say(f"{identifier} waits: {status.reason}" if waits else "", told)
            clock.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        typer.echo(f"{identifier} runs on; it is not waited for", err=True)
        raise
    if status.state == "succeeded":
        return 0
    if status.code:
        typer.echo(f"{identifier} {status.state}: {printable(status.reason)}", err=True)
        return status.code if status.code > 0 else 128 - status.code  # of a signal, as shells number it
    raise _without_code(engine, identifier, status, has_run)


def _say(text: str, told: str) -> str:
    """Print what is not empty and was not told last; return it."""
    if text and text != told:
        typer.echo(printable(text), err=True)
    return text


def _without_code(engine: BatchEngine, identifier: str, status: BatchStatus, has_run: bool) -> PacelineError:
    """Return the error of a run that ended without an exit code; one that never ran is deleted, as the
    engine would try it for ever."""
    reason, _, remedy = status.reason.partition("\n  try: ")
    found = PeerLostError(
        f"{identifier} {status.state}: {printable(reason) or 'the engine gives no reason'}",
        remedy=printable(remedy) or "see its log above and what the engine says about it",
    )
    if status.state == "failed" and not has_run:
        try:
            engine.stop_batch(identifier)
        except PacelineError as error:
            found.add_note(f"{identifier} is still there: {error}")
    return found
