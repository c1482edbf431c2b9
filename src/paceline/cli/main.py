"""The `paceline` command: puts the commands together and turns every error into one message and an exit code.

Exit codes: 0 done, 2 the caller's mistake, 130 interrupted, what the error itself says (a run that cannot be
asked: docs/runs.md), 1 anything else. Importing it must not import torch: commands import what they need when
they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import typer
from typer.core import TyperCommand, TyperGroup

import paceline
from paceline.core.errors import PacelineError, UsageError

_COMPLETING = "_PACELINE_COMPLETE"  # set by the script of `paceline completion`

# Typer carries its own copy of click since 0.2x and used the real one before: these are whichever it uses.
_BadUsage = cast("type[Exception]", typer.BadParameter.__bases__[0])
_CommandError = cast("type[Exception]", _BadUsage.__bases__[0])


class CliState:
    """The options before the command."""

    debug: bool = False


class LazyCommand(NamedTuple):
    """Where a command is: `module:name` of a function or of a `Typer`, and what the list of commands says."""

    home: str
    summary: str


class Commands(TyperGroup):
    """The commands, in the order in which users need them. A command is imported when it is named: help needs
    only names and summaries."""

    table: ClassVar[Mapping[str, LazyCommand]] = {
        name: LazyCommand(f"paceline.cli.{home}", summary)
        for name, home, summary in (
            ("init", "init:init", "Write a project to begin with: settings, train.py, README."),
            ("train", "train:train", "Run a training script with these settings."),
            ("submit", "submit:submit", "Hand a run over to SLURM, Kubernetes, Ray or another engine."),
            ("run", "run:app", "Start a script on every rank, in place of torchrun."),
            ("tune", "tune:app", "Search for good parameters of a script, many trials at once."),
            ("queue", "queue:app", "Queue runs over workers that they share; priorities, preemption."),
            ("ls", "runs:list_runs", "List runs: state, steps, loss, size, age."),
            ("monitor", "monitor:monitor", "Watch a run in the terminal, or look at a finished one."),
            ("status", "run_control:status", "Show what a run and its workers are doing."),
            ("logs", "logs:logs", "Print and follow the logs of a run's workers."),
            ("scale", "run_control:scale", "Give a run more or fewer workers while it trains."),
            ("join", "join:join", "Add this machine's workers to a job."),
            ("stop", "run_control:stop", "Have a run finish its step, save, and end."),
            ("gc", "runs:gc", "Delete old runs; shows them first."),
            ("report", "run_report:report", "Write a page about runs, and their checks as JUnit and JSON."),
            ("audit", "audit:audit", "Prove that each step and each sample counted once."),
            ("replay", "replay:replay", "Compute one shard's gradient again and compare its hash."),
            ("verify", "verify:verify", "Compute steps of a run again and compare the numbers."),
            ("simulate", "simulate:simulate", "Check the protocol under simulated faults."),
            ("doctor", "doctor:doctor", "Check this machine, its folders and the links to others."),
            ("info", "info:info", "Show versions, cores, memory and limits of this machine."),
            ("bench", "bench:app", "Measure this machine."),
            ("checkpoint", "checkpoint:app", "List, verify, compare, tag and export checkpoints."),
            ("completion", "completion:completion", "Print the script for completion in a shell."),
        )
    }

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Empty commands stand in for those that are not imported: typer lists and suggests their names.
        self.commands.update({name: TyperCommand(name) for name in self.table})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command itself, or None for an unknown name."""
        return _load(cmd_name, self.table[cmd_name]) if cmd_name in self.table else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands; the inherited method would import each of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.table.items()])


def _load(name: str, command: LazyCommand) -> TyperCommand | TyperGroup:
    """Import a command and build its parameters from the signature."""
    module, _, attribute = command.home.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name)(found)
        found = alone
    built = typer.main.get_command(found)
    assert isinstance(built, TyperCommand | TyperGroup)
    return built


app = typer.Typer(
    name="paceline",
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Rich's help imports a Markdown parser and a syntax highlighter: 60 ms that every `--help` would pay.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train models on many workers so that a failure leaves no trace.

    Example: paceline info --json
    """
    ctx.ensure_object(CliState).debug = debug
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def run(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit; the entry point of the script `paceline`."""
    sys.exit(invoke(app, argv))


def invoke(command: typer.Typer, argv: Sequence[str] | None = None) -> int:
    """Run `command` with these arguments and return its exit code; errors are printed, never raised."""
    state = CliState()
    if _COMPLETING in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()  # else typer answers as click would, which its scripts do not understand
    try:
        args = list(sys.argv[1:] if argv is None else argv)
        result = command(args, prog_name="paceline", standalone_mode=False, obj=state)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except PacelineError as error:
        code = getattr(error, "exit_code", 2 if isinstance(error, UsageError) else 1)
        return _fail(str(error), error, state, code)
    except _BadUsage as error:
        return _bad_usage(error, state)
    except _CommandError as error:
        return _fail(cast(Any, error).format_message(), error, state, 1)
    except (KeyboardInterrupt, typer.Abort) as error:
        if str(error):
            print(error, file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has seen enough (`paceline info | head -1`); what is still buffered goes nowhere, else
        # Python complains once more at exit.
        sys.stdout = None
        return 1
    except PermissionError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        remedy = "\n  try: check its permissions, run the command as its owner, or choose another place"
        return _fail(f"{where}{error.strerror or error}{remedy}", error, state, 1)
    except Exception as error:
        remedy = (
            "" if state.debug else "\n  try: run it again as `paceline --debug ...` and report what it prints"
        )
        return _fail(f"unexpected {type(error).__name__}: {error}{remedy}", error, state, 1)


def _bad_usage(error: Exception, state: CliState) -> int:
    ctx = getattr(error, "ctx", None)
    message = cast(Any, error).format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return 2
    path = ctx.command_path if ctx is not None else "paceline"
    return _fail(f"{message}\n  try: {path} --help", error, state, 2)


def _fail(message: str, error: BaseException, state: CliState, code: int) -> int:
    # Imported here because `--help` must not wait for them.
    from paceline.core.untrusted import printable

    if state.debug:
        import traceback

        traceback.print_exception(error)
    # Where it was raised, and what was saved.
    notes = getattr(error, "__notes__", ()) if isinstance(error, PacelineError) else ()
    print(printable("\n".join([f"error: {message}", *map(str, notes)])), file=sys.stderr)
    return code
