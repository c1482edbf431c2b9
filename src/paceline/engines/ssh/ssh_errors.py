"""Say why an agent over ssh ended, from ssh's exit code and what it wrote last: host, reason, remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from paceline.core.version import VERSION
from paceline.engines import remote_agent
from paceline.engines.agent_commands import CommandEnd, last_words
from paceline.engines.host_file import parse_hosts

NO_FOLDER_CODE: Final = 72
_SSH_CODE: Final = 255  # ssh's own failure; agents end with other codes

# What ssh wrote, why that is, what to do. Another try on the same host would fail in the same way.
_UNUSABLE: Final = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that is known",
        "make sure that it is the right machine, then 'ssh-keygen -R {known}' and connect once by hand",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its host key is not known here",
        "connect once by hand ('ssh {login}') and check the key, or add it with ssh-keyscan",
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "permission denied",
        "let ssh get in without a password: 'ssh-copy-id {login}', identity= or user=",
    ),
    (
        r"Could not resolve hostname (?!.*Temporary failure)",
        "its name is not known",
        "correct the name in the host file, or give the host's address",
    ),
    (
        r"Bad configuration option|command-line line|[Uu]nsupported option|keyword .* extra arguments",
        "ssh does not understand its options",
        "correct options= or ~/.ssh/config",
    ),
)
# The host, or the way to it, may come back.
_LOST: Final = (
    (
        r"Connection refused",
        "nothing listens at its ssh port",
        "start sshd there, or give the right port (port=)",
    ),
    (
        r"Temporary failure in name resolution",
        "its name cannot be looked up now",
        "check the name, and that this machine reaches its name server; or give the host's address",
    ),
    (
        r"timed out|No route to host|Network is unreachable|not responding",
        "it cannot be reached",
        "check that the machine is up and that a firewall lets ssh pass",
    ),
)


def explain_end(
    host: str, code: int, lines: Sequence[str], was_running: bool, *, python: str, folder: str
) -> CommandEnd:
    """Return why the agent on `host` ended; see ExplainEnd."""
    text = "\n".join(lines)
    if code == _SSH_CODE:
        return _explain_ssh(host, text, was_running)
    if code == 0 and was_running:
        return CommandEnd("ended", lines[-1] if lines else "")
    if code < 0:
        return CommandEnd("lost", f"{host}: its ssh was ended by signal {-code}")
    if not was_running:
        return explain_start(host, code, text, python, folder)
    return CommandEnd("ended", f"{host}: the agent ended with code {code}{last_words(lines)}")


def _explain_ssh(host: str, text: str, was_running: bool) -> CommandEnd:
    if was_running:
        # The last lines are the agent's own, and say nothing about ssh.
        return CommandEnd(
            "lost", f"{host}: its ssh connection ended: the host, its network or its sshd is gone"
        )
    found = explain_connection(host, text)
    return found or CommandEnd("lost", f"{host}: ssh could not connect{last_words(text.splitlines())}")


def explain_connection(host: str, text: str) -> CommandEnd | None:
    """Return why ssh did not get in, from what it wrote; None where it wrote nothing that is known."""
    (line,) = parse_hosts((host,), "the hosts")
    login = f"{line.user}@{line.host}" if line.user else line.host
    names = {
        "login": f"-p {line.port} {login}" if line.port else login,
        "known": f'"[{line.host}]:{line.port}"' if line.port not in (0, 22) else line.host,
    }
    for pattern, reason, remedy in _UNUSABLE:
        if re.search(pattern, text):
            return CommandEnd("ended", f"{host}: {reason}", True, remedy.format_map(names))
    for pattern, reason, remedy in _LOST:
        if re.search(pattern, text):
            return CommandEnd("lost", f"{host}: {reason}", remedy=remedy)
    return None


def explain_start(host: str, code: int, text: str, python: str, folder: str = "") -> CommandEnd:
    """Explain a command that ended before the agent was there."""
    if code == NO_FOLDER_CODE:
        reason, remedy = (
            f"it has no folder {folder}",
            "make it there (the same path on all hosts), or folder=",
        )
    elif code in (126, 127):
        reason, remedy = f"it has no program {python}", "give the path of Python there: python="
    elif re.search(r"No module named '?paceline'?$", text, re.MULTILINE):
        reason = f"{python} has no Paceline there"
        remedy = f"'{python} -m pip install paceline=={VERSION}' there, or python="
    elif code == remote_agent.OTHER_VERSION_CODE or "No module named paceline.engines" in text:
        # mpirun says something of its own behind it.
        both = re.search(r"Paceline \S+ is installed here, and the job runs \S+", text)
        reason = "it has another version of Paceline" + (f" ({both[0]})" if both else "")
        remedy = f"install paceline=={VERSION} there"
    elif code == 0:
        reason = f"its shell ended before the agent was started{last_words(text.splitlines())}"
        remedy = "see what ends it there: an 'exit' in ~/.bashrc, or a command= of the key in authorized_keys"
    else:
        reason = f"its agent did not start (code {code}){last_words(text.splitlines())}"
        remedy = "run the command of 'paceline train --dry-run' by hand"
    return CommandEnd("ended", f"{host}: {reason}", True, remedy)
