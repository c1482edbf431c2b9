"""`paceline doctor`: is this machine fit to train, and are the links to others? Imports torch, to ask it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import AsJson, echo, echo_json
from paceline.core.errors import UsageError
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.monitor.doctor.finding import DoctorFinding

_PORT = 41900
_SERVED_SECONDS = 600.0


def doctor(
    master_addr: Annotated[
        str | None, typer.Option(help="The meeting point of ranks: is it known, and can it be reached?")
    ] = None,
    master_port: Annotated[
        int | None, typer.Option(help="Its port: is it free here, or does it answer there?", min=1, max=65535)
    ] = None,
    checkpoint_dir: Annotated[
        str, typer.Option(help="A folder or URL for checkpoints: can it be written, and does it last?")
    ] = "runs",
    hosts: Annotated[
        str | None,
        typer.Option(help="Measure the links to and between these: a,b:42000. Needs --token-file."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Be measured: answer `paceline doctor --hosts` of other machines.")
    ] = False,
    bind: Annotated[
        str | None, typer.Option(help="With --serve: address or name to listen at; else the way out's.")
    ] = None,
    port: Annotated[int, typer.Option(help="With --serve: the port.", min=1, max=65535)] = _PORT,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="The secret of both ends; --serve makes a missing one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at Python, torch, GPUs, NCCL, memory, limits, names, ports and the folder for checkpoints, and at
    the links between hosts. Each line is ok, a warning, or wrong with what to do; exit code 1 where one is
    wrong.

    To measure links, run `paceline doctor --serve --token-file token` on each host, copy the file `token`
    that the first of them makes, and ask them from any machine.

    Example: paceline doctor --checkpoint-dir /data/runs --hosts node1,node2 --token-file token
    """
    if serve:
        _serve(bind or _way_out(), port, token_file)
        return
    findings = []
    for found in _findings(master_addr, master_port, checkpoint_dir, hosts, token_file):
        findings.append(found)
        if not as_json:
            _print(found)
    counts = {kind: sum(found.verdict == kind for found in findings) for kind in ("ok", "warning", "wrong")}
    if as_json:
        echo_json({**counts, "findings": [vars(found) for found in findings]})
    else:
        echo(f"{counts['ok']} ok, {counted(counts['warning'], 'warning')}, {counts['wrong']} wrong")
    if counts["wrong"]:
        raise typer.Exit(1)


def _findings(
    master_addr: str | None,
    master_port: int | None,
    checkpoint_dir: str,
    hosts: str | None,
    token_file: Path | None,
) -> Iterator[DoctorFinding]:
    from paceline.monitor.doctor.folder_check import look_at_folder
    from paceline.monitor.doctor.link_checks import look_at_links, parse_hosts
    from paceline.monitor.doctor.machine_checks import look_at_machine
    from paceline.monitor.doctor.network_checks import look_at_network

    # Mistakes of the caller come before the first line.
    targets = None if hosts is None else parse_hosts(hosts)
    secret = b"" if targets is None else _secret(token_file)
    yield from look_at_machine()
    yield from look_at_network(master_addr, master_port)
    yield from look_at_folder(checkpoint_dir)
    if targets is not None:
        yield from look_at_links(targets, secret)


def _print(found: DoctorFinding) -> None:
    echo(f"{found.verdict:<8} {found.topic:<18} {found.text}")
    if found.remedy:
        echo(f"{'':<8} {'':<18} try: {found.remedy}")


def _secret(file: Path | None) -> bytes:
    from paceline.control.supervisor_address import read_token

    if file is None:
        raise UsageError(
            "--hosts and --serve need a secret that both ends know",
            remedy="give --token-file FILE; `paceline doctor --serve --token-file FILE` makes one",
        )
    return read_token(file)


def _way_out() -> str:
    """Return the address of this machine that its route to others has; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"  # it has no network


def _serve(bind: str, port: int, token_file: Path | None) -> None:
    from paceline.control import supervisor_address
    from paceline.core.atomic_file import create_once
    from paceline.core.errors import ResourceError
    from paceline.core.listen_address import listener
    from paceline.monitor.doctor.link_server import LinkServer
    from paceline.train.history import writing

    if token_file is not None and not token_file.exists():
        with writing("secret", token_file):
            create_once(token_file, supervisor_address.new_secret().hex().encode() + b"\n", mode=0o600)
        echo(f"made {token_file}: copy it to the other machines, where only you can read it")
    secret = _secret(token_file)
    try:
        listening = listener(bind, port)
    except OSError as error:
        raise ResourceError(
            f"{bind}:{port} cannot be listened at: {error.strerror or error}",
            remedy="give another --port or --bind; `ss -ltnp` shows what listens there",
        ) from error
    with listening:
        server = LinkServer(listening, secret)
        before = signal.signal(signal.SIGTERM, lambda *_: server.stop())
        try:
            echo(f"serving at {bind}:{port} for {_SERVED_SECONDS / 60:.0f} minutes; Ctrl-C ends it")
            server.run(_SERVED_SECONDS)
        finally:
            signal.signal(signal.SIGTERM, before)
