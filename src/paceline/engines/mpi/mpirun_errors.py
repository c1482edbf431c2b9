"""Say why an agent that mpirun started ended, from mpirun's exit code and what it wrote last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from paceline.engines.agent_commands import CommandEnd, last_words
from paceline.engines.ssh.ssh_errors import explain_connection, explain_start

_NO_PROGRAM: Final = (
    r"could not find (an )?executable|unable to launch the specified application|No such file or directory"
)
_NO_FOLDER: Final = r"(change|chdir).*director|working directory"
_NOT_FOUND_CODE: Final = 127  # a shell's, for a program that is not there
_RULE: Final = re.compile(r"^[-\s]*$")


def explain_end(host: str, code: int, lines: Sequence[str], was_running: bool, *, python: str) -> CommandEnd:
    """Return why the agent on `host` ended; see ExplainEnd."""
    said = [line for line in lines if not _RULE.match(line)]
    text = "\n".join(said)
    if code == 0 and was_running:
        return CommandEnd("ended", said[-1] if said else "")
    if code < 0:
        return CommandEnd("lost", f"{host}: its mpirun was ended by signal {-code}")
    if was_running:
        if re.search(r"lost communication|daemon.*(died|terminated)|unable to contact", text):
            return CommandEnd("lost", f"{host}: mpirun lost the connection to it")
        return CommandEnd("ended", f"{host}: the agent ended with code {code}{last_words(said)}")
    found = explain_connection(host, text)
    if found is not None:
        return found
    if re.search(_NO_FOLDER, text, re.IGNORECASE):
        return CommandEnd("ended", f"{host}: the run's folder is not there", True, "make it, or folder=")
    if re.search(_NO_PROGRAM, text):
        return explain_start(host, _NOT_FOUND_CODE, text, python)
    return explain_start(host, code, text, python)
