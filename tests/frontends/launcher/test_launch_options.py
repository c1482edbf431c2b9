"""The command line of `paceline run`: whose an option is, and what each means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError, PacelineError, UnavailableError, UsageError
from paceline.frontends.launcher.launch_config import LaunchConfig, count_gpus
from paceline.frontends.launcher.launch_options import LaunchCommand, asks_for_help, parse


def read(line: str, **environment: str) -> LaunchCommand:
    return parse(line.split(), environment)


def test_the_defaults() -> None:
    command = read("train.py")
    assert command.config == LaunchConfig()
    assert (command.program.name, command.program.arguments, command.note) == ("train.py", (), "")
    config = command.config
    assert (config.nproc_per_node, config.nnodes, config.node_rank) == (1, 1, 0)
    assert (config.max_restarts, config.monitor_interval, config.start_timeout) == (3, 1.0, 600)


EVERYTHING = (
    "--nproc-per-node 8 --nnodes 4 --node-rank 2 --master-addr node7 --master-port 29400 --backend gloo "
    "--max-restarts 1 --monitor-interval 0.5 --start-timeout 60"
)
WITH_EQUALS = re.sub("(--[a-z-]+) ", r"\1=", EVERYTHING)
CONFIG = LaunchConfig(8, 4, 2, "node7", 29400, "gloo", 1, 0.5, 60.0)


@pytest.mark.parametrize(
    "line",
    [
        f"{EVERYTHING} train.py --epochs 3 -x",
        f"train.py {EVERYTHING} --epochs 3 -x",
        f"train.py {EVERYTHING} -- --epochs 3 -x",
        f"train.py --epochs 3 -x {EVERYTHING}",
        f"{EVERYTHING.replace('-', '_').replace('__', '--')} train.py --epochs 3 -x",
        f"{WITH_EQUALS} train.py --epochs 3 -x",
    ],
    ids=["before", "after", "with --", "last", "underscores", "equals"],
)
def test_options_stand_anywhere_and_what_is_unknown_is_the_scripts(line: str) -> None:
    command = read(line)
    assert command.config == CONFIG
    assert command.program.arguments == ("--epochs", "3", "-x")


def test_all_after_the_dashes_is_the_scripts() -> None:
    command = read("train.py --nproc-per-node 2 -- --nproc-per-node 4 -- -m")
    assert command.config.nproc_per_node == 2
    assert command.program.arguments == ("--nproc-per-node", "4", "--", "-m")


def test_torchruns_own_options_behind_the_script_are_the_scripts() -> None:
    arguments = ("--log-dir", "runs", "-m", "adam", "--role", "actor", "--standalone")
    command = parse(["--nproc-per-node=2", "train.py", *arguments], {})
    assert (command.program.arguments, command.note) == (arguments, "")


def test_an_option_behind_the_script_after_others_before_it_is_noted() -> None:
    command = read("--nproc-per-node 2 train.py --backend gloo")
    assert (command.config.backend, command.program.arguments) == ("gloo", ())
    assert "--backend behind the script is the launcher's; -- makes it the script's" in command.note


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--standalone --nproc_per_node=2", {"nproc_per_node": 2}),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0", {"master_addr": "localhost"}),
        (
            "--nnodes 2:2 --node-rank 1 --rdzv-backend=c10d --rdzv-endpoint=n0:29411 --rdzv-id 77",
            {"nnodes": 2, "node_rank": 1, "master_addr": "n0", "master_port": 29411, "run_id": "77"},
        ),
        ("--nnodes 2 --node-rank 0 --rdzv-endpoint n0", {"master_addr": "n0", "master_port": 29400}),
        ("--rdzv-conf timeout=9,is_host=1", {"start_timeout": 9.0}),
        ("--role actor --local-ranks-filter 0,2", {"role": "actor", "shown_ranks": (0, 2)}),
        ("--start-method spawn --run-path --shutdown-timeout 5", {"shutdown_timeout": 5.0}),
    ],
)
def test_options_of_torchrun_mean_what_they_mean_there(line: str, wanted: dict[str, Any]) -> None:
    config = read(f"{line} train.py").config
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_standalone_jobs_have_names_that_differ() -> None:
    assert read("--standalone t.py").config.run_id != read("--standalone t.py").config.run_id


def test_modules_and_programs() -> None:
    assert read("-m package.train --lr 1").program.is_module
    assert read("--module=0 train.py").program.is_module is False
    assert read("--no-python ./train.sh x").program.executed


def test_torchruns_variables_count_where_the_command_line_says_nothing() -> None:
    variables = {
        "PET_NPROC_PER_NODE": "4",
        "PET_MAX_RESTARTS": "0",
        "PET_START_TIMEOUT": "no torchrun has it",
    }
    config = parse(["--max-restarts=2", "train.py"], variables).config
    assert (config.nproc_per_node, config.max_restarts) == (4, 2)


@pytest.mark.parametrize(
    ("line", "message", "remedy"),
    [
        ("", "no script is given", "paceline run train.py"),
        ("--nproc-per-node 2", "no script is given", "--help"),
        ("--epochs 3 train.py", "--epochs stands before the script", "come after it"),
        ("--nproc-per-nod 3 train.py", "--nproc-per-nod stands before", "did you mean --nproc-per-node?"),
        ("--local-ranks-filter 0;2 train.py", "--local-ranks-filter 0;2", "--local-ranks-filter 0,2"),
        ("train.py --nproc-per-node", "--nproc-per-node needs a value", "VALUE"),
        ("train.py --nproc-per-node two", "nproc_per_node='two'", '"gpu", "cpu" or "auto"'),
        ("train.py --nproc-per-node 0", "nproc_per_node=0", "from 1"),
        ("train.py --nnodes 2", "--nnodes 2 without --node-rank", "SLURM_NODEID"),
        (
            "train.py --nnodes 2 --node-rank 2",
            "node_rank=2 with nnodes=2: nodes go from 0 to 1",
            "own number",
        ),
        ("train.py --nnodes 1:4", "--nnodes 1:4: a range", "paceline join"),
        ("train.py --nnodes x", "--nnodes x", "whole number"),
        ("train.py --master-port 70000", "master_port=70000", "1 to 65535"),
        ("train.py --master-addr=", "master_addr=''", "host of node 0"),
        ("train.py --backend smoke", "backend='smoke'", "gloo"),
        ("train.py --max-restarts -1", "max_restarts=-1", "from 0"),
        ("train.py --start-timeout soon", "--start-timeout soon", "seconds"),
        ("train.py --start-timeout inf", "start_timeout=inf", "above 0"),
        ("train.py --monitor-interval 0", "monitor_interval=0.0", "above 0"),
        ("--rdzv-backend etcd train.py", "--rdzv-backend etcd", "--master-addr"),
        ("--standalone --nnodes 2 train.py", "--standalone with --nnodes 2", "leave one out"),
        ("-m --no-python train", "contradict", "leave one"),
        ("--tee 3 train.py", "--tee of torchrun has no meaning here", "tee FILE"),
        ("-r 3 train.py", "-r of torchrun has no meaning here", "tee FILE"),
        ("--numa-binding node train.py", "--numa-binding of torchrun", "numactl"),
        ("--virtual-local-rank train.py", "--virtual-local-rank of torchrun", "LOCAL_RANK"),
    ],
)
def test_mistakes_are_refused_by_name_with_the_remedy(line: str, message: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("setting", "value"),
    [("nproc_per_node", True), ("nnodes", 1.5), ("master_addr", ""), ("start_timeout", "1")],
)
def test_a_config_that_cannot_be_is_refused_when_it_is_made(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(**{setting: value})
    assert caught.value.facts["key"] == setting


def test_counts_of_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.frontends.launcher.launch_config.cores", lambda: 6)
    assert LaunchConfig(nproc_per_node="cpu").counted({}).ranks_here == 6
    assert LaunchConfig(nproc_per_node=3).counted({}).ranks_here == 3
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / name).mkdir()
    for visible, seen in ((None, 3), ("0,2", 2), ("", 0), ("-1", 0), ("1,7,0", 1), ("GPU-1,GPU-2", 2)):
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert count_gpus(environment, tmp_path) == seen
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "none") == 0


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.frontends.launcher.launch_config.count_gpus", lambda environment: 0)
    monkeypatch.setattr("paceline.frontends.launcher.launch_config.cores", lambda: 5)
    with pytest.raises(UnavailableError, match="shows no GPU"):
        LaunchConfig(nproc_per_node="gpu").counted({})
    assert LaunchConfig(nproc_per_node="auto").counted({}).ranks_here == 5
    assert issubclass(UnavailableError, PacelineError)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--help", True),
        ("-h", True),
        ("--nproc-per-node 2 --help", True),
        ("--standalone --nproc_per_node=2 -h train.py", True),
        ("--role --help train.py", False),
        ("train.py --help", False),
        ("--nproc-per-node 2 train.py -h", False),
        ("-- --help", False),
        ("", False),
    ],
)
def test_help_is_the_launchers_before_the_script(line: str, wanted: bool) -> None:
    assert asks_for_help(line.split()) is wanted
