"""`paceline join`: lend this machine's processors to a job that trains elsewhere."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from paceline.core.errors import UsageError
from paceline.core.untrusted import printable


def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the job's control port.")],
    token_file: Annotated[
        Path, typer.Option("--token-file", help="A copy of control.secret of the run's folder.")
    ],
    workers: Annotated[int, typer.Option("--workers", "-n", help="How many workers to run here.")] = 1,
    certificate: Annotated[Path | None, typer.Option(help="With TLS: this machine's certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="With TLS: its private key.")] = None,
    authority: Annotated[Path | None, typer.Option(help="With TLS: the certificate authority.")] = None,
    ports: Annotated[
        str, typer.Option(help="Range of ports at which workers listen here, e.g. 42000-42100.")
    ] = "",
    interface: Annotated[
        str, typer.Option(help="Interface (name or address) at which workers listen here.")
    ] = "",
    wait: Annotated[float, typer.Option(help="Seconds to wait for a job that does not listen yet.")] = 0.0,
    until_finished: Annotated[
        bool,
        typer.Option(
            help="Exit with 75 where the job stops, or this machine leaves it, before its end: an engine "
            "starts them again."
        ),
    ] = False,
) -> None:
    """Add this machine to a job: its workers take part from the next step on, until the job ends. Ctrl-C
    lets them leave at a step boundary.

    Example: paceline join 10.0.0.5:41000 --workers 2 --token-file control.secret
    """
    from paceline.control.supervisor_address import read_token
    from paceline.core.listen_address import ListenAddress
    from paceline.core.tls import Tls
    from paceline.elastic.supervisor.agent import Agent

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r} is not HOST:PORT", remedy="write it like 10.0.0.5:41000")
    if workers < 1:
        raise UsageError(f"{workers} workers cannot help", remedy="give --workers 1 or more")
    tls = None
    if certificate is not None and key is not None and authority is not None:
        tls = Tls(certificate, key, authority)
    elif certificate or key or authority:
        raise UsageError("TLS needs --certificate, --key and --authority", remedy="give all three or none")
    agent = Agent(
        (host.strip("[]"), int(port)),
        read_token(token_file),
        workers,
        tls,
        say=lambda text: typer.echo(printable(text)),
        listening=ListenAddress(ports, interface),
        first_wait=wait,
        until_finished=until_finished,
    )

    def leave(number: int, _: object) -> None:
        if number == signal.SIGINT and not agent.has_connected:
            raise KeyboardInterrupt("stopped by Ctrl-C before the job was reached")
        agent.leave()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    raise typer.Exit(agent.run())
