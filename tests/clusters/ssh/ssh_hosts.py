"""Hosts behind a switch with a real sshd on each but the first, which is where the run is started from."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from tests.waiting import wait_for

from paceline.engines.ssh.ssh_engine import Ssh
from paceline.testing import netns
from paceline.testing.netns import Hosts

ROOT = Path(__file__).parents[3]
PORT = 2222
_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
# Beside the user's key one with which sshd runs `true` in the place of any command.
_CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub {folder}/forced_keys
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
SetEnv PACELINE_HOST={name} PYTHONPATH={path}
"""


def why_not() -> str:
    """Return why there can be no such hosts here; empty if there can."""
    if not os.access(_SSHD, os.X_OK) or shutil.which("ssh-keygen") is None:
        return "sshd not found: apt install openssh-server"
    return netns.why_not()


@final
class SshHosts:
    """`hosts`: number 0 starts the run; 1, 2, ... have an sshd each, and are called b, c, ..."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self._sshd: dict[int, subprocess.Popen[Any]] = {}
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host_key", "user_key", "other_key", "forced_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
            )
        (folder / "forced_keys").write_text(f'command="true" {(folder / "forced_key.pub").read_text()}')
        self.known_hosts = folder / "known_hosts"
        key = (folder / "host_key.pub").read_text()
        # An empty file for tests of a host that nobody knows.
        (folder / "none_known").touch()
        self.known_hosts.write_text("".join(f"[{address}]:{PORT} {key}" for address in hosts.addresses[1:]))
        for number in range(1, len(hosts.names)):
            self.start(number)

    def start(self, number: int) -> None:
        """Start the sshd of a host."""
        config = self.folder / f"sshd_{number}"
        config.write_text(
            _CONFIG.format(
                port=PORT, address=self.hosts.addresses[number], folder=self.folder,
                name="abcdefgh"[number], path=f"{ROOT / 'src'}:{ROOT}",
            )
        )  # fmt: skip
        log = self.folder / f"sshd_{number}.log"
        # Without -D it would leave its namespace's process table to a daemon that nobody waits for.
        command = [_SSHD, "-D", "-f", str(config), "-E", str(log)]
        self._sshd[number] = self.hosts.start(number, command)
        where = (self.hosts.addresses[number], PORT)
        wait_for(lambda: where in self.hosts.listeners(number), f"sshd listens at {where}")

    def kill_sshd(self, number: int) -> None:
        """Kill a host's sshd and its connections, as a crash of the machine's services would; programs that
        it started go on."""
        for pid in self.hosts.pids(number):
            if "sshd" in Path(f"/proc/{pid}/comm").read_text():
                os.kill(pid, signal.SIGKILL)
        self._sshd.pop(number).wait()

    def agents(self, number: int) -> list[int]:
        """Return the agents' processes of a host."""
        return [pid for pid in self.hosts.pids(number) if b"\0join\0" in self.command_line(pid)]

    @staticmethod
    def command_line(pid: int) -> bytes:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""
        return b"" if b"remote_agent" in line else line

    def names(self, *numbers: int) -> tuple[str, ...]:
        return tuple(f"root@{self.hosts.addresses[number]}:{PORT}" for number in numbers)

    def engine(self, *numbers: int, **settings: Any) -> Ssh:
        """The engine with these hosts, and the keys of this folder."""
        given: dict[str, Any] = {
            "hosts": self.names(*numbers),
            "identity": str(self.folder / "user_key"),
            "options": (f"UserKnownHostsFile={self.known_hosts}",),
            "python": sys.executable,
            "folder": str(ROOT),
        }
        return Ssh(**{**given, **settings})

    @contextmanager
    def on_first(self) -> Iterator[None]:
        """Have the calling thread, and what it starts, run on the first host."""
        with open("/proc/thread-self/ns/net") as before:
            self.hosts.enter(0)
            try:
                yield
            finally:
                netns.enter_namespace(before.fileno())


def engine_words(engine: Any) -> list[str]:
    """Return the options of `paceline train` for an engine: its settings that are not the usual ones."""
    words = ["--engine", engine.name]
    for each in dataclasses.fields(engine):
        value = getattr(engine, each.name)
        if each.name not in ("name", "nodes") and value != each.default:
            text = value if isinstance(value, str) else json.dumps(value)
            words.append(f"--engine-set={each.name}={text}")
    return words


@contextmanager
def ssh_hosts(count: int, folder: Path, **options: Any) -> Iterator[SshHosts]:
    """Hosts with sshd on all but the first of them."""
    with Hosts(count + 1, **options) as hosts:
        yield SshHosts(hosts, folder)
