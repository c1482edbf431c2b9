"""`paceline report`: a page about runs for people, and their checks for programs. Imports no torch."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import paceline
from paceline.cli.output import echo
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.monitor.run_checks import RunCheck
    from paceline.train.history import History
    from paceline.train.state.run_folder import RunFolder


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Folders of runs, or names below runs/; without one the newest there."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE.html", help="The page with charts.")
    ] = None,
    junit: Annotated[
        str | None,
        typer.Option("--junit", metavar="FILE.xml", help="The checks, for continuous integration."),
    ] = None,
    as_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE.json", help="The checks, as pytest-json-report writes tests."),
    ] = None,
) -> None:
    """Write a page about one or more runs, and what their journals prove as tests. Exit code 1 where a check
    failed. Without an option the page is report.html in the folder of the (first) run.

    Example: paceline report runs/20250301-120000-train -o report.html --junit checks.xml --json checks.json
    """
    from paceline.cli.run_choice import opened

    begun, created = time.monotonic(), time.time()
    folders = [opened(run) for run in runs] if runs else [opened(None)]
    looked = [_look(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    checks = [check for _, found in looked for check in found]
    if output is None and junit is None and as_file is None:
        output = str(folders[0].path / "report.html")
    if output is not None:
        _write_page(Path(output), folders, [history for history, _ in looked])
    if junit is not None:
        from paceline.monitor.check_documents import junit_xml

        _write(Path(junit), junit_xml(checks, created=created, host=platform.node()))
    if as_file is not None:
        from paceline.monitor.check_documents import pytest_json

        document = pytest_json(
            checks,
            created=created,
            duration=time.monotonic() - begun,
            root=os.getcwd(),
            environment={
                "Python": platform.python_version(),
                "Platform": platform.platform(),
                "Paceline": paceline.__version__,
            },
        )
        _write(Path(as_file), json.dumps(document, indent=1).encode() + b"\n")
    failed = [check for check in checks if check.outcome == "failed"]
    for check in failed:
        echo(f"failed {check.nodeid}: {check.text.partition(chr(10))[0]}")
    passed = sum(check.outcome == "passed" for check in checks)
    echo(f"{passed} of {counted(len(checks), 'check')} passed, {len(failed)} failed")
    if failed:
        raise typer.Exit(1)


def _look(folder: RunFolder, name: str) -> tuple[History, list[RunCheck]]:
    """Read a run's journal and its checkpoints."""
    from paceline.cli.audit import audited
    from paceline.core import journal
    from paceline.monitor.journal_history import history_of
    from paceline.monitor.run_checks import journal_checks
    from paceline.train.state.run_listing import look_at

    begun = time.monotonic()
    state = look_at(folder.path)
    found, damage = audited(folder)
    history = history_of(journal.iterate(folder.journal_file, on_damage=lambda bad: None), str(folder.path))
    checks = journal_checks(
        name,
        found,
        [f"byte {bad.offset}: {bad.reason}" for bad in damage],
        failure=state.reason if state.phase == "failed" else "",
        running=state.phase == "running",
        seconds=time.monotonic() - begun,
    )
    return history, checks + _verified(folder, name)


def _verified(folder: RunFolder, name: str) -> list[RunCheck]:
    """Read every byte of every version."""
    from paceline.checkpoint.store import CheckpointStore
    from paceline.core.errors import PacelineError
    from paceline.monitor.run_checks import RunCheck, checkpoint_checks

    settings = folder.recorded().get("checkpoint")
    url = settings.get("url") if isinstance(settings, dict) else None
    found: dict[int, tuple[list[str], float]] = {}
    try:
        store = CheckpointStore(url if isinstance(url, str) else folder.checkpoints)
        for version in store.versions():
            begun = time.monotonic()
            found[version] = [str(item) for item in store.verify(version)], time.monotonic() - begun
    except PacelineError as error:
        # Such as a store whose password was not recorded: nothing is known to be wrong.
        return [RunCheck(name, "checkpoint_verifies", "skipped", f"cannot be read here: {error.message}")]
    return checkpoint_checks(name, found)


def _names(folders: list[RunFolder]) -> list[str]:
    """Name runs by their folders, and by their paths where these are called alike."""
    names = [folder.path.name for folder in folders]
    return names if len({*names}) == len(names) else [str(folder.path) for folder in folders]


def _write_page(path: Path, folders: list[RunFolder], histories: list[History]) -> None:
    from paceline.monitor.report import write_report

    written = write_report(
        path,
        histories,
        _names(folders),
        heading=folders[0].path.name if len(folders) == 1 else "Training report",
        journals=[folder.path for folder in folders],
    )
    echo(f"wrote {written}")


def _write(path: Path, data: bytes) -> None:
    from paceline.train.history import writing

    with writing("report", path):
        path.write_bytes(data)
    echo(f"wrote {path}")
