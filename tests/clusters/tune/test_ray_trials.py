"""Trials on a real local Ray cluster: the trials of this machine, kills, pruning, spaces of ray.tune."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.waiting import wait_for

import paceline
from paceline.core.process_state import has_ended
from paceline.frontends.tuner.search_space import SearchSpace

ray = pytest.importorskip("ray", reason="make test-engines installs Ray")
pytest.importorskip("optuna", reason="pip install 'paceline[tune]'")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.leaky("Ray's processes and connections belong to the module's cluster"),
    # Ray's own: it leaves sockets and files of its processes to the interpreter's end.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

X = {"x": paceline.tune.uniform(-3, 3)}


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    """A cluster of one node with two CPUs and, as far as Ray knows, two GPUs; its value is the folder in
    which it began."""
    path = os.pathsep.join([os.path.abspath("src"), os.path.abspath(".")])
    with contextlib.chdir(tmp_path_factory.mktemp("node")):
        ray.init(
            num_cpus=2,
            num_gpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )
        folder = Path.cwd()
    yield folder
    ray.shutdown()


def tuner(function, folder, engine="ray", **more) -> paceline.DistributedTuner:
    settings = {"num_gpus": 2, "seed": 4, "study": folder / str(engine), "verbose": False, **more}
    return paceline.DistributedTuner(function, X, engine=engine, **settings)


def outcome(search):
    return [(one.number, one.params, one.state, one.value, one.reports) for one in search.trials]


def test_the_same_trials_as_on_this_machine(tmp_path):
    def train(params):
        paceline.tune.report(0, params["x"])
        if params["x"] > 2:
            raise ValueError("too much")
        return {"score": -((params["x"] - 1) ** 2)}

    searches = [tuner(train, tmp_path, engine, metric="score") for engine in ("ray", "local")]
    for search in searches:
        search.tune(14)
    assert outcome(searches[0]) == outcome(searches[1])
    failed = [trial for trial in searches[0].trials if trial.state == "failed"]
    assert failed
    assert all(trial.error.strip().endswith("ValueError: too much") for trial in failed)


def test_a_killed_worker_repeats_its_trial(tmp_path):
    """And Ray ends what the trial had started."""
    mark = tmp_path / "killed"

    def train(params):
        paceline.tune.report(0, 5.0 if mark.exists() else 1000.0)
        if paceline.tune.folder().name == "0001" and not mark.exists():
            mark.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return params["x"]

    search = tuner(train, tmp_path)
    search.tune(6)
    wait_for(lambda: has_ended(int(mark.read_text())), "the killed trial's child lives on")
    assert [trial.state for trial in search.trials] == ["complete"] * 6
    assert all(trial.value == trial.params["x"] for trial in search.trials)
    assert search.trials[1].reports == {0: 5.0}


def test_nodes_without_the_searchs_folder_have_folders_of_their_own(tmp_path, monkeypatch, cluster):
    def train(params):
        paceline.tune.report(0, 1.0)
        (tmp_path / "where").write_text(f"{paceline.tune.folder()} {Path.cwd()}")
        return params["x"]

    monkeypatch.chdir(tmp_path)
    # The node is this machine: only a name is not there as well. In /proc root can make no folder either.
    monkeypatch.setattr(os, "getcwd", lambda: "/proc/alice/project")
    search = tuner(train, Path("studies"))
    search.tune(1)
    assert [trial.error for trial in search.trials] == [""]
    folder = cluster / "studies" / "ray" / "trials" / "0000"
    assert (tmp_path / "where").read_text() == f"{folder} {cluster}"
    assert (folder / "output.log").exists()


@pytest.mark.parametrize(
    ("trials_per_gpu", "slots", "devices"),
    [(2, 4, ["0", "0", "1", "1"]), (1, 2, ["0", "1"]), (0.5, 1, ["0,1"])],
)
def test_trials_at_once_and_their_gpus(tmp_path, trials_per_gpu, slots, devices):
    def train(params):
        number = int(paceline.tune.folder().name)
        given = os.environ["CUDA_VISIBLE_DEVICES"]
        (tmp_path / f"here-{number}").write_text(given)
        if number < slots:
            wait_for(lambda: len([*tmp_path.glob("here-*")]) >= slots, "the other trials did not come")
        elif slots == 1:
            assert (tmp_path / "over-0").exists(), "two at once"
        (tmp_path / f"over-{number}").touch()
        return params["x"]

    search = tuner(train, tmp_path, trials_per_gpu=trials_per_gpu, sampler="random")
    search.tune(max(slots, 2))
    assert {trial.error for trial in search.trials} == {""}
    assert sorted((tmp_path / f"here-{number}").read_text() for number in range(slots)) == devices


def test_each_trial_has_a_process_and_leaves_none(tmp_path):
    def train(params):
        begun = [subprocess.Popen(["sleep", "1000"], start_new_session=apart).pid for apart in (False, True)]
        # Their parent has ended already.
        shell = subprocess.run(
            ["sh", "-c", "setsid sleep 1000 >&- 2>&- & echo $!"], capture_output=True, check=True
        )
        number = int(paceline.tune.folder().name)
        (tmp_path / f"pids-{number}").write_text(f"{os.getpid()} {begun[0]} {begun[1]} {int(shell.stdout)}")
        os.chdir("/")
        if number == 1:
            raise ValueError("too much")
        return params["x"]

    search = tuner(train, tmp_path, sampler="random")
    search.tune(3)
    assert sorted(trial.state for trial in search.trials) == ["complete"] * 2 + ["failed"]
    pids = [list(map(int, (tmp_path / f"pids-{number}").read_text().split())) for number in range(3)]
    assert len({own for own, *_ in pids}) == 3
    assert all(has_ended(pid) for _, *begun in pids for pid in begun)
    wait_for(lambda: all(has_ended(own) for own, *_ in pids), "a trial's worker lives on")


def test_a_function_that_no_worker_can_load_ends_it(tmp_path, monkeypatch):
    (tmp_path / "known_here_alone.py").write_text("def train(params):\n    return params['x']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import known_here_alone  # type: ignore[import-not-found]

    with pytest.raises(
        paceline.UnavailableError,
        match=r"cannot load train_fn on [\d.]+: .*No module named 'known_here_alone'",
    ):
        tuner(known_here_alone.train, tmp_path).tune(4)


def test_trials_have_the_runtime_env(tmp_path):
    def train(params):
        return float(os.environ["GIVEN"])

    engine = paceline.Ray(runtime_env={"env_vars": {"GIVEN": "7"}})
    search = tuner(train, tmp_path, engine, study=tmp_path / "study")
    search.tune(1)
    assert search.best_value == 7.0
    engine = paceline.Ray(runtime_env={"working_dir": str(tmp_path)})
    with pytest.raises(paceline.ConfigError, match="Ray refuses this runtime_env"):
        tuner(train, tmp_path, engine, study=tmp_path / "other").tune(1)


def test_pruning_and_the_end_of_the_search(tmp_path):
    def train(params):
        for step in range(1, 30):
            paceline.tune.report(step, params["x"] * step)

    search = tuner(train, tmp_path, pruner="asha", sampler="random")
    search.tune(12)
    pruned = [trial for trial in search.trials if trial.state == "pruned"]
    assert pruned
    assert all(len(trial.reports) < 29 for trial in pruned)


def test_what_no_search_can_judge_ends_it(tmp_path):
    with pytest.raises(paceline.UsageError, match="returned no 'accuracy', only loss"):
        tuner(lambda params: {"loss": 1.0}, tmp_path, metric="accuracy").tune(2)


def test_spaces_of_ray_tune():
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from ray import tune

    space = SearchSpace.of(
        {
            "a": tune.uniform(0, 1),
            "b": tune.loguniform(1e-4, 1e-1),
            "c": tune.randint(1, 5),
            "d": tune.choice(["sgd", "adam"]),
            "e": tune.quniform(0, 1, 0.25),
            "f": tune.lograndint(1, 100),
            "g": tune.grid_search([1, 2]),
            "h": tune.qrandint(0, 10, 5),
        }
    )
    assert space.distributions == {
        "a": FloatDistribution(0, 1),
        "b": FloatDistribution(1e-4, 1e-1, log=True),
        "c": IntDistribution(1, 4),
        "d": CategoricalDistribution(["sgd", "adam"]),
        "e": FloatDistribution(0, 1, step=0.25),
        "f": IntDistribution(1, 99, log=True),
        "g": CategoricalDistribution([1, 2]),
        "h": IntDistribution(0, 10, step=5),
    }
    with pytest.raises(paceline.ConfigError, match="which has no counterpart here"):
        SearchSpace.of({"a": tune.randn(0, 1)})
    with pytest.raises(paceline.ConfigError, match="which has no counterpart here"):
        SearchSpace.of({"a": tune.sample_from(lambda spec: 1)})
