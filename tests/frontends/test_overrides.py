"""Settings from outside that win over a script's own; what was run; who takes the place of training."""

from __future__ import annotations

import subprocess
import sys

import pytest

import paceline
from paceline.core.errors import ConfigError
from paceline.frontends import overrides
from paceline.frontends.overrides import Command, Overrides, run_script
from paceline.train.settings.train_config import (
    CheckpointConfig,
    EarlyStopping,
    GradientCompression,
    TrainConfig,
)


def slow_start(step: int) -> float:
    return min(1.0, step / 10)


CONFIG = TrainConfig(
    workers=2,
    global_batch=64,
    schedule=slow_start,
    compression=GradientCompression(kind="int8"),
    activation_checkpointing=("Block",),
    checkpoint=CheckpointConfig(keep_last=7, metric="accuracy", mode="max"),
    run_dir="somewhere",
    resume=3,
)


def test_nothing_changes_nothing():
    assert overrides.current().apply(CONFIG) is CONFIG
    assert not overrides.current()


def test_what_is_set_wins_and_the_rest_stays():
    given = Overrides({"workers": 8, "checkpoint.keep_best": 2}, ("checkpoint.keep_last=5", "clip_norm=1e-1"))
    changed = given.apply(CONFIG)
    assert (changed.workers, changed.clip_norm) == (8, 0.1)
    assert changed.checkpoint == CheckpointConfig(keep_last=5, keep_best=2, metric="accuracy", mode="max")
    assert changed.schedule is slow_start
    assert changed.compression == CONFIG.compression
    assert Overrides({"workers": 2, "clip_norm": None}, ("checkpoint.keep_last=7",)).apply(CONFIG) == CONFIG


def test_an_assignment_wins_over_an_option_and_none_takes_away():
    assert Overrides({"workers": 8}, ("workers=3",)).apply(CONFIG).workers == 3
    assert Overrides({}, ("compression=none",)).apply(CONFIG).compression is None
    assert Overrides({}, ("early_stopping.patience=9",)).apply(CONFIG).early_stopping == EarlyStopping(
        patience=9
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("wokers", "did you mean workers?"),
        ("checkpoint.kep_last", "did you mean checkpoint.keep_last?"),
        ("nonsense", "global_batch"),
        ("checkpoint.nonsense", "every_steps"),
        ("workers.nonsense", "set workers itself"),
        ("", "global_batch"),
    ],
)
def test_unknown_names_are_refused_at_once_with_those_that_there_are(name, shown):
    for made in (lambda: Overrides({name: 1}), lambda: Overrides({}, (f"{name}=1",))):
        with pytest.raises(ConfigError) as caught:
            made()
        assert shown in str(caught.value)


@pytest.mark.parametrize("name", ["file", "assignment"])
def test_another_engine_replaces_the_scripts_whole(tmp_path, name):
    file = tmp_path / "settings.toml"
    file.write_text('[engine]\nname = "slurm"\nnodes = 3\n')
    chosen = Overrides(file=str(file))
    if name == "assignment":  # as a file is recorded
        chosen = Overrides({}, chosen.assigned_by_file())
    ray = paceline.Ray(nodes=2, address="auto")
    for config in (TrainConfig(engine=ray), TrainConfig(workers=4), TrainConfig()):
        changed = chosen.apply(config)
        assert (changed.engine, changed.workers) == (paceline.Slurm(nodes=3), 3)
    file.write_text('engine = "slurm"\n')
    changed = Overrides(file=str(file)).apply(TrainConfig(engine=ray))
    assert (changed.engine, changed.workers) == (paceline.Slurm(), 1)


def test_settings_of_the_scripts_own_engine_win_one_by_one(tmp_path):
    file = tmp_path / "settings.toml"
    config = TrainConfig(engine=paceline.Ray(nodes=2, address="auto"))
    for table in ("nodes = 5\n", 'name = "ray"\nnodes = 5\n'):
        file.write_text(f"[engine]\n{table}")
        changed = Overrides(file=str(file)).apply(config)
        assert (changed.engine, changed.workers) == (paceline.Ray(nodes=5, address="auto"), 5)
    file.write_text('workers = 4\n[engine]\nname = "slurm"\nnodes = 3\n')
    with pytest.raises(ConfigError, match="workers=4 on slurm"):
        Overrides(file=str(file)).apply(config)
    alone = Overrides({}, ("engine=none",)).apply(config)
    assert (alone.engine, alone.workers) == (None, 2)


def test_final_settings_win_over_all_others_of_their_name():
    given = Overrides(
        {"workers": 8, "resume": 3, "checkpoint.keep_last": 9},
        ("workers=3", " resume = 4", "epochs=2", "per_gpu.num_gpus=3"),
    )
    changed = given.with_final({"workers": 5, "resume": "auto"})
    assert changed.options == {"checkpoint.keep_last": 9, "workers": 5, "resume": "auto"}
    assert changed.assignments == ("epochs=2", "per_gpu.num_gpus=3")


def test_values_that_do_not_fit_are_refused_when_they_are_applied():
    with pytest.raises(ConfigError, match="--set workers=many"):
        Overrides({}, ("workers=many",)).apply(CONFIG)
    with pytest.raises(ConfigError, match="workers=0"):
        Overrides({"workers": 0}).apply(CONFIG)


def test_in_force_for_the_time_of_a_block():
    with overrides.in_force(Overrides({"workers": 5})):
        assert not overrides.applied()
        assert overrides.current().apply(CONFIG).workers == 5
        assert overrides.applied()
        with overrides.in_force(Overrides({"workers": 6})):
            assert not overrides.applied()
        assert overrides.applied()
    assert not overrides.current()
    assert not overrides.applied()


def test_an_engine_is_known_without_being_used_and_says_how_many_workers_there_are(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('[engine]\nname = "ssh"\nhosts = ["a", "b"]\nworkers_per_node = 3\n')
    with overrides.in_force(Overrides(file=str(file))):
        engine = overrides.current().engine
        assert engine == paceline.Ssh(hosts=("a", "b"), workers_per_node=3)
        assert not overrides.applied()
        assert overrides.current().workers == 6
    assert Overrides({"epochs": 2}).engine is None
    assert Overrides({"epochs": 2}).workers is None
    assert Overrides().engine is None


def test_one_who_takes_the_place_of_training():
    seen = []
    assert overrides.current().replaces_fit is None
    with overrides.in_force(Overrides(replaces_fit=lambda *given: seen.append(given))):
        taken = overrides.current().replaces_fit
        assert taken is not None
        taken("trainer", "data", None)
    assert overrides.current().replaces_fit is None
    assert seen == [("trainer", "data", None)]


def test_the_command_is_known_inside_and_of_plain_scripts(tmp_path):
    given = Command("/x/script.py", ("--fast",), "/x", ("workers=2",))
    with overrides.in_force(Overrides(command=given)):
        assert overrides.command() == given
    assert given.to_plain() == {
        "script": "/x/script.py",
        "arguments": ["--fast"],
        "folder": "/x",
        "settings": ["workers=2"],
    }
    script = tmp_path / "plain.py"
    script.write_text("from paceline.frontends import overrides; print(overrides.command())")
    done = subprocess.run(
        [sys.executable, script, "a", "-b"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.strip() == str(Command(str(script), ("a", "-b"), str(tmp_path)))
    code = "from paceline.frontends import overrides; print(overrides.command())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "None"


def test_a_script_runs_as_main_and_leaves_no_trace(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    script = tmp_path / "script.py"
    script.write_text(
        "# -*- coding: latin-1 -*-\nimport sys, beside\n"
        "class Here: pass\n"
        "with open(sys.argv[1], 'w') as file:\n"
        "    print(__name__, __file__, sys.argv[2:], beside.NAME, Here.__module__,"
        " sys.modules['__main__'].Here is Here, file=file)\n"
    )
    before = sys.modules["__main__"], sys.argv, list(sys.path)
    run_script(str(script), [str(tmp_path / "out"), "a"])
    assert (tmp_path / "out").read_text() == f"__main__ {script} ['a'] beside __main__ True\n"
    assert before == (sys.modules["__main__"], sys.argv, sys.path)
    sys.modules.pop("beside")


def test_workers_win_in_every_door_that_counts_them(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("workers = 5\n")
    for chosen, count in ((Overrides({"workers": 3}), 3), (Overrides(file=str(file)), 5)):
        assert chosen.workers == count
        with overrides.in_force(chosen):
            assert paceline.DistributedTrainingOrchestrator(num_workers=2).num_workers == count
            assert paceline.DistributedConfig(num_gpus=2).workers == count
            assert overrides.applied()
    assert paceline.DistributedTrainingOrchestrator(num_workers=2).num_workers == 2
