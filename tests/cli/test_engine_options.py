"""Options of `paceline train --engine` and of `paceline submit` that cannot be: one message each, before
anything is started or handed over. What engines themselves refuse is in tests/clusters."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import yaml
from tests.cli.made_runs import Command, register_process_engine

from paceline.core import engine_registry

HOSTS = "--engine-set hosts=node1,node2"


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a script that must not run, on a machine that belongs to no cluster."""
    monkeypatch.chdir(tmp_path)
    for name in ("KUBECONFIG", "SLURM_CONF", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "script.py").write_text("open('ran', 'w').close()\n")
    (tmp_path / "bad.toml").write_text("wokers = 2\n")
    return tmp_path


BOTH = [
    ("--engine spark", "there is no engine 'spark'"),
    ("--engine spark", "the engines are ray, slurm, kubernetes, mpi and ssh"),
    ("--engine Ray", "did you mean ray?"),
    ("--engine kubernets", "did you mean kubernetes?"),
    *(
        (f"--engine {name} --nodes 0", "--nodes 0: a run needs a node")
        for name in ("ray", "slurm", "kubernetes")
    ),
    (f"--engine ssh {HOSTS} --nodes 0", "--nodes 0: a run needs a node"),
    ("--engine ray --nodes -2", "--nodes -2: a run needs a node"),
    ("--engine ray --nodes two", "--nodes"),
    ("--engine ray --workers-per-node 0", "--workers-per-node 0: a node needs a worker"),
    ("--engine slurm --workers-per-node 0", "--workers-per-node 0: a node needs a worker"),
    ("--engine slurm --engine-set workers_per_node=-1", "workers_per_node=-1"),
    (f"--engine ssh {HOSTS} --workers-per-node 0", "--workers-per-node 0: a node needs a worker"),
    ("--engine slurm --gpus-per-node -1", "gpus_per_node=-1"),
    ("--nodes 2", "--nodes is about an engine, and none is chosen"),
    ("--nodes 0", "--nodes is about an engine, and none is chosen"),
    ("--workers-per-node 2", "--workers-per-node is about an engine, and none is chosen"),
    ("--image a", "--image is about an engine, and none is chosen"),
    ("--slurm partition=a", "--slurm is about an engine, and none is chosen"),
    ("--engine-set hosts=a", "--engine-set is about an engine, and none is chosen"),
    ("--engine ray --image a", "--image means nothing to the engine ray"),
    ("--engine slurm --address ray://head:10001", "--address means nothing to the engine slurm"),
    ("--engine ray --slurm partition=a", "--slurm means nothing to the engine ray"),
    ("--engine slurm --slurm partition", "--slurm partition: not of the form key=value"),
    ("--engine slurm --slurm nodes=3 --nodes 2", "--nodes 2 and --slurm nodes 3 contradict each other"),
    ("--engine ssh", "needs hosts= or host_file="),
    ("--engine ssh", "--engine-set host_file=hosts"),
    ("--engine ssh --engine-set hosts", "--engine-set hosts: not of the form key=value"),
    ("--engine ssh --engine-set bogus=1", "--engine-set bogus=1: unknown key bogus"),
    ("--engine ssh --engine-set host=a", "did you mean hosts?"),
    (f"--engine ssh {HOSTS} --engine-set port=many", "--engine-set port=many: port: expected"),
    (f"--engine ssh {HOSTS} --engine-set port=70000", "port=70000"),
    ("--engine ray --address nonsense", "'nonsense' is not the address of a Ray cluster"),
]

TRAIN = [
    (
        "script.py --engine ray --nodes 2 --workers 3",
        "--workers 3 with --engine ray: 2 nodes of 1 worker have 2",
    ),
    ("script.py --engine ray --num-gpus 3", "--num-gpus 3 with --engine ray"),
    ("script.py --engine ray --nodes 2 --num-nodes 3", "--nodes 2 and --num-nodes 3 contradict each other"),
    ("script.py --backend ray --engine slurm", "--engine slurm and --backend ray contradict each other"),
    ("script.py --backend tensorflow --engine ray", "--backend tensorflow and --engine ray"),
    ("script.py --dry-run", "--dry-run prints what an engine would be asked for, and none is chosen"),
    (f"missing.py --engine ssh {HOSTS} --dry-run", "the script missing.py cannot be read: No such file"),
    ("script.py --address ray://head:10001", "add --engine ray"),
    ("script.py --num-nodes 2", "add --engine with --nodes 2"),
    (f"script.py --engine ssh {HOSTS} --set wokers=2", "did you mean workers?"),
    (f"script.py --engine ssh {HOSTS} --set wokers=2 --dry-run", "did you mean workers?"),
    (f"script.py --engine ssh {HOSTS} --config missing.toml --dry-run", "missing.toml cannot be read"),
    ("missing.py --engine slurm", "the script missing.py cannot be read: No such file"),
]

SUBMIT = [
    ("script.py", "add --engine slurm"),
    ("missing.py --engine slurm", "the script missing.py cannot be read: No such file"),
    (". --engine slurm", "the script . cannot be read: Is a directory"),
    (f"script.py --engine ssh {HOSTS} --time 1:00:00", "--time 1:00:00: the engine ssh knows no limit"),
    ("script.py --engine mpi --run-dir runs --set run_dir=x", "--set run_dir: the queue decides about it"),
    ("script.py --engine mpi --name a/b", "--name 'a/b' cannot be part of a folder's name"),
    ("script.py --engine slurm --time soon --dry-run", "--time soon is not a time"),
    ("script.py --engine slurm --time=-5 --dry-run", "--time -5 is not a time"),
    ("script.py --engine slurm --time 1:00:00 --slurm time=2 --dry-run", "contradict each other"),
    ("script.py --engine slurm --set wokers=2 --dry-run", "did you mean workers?"),
    ("script.py --engine slurm --set seed --dry-run", "--set seed: not of the form key=value"),
    ("script.py --engine slurm --config missing.toml --dry-run", "missing.toml cannot be read"),
    ("script.py --engine slurm --config bad.toml --dry-run", "bad.toml: unknown key wokers"),
    ("script.py --engine slurm --dry-run --wait", "--dry-run submits nothing that --wait could wait for"),
    ("script.py --engine kubernetes --dry-run", "no container image is given"),
]

LINES = [
    *((f"{command} script.py {options}", said) for options, said in BOTH for command in ("train", "submit")),
    *((f"train {line}", said) for line, said in TRAIN),
    *((f"submit {line}", said) for line, said in SUBMIT),
]


@pytest.mark.parametrize(("line", "said"), LINES)
def test_a_mistake_is_named_before_anything_happens(place, paceline, line, said):
    code, out, err = paceline(*line.split())
    assert (code, said in err) == (2, True), err or out
    assert err.startswith("error: ")
    assert "\n  try: " in err
    assert "Traceback" not in err
    assert "unexpected" not in err
    assert out == ""
    assert sorted(path.name for path in place.iterdir()) == ["bad.toml", "script.py"]


# Engines whose part is not on this machine: each names what is missing.
MISSING = [
    ("ray", "pip install 'paceline[ray]'", importlib.util.find_spec("ray") is not None),
    ("slurm", "sbatch", False),
    ("kubernetes --image a", "no Kubernetes cluster is configured", False),
]


@pytest.mark.parametrize(("options", "said", "is_here"), MISSING)
def test_an_engine_that_is_not_here(place, paceline, options, said, is_here):
    if is_here:
        pytest.skip(f"{options.split()[0]} is installed here: tests/clusters has what it refuses")
    code, out, err = paceline("submit", "script.py", "--engine", *options.split())
    assert (code, said in err) == (1, True), err or out
    assert "\n  try: " in err
    assert "Traceback" not in err
    assert not (place / "ran").exists()


def test_every_engine_is_in_the_tables():
    named = {line.split("--engine ")[1].split()[0] for line, _ in LINES if "--engine " in line}
    assert named >= set(engine_registry.NAMES)


def test_equal_numbers_do_not_contradict(place, paceline):
    """Also the plain form of a list is taken."""
    words = "train script.py --engine ssh --engine-set hosts=127.0.0.1,127.0.0.2 --nodes 2 --num-nodes 2"
    code, out, err = paceline(*words.split(), "--workers", "2", "--dry-run")
    if shutil.which("ssh") is None:
        assert "needs the program ssh" in err
        return
    assert (code, "host: 127.0.0.2" in out) == (0, True), err
    assert not (place / "ran").exists()


@pytest.fixture
def process_engine(monkeypatch, tmp_path_factory):
    """Options of the engine whose nodes are processes of this machine."""
    register_process_engine(monkeypatch, tmp_path_factory.mktemp("packages"))
    return ["--engine", "process", "--nodes", "2", "--engine-set", "most=2", "--workers-per-node", "3"]


def test_a_dry_run_prints_the_ports_and_the_addresses_of_the_settings(place, paceline, process_engine):
    (place / "settings.toml").write_text('[fault_tolerance]\nports = "42000-42100"\nport = 41000\n')
    options = [*process_engine, "--config", "settings.toml", "--set", "fault_tolerance.port=41001"]
    code, out, err = paceline("train", "script.py", *options, "--dry-run")
    assert code == 0, err
    words = yaml.safe_load(out)["commands"][1]["command"]
    assert "127.0.0.1:41001" in words
    assert words[words.index("--ports") + 1] == "42000-42100"
    code, out, err = paceline(
        "train", "script.py", *options, "--set", "fault_tolerance.bind=::1", "--dry-run"
    )
    assert (code, "'[::1]:41001'" in out) == (0, True), err
    assert not (place / "ran").exists()


def test_every_task_of_an_srun_refuses_what_the_first_one_refuses(place, paceline, monkeypatch):
    """The first would never train, and the others would wait for it."""
    variables = "JOB_ID=17 JOB_NODELIST=n[1-2] JOB_NUM_NODES=2 STEP_ID=0 PROCID=1 STEP_NUM_TASKS=2"
    for name, _, value in (text.partition("=") for text in variables.split()):
        monkeypatch.setenv(f"SLURM_{name}", value)
    code, _, err = paceline("train", "script.py", "--set", "wokers=2")
    assert (code, "did you mean workers?" in err) == (2, True), err
    code, _, err = paceline("train", "missing.py")
    assert (code, "the script missing.py cannot be read" in err) == (2, True), err


def test_the_size_of_the_engine_wins_over_the_scripts_workers(place, paceline, process_engine):
    (place / "script.py").write_text(
        "from paceline.frontends import overrides\nimport paceline\n"
        "print(overrides.current().apply(paceline.TrainConfig(workers=4)).workers)\n"
    )
    (place / "settings.toml").write_text("workers = 5\n")
    for more in ([], ["--config", "settings.toml"]):
        code, out, err = paceline("train", "script.py", *process_engine, *more)
        assert (code, out) == (0, "6\n"), err


def test_what_a_queue_would_run_for_an_engine_that_takes_no_run_over(place, paceline):
    words = f"submit script.py --engine ssh {HOSTS} --nodes 2 --workers-per-node 3 --set seed=4 --dry-run"
    code, out, err = paceline(*words.split(), "--", "--lr", "0.1")
    assert code == 0, err
    assert out == (
        f"paceline train script.py --engine ssh --workers-per-node 3 {HOSTS} --set seed=4 --nodes 2 "
        "-- --lr 0.1\n"
    )
    assert not (place / "ran").exists()


@pytest.mark.parametrize("time", ["90", "30:00", "2:00:00", "1-12", "1-12:30", "1-12:30:00"])
def test_times_as_slurm_has_them(place, paceline, time):
    code, out, err = paceline("submit", "script.py", "--engine", "slurm", "--time", time, "--dry-run")
    assert (code, f"#SBATCH --time={time}" in out) == (0, True), err
