"""The `paceline` command: puts the commands together and turns every error into one message and an exit code.

Exit codes: 0 done, 2 the caller's mistake, 130 interrupted, what the error itself says (a run that cannot be
asked: docs/runs.md), 1 anything else. Importing it must not import torch: commands import what they need when
they run.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer

import paceline
from paceline.cli import audit, bench, checkpoint, info, join, replay, run_control, simulate, train, verify
from paceline.core.errors import PacelineError, UsageError
from paceline.core.untrusted import printable

# Typer carries its own copy of click since 0.2x and used the real one before: these are whichever it uses.
_BadUsage = cast("type[Exception]", typer.BadParameter.__bases__[0])
_CommandError = cast("type[Exception]", _BadUsage.__bases__[0])


@dataclass
class CliState:
    """The options before the command."""

    debug: bool = False


app = typer.Typer(
    name="paceline",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Rich's help imports a Markdown parser and a syntax highlighter: 60 ms that every `--help` would pay.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order in which users need them.
app.command("train")(train.train)
app.command("status")(run_control.status)
app.command("scale")(run_control.scale)
app.command("join")(join.join)
app.command("stop")(run_control.stop)
app.command("audit")(audit.audit)
app.command("replay")(replay.replay)
app.command("verify")(verify.verify)
app.command("simulate")(simulate.simulate)
app.command("info")(info.info)
app.add_typer(bench.app, name="bench")
app.add_typer(checkpoint.app, name="checkpoint")


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
    if state.debug:
        traceback.print_exception(error)
    # Where it was raised, and what was saved.
    notes = getattr(error, "__notes__", ()) if isinstance(error, PacelineError) else ()
    print(printable("\n".join([f"error: {message}", *map(str, notes)])), file=sys.stderr)
    return code
