"""What paceline.Ray(...) means for trials, and which share of the GPUs a trial asks of Ray. Needs no Ray."""

from __future__ import annotations

import pytest

import paceline
from paceline.frontends.tuner.ray_trials import cpu_share, gpu_share, settings_of


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
