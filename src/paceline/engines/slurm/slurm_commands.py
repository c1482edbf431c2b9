"""SLURM's commands: called with a limit of time, their refusals turned into errors that say what to try."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from paceline.core.errors import CommTimeoutError, PacelineError, UnavailableError, UsageError

_SECONDS: Final = 60.0
_FORMAT: Final = "ArrayJobID:|,ArrayTaskID:|,State:|,NodeList:|,Reason:|,exit_code:|"

# What a refusal of SLURM says (lower case), what is wrong in the user's words, what to try.
_REFUSALS: Final = (
    ("invalid partition", "there is no partition {partition}", "choose one of {partitions}"),
    ("invalid node name", "there is no node {nodelist}", "`sinfo -N` lists the nodes"),
    (
        "node count specification",
        "the partition has no {nodes} nodes for one job",
        "ask for fewer nodes, or for a partition that has them: `sinfo`",
    ),
    (
        "requested time limit is invalid",
        "time={time} is more than the partition allows",
        "`sinfo -o '%P %l'` shows the limit of each partition; ask for less with time=",
    ),
    (
        "invalid --time specification",
        "time={time} is no time",
        "write it as SLURM does: minutes, 2:00:00, or 1-12:00:00",
    ),
    (
        "requested node configuration is not available",
        "no node of the partition has what is asked for",
        "ask for fewer GPUs or workers per node (a processor each), or less memory; see `sinfo -N -l`",
    ),
    (
        "more processors requested",
        "no node has so many processors",
        "lower workers_per_node: each worker asks for a processor",
    ),
    (
        "generic resource",
        "the cluster has no such resource",
        "`sinfo -o '%N %G'` shows the generic resources of its nodes",
    ),
    (
        "invalid account",
        "account {account} cannot be used here",
        "`sacctmgr show assoc user=$USER` lists yours; give it with --slurm account=NAME",
    ),
    ("invalid qos", "qos {qos} cannot be used here", "`sacctmgr show assoc user=$USER` lists yours"),
    (
        "violates accounting/qos policy",
        "a limit of your account is reached",
        "wait for other jobs to end (`squeue -u $USER`), or ask for fewer nodes, GPUs or less time",
    ),
    ("invalid feature", "no node has the feature {constraint}", "`sinfo -o '%N %f'` shows all features"),
    ("reservation", "there is no reservation {reservation}", "`scontrol show reservation` lists them"),
    (
        "unrecognized option",
        "this SLURM does not know one of the options",
        "see `man sbatch`; write --slurm key=value without dashes before the key",
    ),
)  # fmt: skip
# The ends of variables of users that say which clusters and partitions a command looks at.
_PLACES: Final = ("_ALL", "_FEDERATION", "_LOCAL", "_SIBLING")
# sbatch would wait for the end of its job, and write errors to a file that is not the log.
_NOT_FOR_SBATCH: Final = ("SBATCH_ERROR", "SBATCH_WAIT")
_NO_CONTROLLER: Final = (
    "unable to contact slurm",
    "connect failure",
    "configuration source",
    "socket timed out",
    "zero bytes were transmitted",
)


class JobRecord(NamedTuple):
    """A job, or a task of an array, as squeue shows it. `status` is a wait status."""

    job: str
    task: str
    state: str
    nodes: str
    reason: str
    status: int


def call(
    command: Sequence[str], *, stdin: str | None = None, options: Mapping[str, str] | None = None
) -> str:
    """Run a command of SLURM; return what it printed. `options`: what was asked for, to name it in errors."""
    try:
        code, printed, said = _run(command, stdin or "")
    except FileNotFoundError:
        raise UnavailableError(
            f"{command[0]} is not installed here, so SLURM cannot be asked",
            remedy="start on a login node of the cluster, or inside of one of its jobs",
        ) from None
    except subprocess.TimeoutExpired:
        raise CommTimeoutError(
            f"{command[0]} did not answer in {_SECONDS:g} s",
            remedy="see whether slurmctld is overloaded: `scontrol ping`, `sdiag`",
        ) from None
    if code:
        raise refusal(command[0], said.strip() or printed.strip(), options or {})
    return printed


def _run(command: Sequence[str], stdin: str) -> tuple[int, str, str]:
    """Run a command; return its exit code, its output and its errors. Where this raises, it has ended."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(command[0]),
        process_group=0,  # Ctrl-C is for the caller, which then has these commands end its jobs
    ) as process:
        try:
            printed, said = process.communicate(stdin, timeout=_SECONDS)
        except BaseException:
            # `subprocess.run` does not wait after a Ctrl-C: sbatch could still queue its job.
            process.kill()
            process.wait()
            raise
    return process.returncode, printed, said


def _environment(program: str) -> dict[str, str]:
    """Return the environment of a command of SLURM; that of sbatch is also the environment of its job."""
    kept = {**os.environ, "LC_ALL": "C"}
    if program == "sbatch":
        return {name: value for name, value in kept.items() if name not in _NOT_FOR_SBATCH}
    # SQUEUE_PARTITION leaves jobs out of answers, SQUEUE_FORMAT changes their form, SCANCEL_INTERACTIVE asks.
    own = f"{program.upper()}_"
    kept = {name: value for name, value in kept.items() if not name.startswith(own) or name.endswith(_PLACES)}
    return {**kept, "SLURM_BITSTR_LEN": "0"}  # the tasks of an array are told in full


def refusal(program: str, said: str, options: Mapping[str, str]) -> PacelineError:
    """Return the error for what a command of SLURM said."""
    text = said.lower()
    own_words = re.sub(r"^\w+: (error: )?", "", said.splitlines()[-1]) if said else "no reason"
    if any(part in text for part in _NO_CONTROLLER):
        return UnavailableError(
            f"{program} cannot reach SLURM's controller: {own_words}",
            remedy="`scontrol ping` shows its state; SLURM_CONF names the cluster's configuration",
        )
    for part, problem, remedy in _REFUSALS:
        if part in text:
            words = _AskedOptions(options)
            return UsageError(
                f"SLURM refuses: {problem.format_map(words)} ({own_words})", remedy=remedy.format_map(words)
            )
    return UsageError(
        f"{program} failed: {said or 'no reason'}", remedy="see `man sbatch` and the options given"
    )


class _AskedOptions(dict[str, str]):
    """What was asked for, by the option's name; partitions are looked up when they are named."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__({name: repr(value) for name, value in options.items()})

    def __missing__(self, key: str) -> str:
        if key != "partitions":
            return f"that {key} names" if key in ("nodelist", "partition") else f"of that {key}"
        try:
            return ", ".join(
                name.rstrip("*") for name in call(["sinfo", "--noheader", "--format=%P"]).split()
            )
        except PacelineError:
            return "those that `sinfo` lists"


def default_partition() -> str:
    """Return the partition of jobs that name none; empty where the cluster has no default."""
    names = call(["sinfo", "--noheader", "--format=%P"]).split()
    return next((name[:-1] for name in names if name.endswith("*")), "")


def expand(hosts: str) -> list[str]:
    """Return the names in a list of SLURM such as "n[1-3],gpu7"."""
    return call(["scontrol", "show", "hostnames", hosts]).split() if hosts else []


def records(jobs: Sequence[str]) -> list[JobRecord]:
    """Return what SLURM knows of these jobs and their array tasks; it forgets those that ended long ago."""
    if not jobs:
        return []
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(jobs)}", "-O", _FORMAT]
    try:
        text = call(command)
    except UsageError as error:
        # All of them are forgotten.
        if "invalid job id" in error.message.lower():
            return []
        raise
    found = []
    for line in text.splitlines():
        job, task, state, nodes, reason, status = (part.strip() for part in line.split("|")[:6])
        found.append(
            JobRecord(job, task if task.isdigit() else "", state, nodes, reason, int(status) if status else 0)
        )
    return found


def jobs_in(folder: Path, file: Literal["Command", "STDOUT"]) -> list[str]:
    """Return this user's jobs of which a file lies in a folder: the script, or the output."""
    form = f"ArrayJobID:|,{file}:|"
    command = ["squeue", "--noheader", "--array", f"--user={os.geteuid()}", "--states=all", "-O", form]
    found = (line.split("|")[:2] for line in call(command).splitlines())
    return sorted({job.strip() for job, path in found if path.strip().startswith(f"{folder}/")})


def cancel(target: str, *, signal: str = "", batch: bool = False) -> None:
    """End a job or a step, or send it a signal; one that is over already is no error."""
    command = [
        "scancel",
        *([f"--signal={signal}"] if signal else []),
        *(["--batch"] if batch else []),
        target,
    ]
    try:
        call(command)
    except UsageError as error:
        # scancel complains of jobs that end meanwhile, and of steps to which it has sent the signal.
        if not re.search(r"invalid job|already comple|job/step|step id", error.message.lower()):
            raise
