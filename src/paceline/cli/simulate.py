"""`paceline simulate`: run the supervisor's machine under thousands of simulated faults. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.output import AsJson, echo_json
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.elastic.simulation.campaign import Campaign, ScheduleOutcome


def simulate(
    workers: Annotated[int, typer.Option(help="Workers of each simulated job.", min=1)] = 8,
    schedules: Annotated[int, typer.Option(help="How many schedules of faults to run.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the first schedule; the next ones count up.")] = 1,
    replay: Annotated[int | None, typer.Option(help="Run the schedule of this seed only.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print all that happens in it.")] = False,
    processes: Annotated[int, typer.Option(help="Processes that share the schedules.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Run the supervisor's machine under a virtual clock and a simulated network, and check its promises.

    Workers crash, hang, slow down and come back, lines are cut, machines come and go, the supervisor
    restarts. Exit code 1 when a promise is broken; the seed that broke it replays to the same trace. Ctrl-C
    ends it with the figures so far.

    Example: paceline simulate --workers 8 --schedules 1000 --seed 1
    """
    if replay is not None or trace:
        raise typer.Exit(replay_schedule(seed if replay is None else replay, workers, trace, as_json))
    from paceline.elastic.simulation.campaign import run_schedules

    shown = CampaignProgress(schedules) if not as_json and sys.stderr.isatty() else None
    campaign = run_schedules(workers, schedules, seed, processes, progress=shown)
    if shown is not None:
        typer.echo("\r\033[K", nl=False, err=True)
    if as_json:
        echo_json(facts(campaign))
    else:
        typer.echo(text(campaign))
    raise typer.Exit(1 if campaign.violations else 0)


def facts(campaign: Campaign) -> dict[str, Any]:
    """Return what is printed as JSON."""
    return {
        "workers": campaign.workers,
        "schedules": campaign.schedules,
        "interrupted": campaign.interrupted,
        "first_seed": campaign.first_seed,
        "processes": campaign.processes,
        "seconds": round(campaign.seconds, 3),
        "schedules_per_minute": round(campaign.per_minute, 1),
        "schedules_per_core_minute": round(campaign.per_core_minute, 1),
        "events": campaign.events,
        "decisions": campaign.decisions,
        "views": campaign.views,
        "virtual_seconds": round(campaign.virtual_seconds, 1),
        "finished": campaign.finished,
        "faults": dict(campaign.faults.most_common()),
        "violations": campaign.violations,
        "failing": [
            {"seed": bad.seed, "violations": list(bad.violations), "replay": _again(bad)}
            for bad in campaign.failing
        ],
    }


def text(campaign: Campaign) -> str:
    """Return what is printed for people."""
    lines = [
        *(["interrupted: these are the figures so far"] if campaign.interrupted else []),
        f"{counted(campaign.schedules, 'schedule')} of {counted(campaign.workers, 'worker')} in "
        f"{campaign.seconds:.1f} s: "
        f"{campaign.per_minute:.0f} a minute, {campaign.per_core_minute:.0f} a minute of one core",
        f"{counted(campaign.events, 'event')}, {counted(campaign.decisions, 'decision')}, "
        f"{counted(campaign.views, 'view')}, "
        f"{campaign.virtual_seconds / 3600:.1f} virtual hours",
        f"{counted(campaign.finished, 'job')} came to the end, {campaign.schedules - campaign.finished} "
        "failed or were broken off",
        "faults:",
    ]
    width = max((len(kind) for kind in campaign.faults), default=0)
    lines += [f"  {kind:<{width}}  {count}" for kind, count in campaign.faults.most_common()]
    lines.append(f"violations: {campaign.violations}")
    for bad in campaign.failing:
        lines.append(f"  seed {bad.seed}: {bad.violations[0]}")
        lines.append(f"    again: {_again(bad)}")
    return "\n".join(lines)


def replay_schedule(seed: int, workers: int, trace: bool, as_json: bool) -> int:
    from paceline.elastic.simulation.campaign import run

    outcome = run(seed, workers, tracer=typer.echo if trace else None)
    if as_json:
        echo_json(asdict(outcome))
    else:
        faults = counted(len(outcome.faults), "fault")
        typer.echo(f"seed {seed}, {counted(workers, 'worker')}: {faults}")
        for fault in outcome.faults:
            typer.echo(f"  {fault}")
        events, views = counted(outcome.events, "event"), counted(outcome.views, "view")
        typer.echo(f"{events}, {views}, {outcome.virtual_seconds:.1f} virtual s")
        typer.echo(f"ended: {outcome.ended or 'no'}")
        typer.echo(f"digest: {outcome.digest:08x}")
        typer.echo(f"violations: {len(outcome.violations)}")
        for violation in outcome.violations:
            typer.echo(f"  {violation}")
    return 1 if outcome.violations else 0


def _again(outcome: ScheduleOutcome) -> str:
    return f"paceline simulate --workers {outcome.workers} --replay {outcome.seed} --trace"


class CampaignProgress:
    """A line on the terminal that is overwritten a few times a second."""

    def __init__(self, schedules: int) -> None:
        self._schedules = schedules
        self._next = 0.0

    def __call__(self, campaign: Campaign) -> None:
        if campaign.seconds >= self._next:
            self._next = campaign.seconds + 0.2
            total = counted(self._schedules, "schedule")
            violations = counted(campaign.violations, "violation")
            done = f"{campaign.schedules:,} of {total}, {campaign.per_minute:.0f} a minute, {violations}"
            typer.echo(f"\r\033[K{done}", nl=False, err=True)
