"""The command line: one message per error, the right exit code, help with an example, no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer

import paceline
from paceline.cli import main
from paceline.core.errors import PeerLostError, UsageError


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def failing(error: BaseException) -> typer.Typer:
    """The real application's callback with one command, which raises."""
    app = typer.Typer(rich_markup_mode=None)
    app.callback(invoke_without_command=True)(main._main)

    @app.command("fail")
    def fail() -> None:
        raise error

    return app


def test_version():
    assert main.invoke(main.app, ["--version"]) == 0
    assert run("--version").stdout == f"paceline {paceline.__version__}\n"


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_names_the_commands_and_gives_an_example(capsys, args):
    assert main.invoke(main.app, args) == 0
    out = capsys.readouterr().out
    assert "info" in out
    assert "Example: paceline" in out


def test_every_command_has_help_with_an_example(capsys):
    def walk(command, path):
        for name in getattr(command, "commands", ()):
            yield from walk(command.get_command(None, name), [*path, name])
        yield path

    paths = list(walk(typer.main.get_command(main.app), []))
    assert ["checkpoint", "export"] in paths
    for path in paths:
        assert main.invoke(main.app, [*path, "--help"]) == 0
        assert "Example" in capsys.readouterr().out, path


def test_the_list_of_commands_imports_none_of_them_and_cuts_no_summary():
    code = "import sys; from paceline.cli import main; main.invoke(main.app); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed, _, modules = done.stdout.rstrip().rpartition("\n")
    assert "..." not in listed.partition("Commands:")[2]
    assert all(name in listed for name in main.Commands.table)
    ours = {name for name in modules.split() if name.startswith("paceline.cli.")}
    assert ours == {"paceline.cli.main"}


def test_a_mistyped_command_gets_a_suggestion(capsys):
    assert main.invoke(main.app, ["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_info_as_json_is_complete(capsys):
    assert main.invoke(main.app, ["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["paceline"] == paceline.__version__
    assert facts["packages"]["torch"].startswith("2.")
    assert facts["cores"]["cores_usable"] >= 1
    assert facts["memory"]["memory_total"] > 0
    assert facts["data_between_hosts"]["authenticated_by"] == "AES-256-GMAC"


def test_info_as_a_table(capsys):
    assert main.invoke(main.app, ["info"]) == 0
    out = capsys.readouterr().out
    assert "memory_total" in out
    assert "GiB" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--bogus"], "No such option: --bogus"),
        (["nonsense"], "No such command 'nonsense'"),
        (["info", "--bogus"], "No such option: --bogus"),
        (["info", "extra"], "unexpected extra argument"),
    ],
)
def test_bad_input_is_one_message_and_code_2(capsys, args, message):
    assert main.invoke(main.app, args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "--help" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("too many", remedy="use fewer"), 2, "error: too many\n  try: use fewer\n"),
        (PeerLostError("rank 1 is gone", rank=1, remedy="look"), 1, "error: rank 1 is gone\n  try: look\n"),
        (KeyboardInterrupt(), 130, ""),
        (typer.BadParameter("no such file"), 2, "no such file"),
        (ZeroDivisionError("oh"), 1, "error: unexpected ZeroDivisionError: oh\n  try: run it again as"),
    ],
)
def test_errors_are_one_message_and_a_code(capsys, error, code, message):
    assert main.invoke(failing(error), ["fail"]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(capsys):
    assert main.invoke(failing(UsageError("too many")), ["--debug", "fail"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: too many\n")


def test_a_group_without_a_command_shows_its_help(capsys):
    app = failing(UsageError("never"))
    app.add_typer(group := typer.Typer(no_args_is_help=True, rich_markup_mode=None), name="group")
    group.command("one", help="The first.")(lambda: None)
    group.command("two", help="The second.")(lambda: None)
    assert main.invoke(app, ["group"]) == 2
    captured = capsys.readouterr()
    assert "The second." in captured.err + captured.out


def test_a_reader_that_leaves_early_is_no_error():
    script = f"{sys.executable} -m paceline info --json | true"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
