"""What surrounds the engine on a login node: variables of the user's shell, and names of nodes. SLURM's
commands are stand-ins here; tests/clusters/slurm has the real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import paceline
from paceline.engines.slurm import slurm_commands, slurm_engine

# Partition gpu has the nodes in "$HERE/nodes", which are asked for by its name.
STAND_IN = """#!/bin/sh
case "$0" in
  */sbatch) cat > /dev/null;;
  */sinfo) echo "$@" >> "$HERE/asked"
    case "$*" in
      *--format=%P) [ -e "$HERE/no-default" ] && echo gpu || printf 'debug\\ngpu*\\n';;
      *) cat "$HERE/nodes";;
    esac;;
esac
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("sbatch", "sinfo"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nodes").write_text("127.0.0.1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(tmp_path))
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SBATCH_PARTITION"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("program", "dropped", "kept"),
    [
        ("squeue", ("SQUEUE_PARTITION", "SQUEUE_FORMAT"), ("SQUEUE_ALL", "SLURM_CONF")),
        ("scancel", ("SCANCEL_INTERACTIVE", "SCANCEL_STATE"), ("SLURM_CLUSTERS",)),
        ("sinfo", ("SINFO_PARTITION",), ("SINFO_FEDERATION",)),
        # Its environment is also that of the job, in which a script may call squeue.
        ("sbatch", ("SBATCH_WAIT", "SBATCH_ERROR"), ("SBATCH_ACCOUNT", "SQUEUE_FORMAT")),
    ],
)
def test_variables_that_change_answers_do_not_reach_commands(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    dropped: tuple[str, ...],
    kept: tuple[str, ...],
) -> None:
    (here / program).write_text("#!/bin/sh\nenv\n")
    (here / program).chmod(0o755)
    for name in (*dropped, *kept):
        monkeypatch.setenv(name, "x")
    found = {line.partition("=")[0] for line in slurm_commands.call([program]).splitlines()}
    assert [name for name in (*dropped, *kept) if name in found] == [*kept]
    assert os.environ[dropped[0]] == "x"


@pytest.mark.parametrize(
    ("settings", "variable", "asked"),
    [
        ({}, "", " --partition=gpu"),
        ({}, "long", " --partition=long"),
        ({"partition": "debug"}, "long", " --partition=debug"),
        ({"partition": "debug", "options": {"partition": "fast"}}, "", " --partition=fast"),
        ({"options": {"partition": "no"}}, "", " --partition=gpu"),
    ],
)
def test_nodes_of_other_partitions_are_not_asked_about(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    variable: str,
    asked: str,
) -> None:
    if variable:
        monkeypatch.setenv("SBATCH_PARTITION", variable)
    assert paceline.Slurm(**settings).address_for_nodes() == "127.0.0.1"  # type: ignore[arg-type]
    assert (here / "asked").read_text().splitlines()[-1] == f"--noheader --Node --format=%o{asked}"


def test_a_cluster_without_a_default_partition_is_asked_about_all_nodes(here: Path) -> None:
    (here / "no-default").touch()
    assert paceline.Slurm().address_for_nodes() == "127.0.0.1"
    assert (here / "asked").read_text().splitlines()[-1] == "--noheader --Node --format=%o"


def test_a_node_whose_name_is_not_known_is_left_aside(here: Path) -> None:
    (here / "nodes").write_text("node8.invalid\n127.0.0.1\n")
    assert paceline.Slurm().address_for_nodes() == "127.0.0.1"


def test_nodes_whose_names_are_all_unknown_reach_the_own_address(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that a cloud starts on demand have no address before."""
    (here / "nodes").write_text("node8.invalid\nnode9.invalid\n")
    monkeypatch.setattr(slurm_engine, "own_address", lambda: "10.0.0.5")
    assert paceline.Slurm().address_for_nodes() == "10.0.0.5"
    assert paceline.Slurm(interface="192.0.2.7").address_for_nodes() == "192.0.2.7"
    with pytest.raises(paceline.UsageError, match="has the loopback address"):
        paceline.Slurm(interface="lo").address_for_nodes()
