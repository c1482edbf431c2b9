"""`paceline checkpoint`: list, show, verify, compare, tag and export the checkpoints of a run.

Imports torch only where tensors are read: listing and verifying need none.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.output import AsJson, complete_run, echo, echo_json, size_text
from paceline.core.errors import UsageError
from paceline.core.untrusted import printable
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.checkpoint.compare import CheckpointDiff
    from paceline.checkpoint.manifest import CheckpointDamage, CheckpointManifest
    from paceline.checkpoint.store import CheckpointStore

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

_WHERE = "A run's folder, its name below runs/, or the folder or URL of its checkpoints"
RunOrCheckpoints = Annotated[str, typer.Argument(help=f"{_WHERE}.", autocompletion=complete_run)]
OptionalRunOrCheckpoints = Annotated[
    str | None,
    typer.Argument(
        help=f"{_WHERE}; without one the newest run below runs/.",
        autocompletion=complete_run,
        show_default=False,
    ),
]
Which = Annotated[str, typer.Argument(help="A version, a tag, 'latest' or 'best'.")]


@app.callback()
def checkpoint() -> None:
    """List, verify, compare, tag and export the checkpoints of a run.

    Example: paceline checkpoint ls runs/20250301-120000-train
    """


@app.command("ls")
def list_all(run: OptionalRunOrCheckpoints = None, as_json: AsJson = False) -> None:
    """List the checkpoints, oldest first. Files are not verified. Exit code 1 when there are some and none
    can be listed.

    Example: paceline checkpoint ls s3://bucket/run/checkpoints --json
    """
    store = open_store(run)
    damage: list[CheckpointDamage] = []
    manifests = store.manifests(damage.append)
    tags = store.tags()
    if as_json:
        echo_json([_plain(manifest, tags) for manifest in manifests])
    else:
        _print_list(manifests, tags)
    for item in damage:
        echo(f"{item.kind}: {item}", err=True)
    if damage and not manifests:
        raise typer.Exit(1)


@app.command()
def show(run: OptionalRunOrCheckpoints = None, which: Which = "latest", as_json: AsJson = False) -> None:
    """Verify one checkpoint and show what it holds: moment, metrics, files, tensors and state.

    Example: paceline checkpoint show runs/20250301-120000-train best
    """
    store = open_store(run)
    opened = store.open(which)
    tensors = opened.tensors()

    from paceline.checkpoint.compare import describe

    facts = _plain(opened.manifest, store.tags())
    if as_json:
        facts["tensors"] = {name: describe(tensor) for name, tensor in tensors.items()}
        facts["state"] = sorted(opened.state)
        echo_json(facts)
        return
    for name, value in facts.items():
        if name != "files":
            echo(f"{name}: {_shown(value)}")
    echo("files:")
    for file in opened.manifest.files:
        echo(f"  {file.name}  {size_text(file.nbytes)}  xxh3_128 {file.checksum}")
    echo(f"state: {', '.join(sorted(opened.state)) or 'empty'}")
    echo(f"tensors: {len(tensors)}")
    for name, tensor in tensors.items():
        echo(f"  {name}  {describe(tensor)}")


@app.command()
def verify(
    run: OptionalRunOrCheckpoints = None,
    which: Annotated[str | None, typer.Argument(help="Only this one; else all of them.")] = None,
) -> None:
    """Read every byte and compare it with the checksums; exit code 1 when something is damaged
    or cannot be read.

    Example: paceline checkpoint verify runs/20250301-120000-train
    """
    store = open_store(run)
    damage = store.verify(which)
    for item in damage:
        echo(f"{item.kind}: {item}")
    if damage:
        raise typer.Exit(1)
    checked = (
        f"checkpoint {store.find(which)}"
        if which is not None
        else counted(len(store.manifests()), "checkpoint")
    )
    echo(f"{checked}: every file is as it was written")


@app.command()
def diff(run: RunOrCheckpoints, before: Which, after: Which, as_json: AsJson = False) -> None:
    """Compare two checkpoints bit for bit; exit code 0 in any case.

    Example: paceline checkpoint diff runs/20250301-120000-train 11 latest
    """
    difference = open_store(run).diff(before, after)
    if as_json:
        echo_json(asdict(difference))
        return
    print_difference(difference)


@app.command()
def tag(
    run: RunOrCheckpoints,
    which: Which,
    name: Annotated[str | None, typer.Argument(help="The name to give.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag WHICH away instead.")] = False,
) -> None:
    """Give a checkpoint a name that protects it from being deleted.

    Example: paceline checkpoint tag runs/20250301-120000-train 12 before-finetuning
    """
    store = open_store(run)
    if remove:
        if name is not None:
            raise UsageError(
                "--remove takes one name", remedy=f"paceline checkpoint tag {run} {which} --remove"
            )
        store.untag(which)
        echo(f"tag {which} removed")
        return
    if name is None:
        raise UsageError("a tag needs a name", remedy=f"paceline checkpoint tag {run} {which} NAME")
    echo(f"checkpoint {store.tag(which, name)} is now {name}")


@app.command()
def export(
    run: RunOrCheckpoints,
    which: Which,
    path: Annotated[str, typer.Argument(help="The file to write.")],
    format: Annotated[
        str | None, typer.Option("--format", help="safetensors or torch; by default from the file's name.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Optimizer and all, not only the model.")] = False,
    overwrite: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write the model's weights as one safetensors file or as a torch.save file.

    Example: paceline checkpoint export runs/20250301-120000-train best model.safetensors
    """
    chosen = format or ("torch" if path.endswith((".pt", ".pth", ".bin", ".ckpt")) else "safetensors")
    if chosen not in ("safetensors", "torch"):
        raise UsageError(f"--format {chosen!r}", remedy="use safetensors or torch")
    written = open_store(run).export(
        which,
        path,
        format="torch" if chosen == "torch" else "safetensors",
        everything=everything,
        overwrite=overwrite,
    )
    echo(f"{written} ({size_text(written.stat().st_size)}, {chosen})")


def open_store(run: str | None) -> CheckpointStore:
    """Return the store of a run's folder or of a checkpoints URL, None: of the newest run; UsageError when
    nothing is there."""
    from paceline.checkpoint.manifest import version_of
    from paceline.checkpoint.store import CheckpointStore
    from paceline.cli.run_choice import chosen

    if run is None or "://" not in run:
        run = str(chosen(run))
    candidates = (
        [run]
        if os.path.basename(run.rstrip("/")) == "checkpoints"
        else [run.rstrip("/") + "/checkpoints", run]
    )
    for candidate in candidates:
        store = CheckpointStore(candidate)
        if any(version_of(name) is not None or name == "latest" for name in store.storage.names("")):
            return store
    raise UsageError(
        f"there are no checkpoints in {run}", remedy="give a run's folder, or the URL of its checkpoints"
    )


def _plain(manifest: CheckpointManifest, tags: dict[str, int]) -> dict[str, Any]:
    info = manifest.info
    return {
        "version": manifest.version,
        "created": datetime.fromtimestamp(manifest.created, UTC).isoformat(timespec="seconds"),
        "step": info.step,
        "epoch": info.epoch,
        "samples": info.samples,
        "workers": info.workers,
        "parent": info.parent,
        "tags": sorted(name for name, version in tags.items() if version == manifest.version),
        "metrics": info.metrics,
        "note": info.note,
        "finite": manifest.finite,
        "bytes": manifest.nbytes,
        "files": [file.to_plain() for file in manifest.files],
    }


def _print_list(manifests: list[CheckpointManifest], tags: dict[str, int]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for name in ("version", "created (UTC)", "step", "epoch", "size", "parent", "metrics", "tags"):
        table.add_column(
            name, justify="right" if name in ("version", "step", "epoch", "size", "parent") else "left"
        )
    for manifest in manifests:
        facts = _plain(manifest, tags)
        table.add_row(
            str(manifest.version),
            facts["created"].removesuffix("+00:00").replace("T", " "),
            str(manifest.info.step),
            str(manifest.info.epoch),
            size_text(manifest.nbytes),
            "" if manifest.info.parent is None else str(manifest.info.parent),
            escape(printable(_shown(facts["metrics"])))
            + ("" if manifest.finite is not False else " (weights not finite)"),
            escape(printable(_shown(facts["tags"]))),
        )
    Console().print(table)


def print_difference(difference: CheckpointDiff) -> None:
    for name in difference.added:
        echo(f"+ {name}")
    for name in difference.removed:
        echo(f"- {name}")
    for change in difference.changed:
        if change.elements is None:
            echo(f"~ {change.name}  {change.before} -> {change.after}")
        else:
            differ = counted(change.elements, "element", "differs", "differ")
            echo(f"~ {change.name}  {change.before}: {differ}, by at most {change.largest:.6g}")
    for item in difference.state:
        echo(f"~ {item.place}: {_short(item.before)} -> {_short(item.after)}")
    same = f"{counted(difference.same, 'tensor', 'is', 'are')} the same bits"
    end = "no difference" if difference.empty else same
    echo(f"{difference.before} -> {difference.after}: {end}")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{name} {number:.6g}" if isinstance(number, float) else f"{name} {number}"
            for name, number in value.items()
        )
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
