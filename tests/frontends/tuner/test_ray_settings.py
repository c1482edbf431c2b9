"""What paceline.Ray(...) means for trials, which share of a node a trial asks of Ray, and what a failed task
means. Needs no Ray."""

from __future__ import annotations

import pytest
from tests.engines.ray.scripted_ray import (
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    RuntimeEnvSetupError,
    ScriptedRay,
    TaskCancelledError,
)

import paceline
from paceline.frontends.tuner.ray_trials import (
    cpu_share,
    describe_wait,
    gpu_share,
    settings_of,
    why_not_begun,
)


def test_what_means_something_for_trials_is_kept():
    given = paceline.Ray(address="head:6379", runtime_env={"pip": ["x"]}, autoscales=True)
    found = settings_of(given, None)
    assert (found.address, found.runtime_env, found.autoscales) == ("head:6379", {"pip": ["x"]}, True)
    assert settings_of(given, "auto").address == "auto"
    assert settings_of("ray", None).address == "local"
    assert settings_of(paceline.Ray(), None).address is None


@pytest.mark.parametrize(
    ("engine", "address", "said"),
    [
        (
            paceline.Ray(resources={"fast_disk": 1}),
            None,
            r"paceline\.Ray\(resources=.* means nothing for trials",
        ),
        (paceline.Ray(nodes=2, gpus_per_node=1), None, "leave out nodes and gpus_per_node"),
        ("ray", 3, "ray_address=3"),
    ],
)
def test_what_means_nothing_is_refused(engine, address, said):
    with pytest.raises(paceline.ConfigError, match=said):
        settings_of(engine, address)


def test_a_trial_has_its_gpus_on_one_node():
    nodes = [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}]
    shares = [gpu_share(number, nodes, autoscales=False) for number in (4, 1, 0.5)]
    assert shares == [{"num_gpus": 0.25}, {"num_gpus": 1}, {"num_gpus": 2}]
    with pytest.raises(paceline.UsageError, match=r"needs 4 GPUs of one node, and no node .* more than 2"):
        gpu_share(0.25, nodes, autoscales=False)
    assert gpu_share(0.25, nodes, autoscales=True) == {"num_gpus": 4}


def test_a_trial_has_the_cpus_of_a_slot_or_one_where_nodes_are_to_come():
    assert cpu_share(8, 16, autoscales=False) == {"num_cpus": 0.5}
    assert cpu_share(8, 2, autoscales=False) == {"num_cpus": 1.0}
    assert cpu_share(1, 8, autoscales=True) == {"num_cpus": 1.0}


def test_an_address_that_no_engine_reads_is_refused():
    with pytest.raises(
        paceline.ConfigError, match=r"ray_address='ray://h:1' .* nothing to the engine 'local'"
    ) as caught:
        paceline.DistributedTuner(print, {"x": [1]}, ray_address="ray://h:1")
    assert "(--engine ray)" in caught.value.remedy
    for engine in ("ray", paceline.Ray()):
        paceline.DistributedTuner(print, {"x": [1]}, ray_address="ray://h:1", engine=engine)


@pytest.mark.parametrize(
    ("cpus", "nodes", "said"),
    [
        (0.5, [{"CPU": 8.0}, {}], ""),
        (1.0, [{"CPU": 1.0}], ""),
        (
            1.0,
            [{"memory": 1e9}],
            "each needs CPU 1, and the Ray cluster's 1 node has CPU 0, at most 0 on",
        ),
        (1.0, [{"CPU": 0.5}] * 4, "the Ray cluster's 4 nodes have CPU 2, at most 0.5 on one"),
        (0.25, [], "the Ray cluster's 0 nodes have CPU 0"),
    ],
)
def test_trials_that_wait_for_a_node_say_so(cpus, nodes, said):
    found = describe_wait(cpus, nodes)
    assert (said in found) if said else not found


class ActorInitError(RayActorError):
    actor_init_failed = True


IMPORT = "ray::run_on_ray() (pid=7, ip=10.0.0.3)\nModuleNotFoundError: No module named 'paceline'"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RayTaskError(RuntimeError("failed to import"), IMPORT), "begin a trial on 10.0.0.3: ModuleNotFound"),
        (RayTaskError(RaySystemError(), IMPORT), "cannot load train_fn on 10.0.0.3: ModuleNotFound"),
        (RuntimeEnvSetupError("no pip"), "runtime_env cannot be set up: no pip"),
        (RayTaskError(TaskCancelledError(), "KeyboardInterrupt"), ""),
        (RayError("the worker died"), ""),
        (RayActorError("the node of the actor died"), ""),
        (ActorInitError(IMPORT), "actor for the search's reports cannot begin on 10.0.0.3: ModuleNotFound"),
    ],
)
def test_a_node_that_can_run_no_trial_is_no_lost_process(error, said):
    found = why_not_begun(error, ScriptedRay().exceptions)
    assert (found is None) if not said else (found is not None and said in found.message)
