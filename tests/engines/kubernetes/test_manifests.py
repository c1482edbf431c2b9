"""Manifests as plain data and as YAML. The files beside this one are what `paceline submit --dry-run` prints;
`python -m tests.engines.kubernetes.test_manifests` writes them again."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.clusters.kubernetes.expansion import expanded

import paceline
from paceline.core.errors import ConfigError, UsageError
from paceline.engines.batch import BatchSpec
from paceline.engines.engine import AgentSpec
from paceline.engines.kubernetes import manifests
from paceline.frontends.overrides import Overrides

FOLDER = Path(__file__).parent
KINDS = ("job", "statefulset", "jobset")


def settings(**changes: Any) -> paceline.Kubernetes:
    return paceline.Kubernetes(
        **{"image": "registry.example/team/train:1", "volumes": {"/runs": "training"}, **changes}
    )


def printed(kind: Any) -> str:
    job = BatchSpec(
        script="train.py",
        arguments=("--lr", "0.1 and more"),
        options=("--epochs", "3"),
        name="My run",
        nodes=3,
        workers_per_node=2,
        gpus_per_node=2,
        time="" if kind == "statefulset" else "2:00:00",
        environment={"OMP_NUM_THREADS": "1"},
    )
    return settings(kind=kind, cpus="8", memory="32Gi", namespace="ml").batch_text(job)


def agents(**changes: Any) -> AgentSpec:
    return AgentSpec(
        **{"run": "run 7", "address": ("10.0.0.9", 41000), "nodes": 4, "workers_per_node": 2, **changes}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_submitted_is_what_it_was(kind: str) -> None:
    assert printed(kind) == (FOLDER / f"{kind}.yaml").read_text()


def test_agents_of_a_run_that_is_supervised_elsewhere() -> None:
    request = settings(gpus_per_node=2).request(agents(gpus_per_node=2))
    (job,) = request["objects"]
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    container = spec["template"]["spec"]["containers"][0]
    assert container["command"] == [
        *("python3", "-m", "paceline", "join", "10.0.0.9:41000"),
        *("--token-file", "/var/run/paceline/token", "--workers", "2"),
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    # JsonObject data: what is printed is what is sent.
    assert yaml.safe_load(yaml.safe_dump(request)) == request


def test_the_token_is_in_no_manifest_and_no_command() -> None:
    for kind in KINDS:
        for one in yaml.safe_load_all(printed(kind)):
            assert one["kind"] != "Secret"
    assert "--token-file" in printed("job")


def test_the_pod_has_no_rights() -> None:
    (job,) = settings().request(agents())["objects"]
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    assert writable == {"tmp", "shared-memory"}
    token = next(volume for volume in pod["volumes"] if volume["name"] == "token")
    assert token["secret"] == {"secretName": "run-7-token", "defaultMode": 0o400}


@pytest.mark.parametrize(
    ("text", "name"),
    [("My run", "my-run"), ("7 nodes", "run-7-nodes"), ("___", "run"), ("x" * 99, "x" * 45), ("a--b", "a-b")],
)
def test_names_are_those_of_kubernetes(text: str, name: str) -> None:
    assert manifests.object_name(text) == name


@pytest.mark.parametrize("kind", ["job", "statefulset"])
def test_another_name_is_the_objects_own_and_what_the_user_chose_stays(kind: str) -> None:
    """A run is called "train" by default, and so are claims, pools and namespaces."""
    chosen: dict[str, Any] = {
        "namespace": "train",
        "volumes": {"/runs": "train"},
        "node_selector": {"pool": "train"},
        "service_account": "train",
        "image_pull_secret": "train-token",
        "labels": {"app": "train"},
        "image": "train",
    }
    (owner,) = settings(kind=kind, **chosen).request(agents(run="train"))["objects"]
    again = manifests.renamed(owner, "train-abc")
    # Under the other name everything is as if the run had that name.
    (expected,) = settings(kind=kind, **chosen).request(agents(run="train-abc"))["objects"]
    assert again == expected
    assert owner["metadata"]["name"] == "train"
    pod = again["spec"]["template"]["spec"]
    assert again["metadata"]["namespace"] == "train"
    assert pod["volumes"][-1]["persistentVolumeClaim"] == {"claimName": "train"}
    assert pod["nodeSelector"] == {"pool": "train"}
    assert again["metadata"]["labels"] == {manifests.RUN_LABEL: "train-abc", "app": "train"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "deployment"}, "kind is"),
        ({"nodes": 0}, "nodes=0"),
        ({"user": 0}, "user=0"),
        ({"memory": "much"}, "no quantity"),
        ({"namespace": "My_Space"}, "no name of Kubernetes"),
        ({"volumes": {"runs": "claim"}}, "no folder of a pod"),
        ({"volumes": {"/runs": "data..v1"}}, "no name of Kubernetes"),
        ({"volumes": {"/runs": "d" * 254}}, "no name of Kubernetes"),
        ({"port": 0}, "port=0"),
        ({"port": 65536}, "port=65536"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(**changes)


def test_names_of_claims_may_have_dots() -> None:
    assert settings(volumes={"/runs": "data.v1"}).volumes == {"/runs": "data.v1"}


@pytest.mark.parametrize("text", ["$$", "$$$", "$(POD_IP)", "a$(b)$$(c)$", "$$1", "$HOME ${HOME}", "$(", "$"])
def test_texts_of_a_user_are_not_replaced(text: str) -> None:
    job = BatchSpec(script="train.py", arguments=(text,), environment={"TEXT": text})
    for kind in ("job", "statefulset"):
        _, owner = yaml.safe_load_all(settings(kind=kind).batch_text(job))
        container = owner["spec"]["template"]["spec"]["containers"][0]
        script = expanded(container["command"][-1], {"POD_IP": "10.0.0.1"})
        assert f"-- {shlex.quote(text)};;" in script
        assert '"fault_tolerance.bind=$POD_IP"' in script
        (given,) = [one["value"] for one in container["env"] if one["name"] == "TEXT"]
        assert expanded(given, {"POD_IP": "10.0.0.1"}) == text


def _script_of_pod_0(kind: str) -> str:
    *_, owner = yaml.safe_load_all(printed(kind))
    if kind == "jobset":
        owner = owner["spec"]["replicatedJobs"][0]["template"]
    return str(owner["spec"]["template"]["spec"]["containers"][0]["command"][-1])


def test_pod_0_starts_no_engine() -> None:
    """The script, or its file of settings, may name the one that it was handed over to."""
    own = paceline.TrainConfig(engine=settings(nodes=3, workers_per_node=4))
    for kind in KINDS:
        words = shlex.split(_script_of_pod_0(kind))
        texts = [text for name, text in itertools.pairwise(words) if name == "--set"]
        assert texts[-2:] == ["engine=none", "fault_tolerance.bind=$POD_IP"]
        applied = Overrides({"workers": 6}, tuple(texts)).apply(own)
        assert (applied.engine, applied.workers) == (None, 6)


def test_a_job_set_that_has_ended_is_not_kept_for_ever() -> None:
    (one,) = yaml.safe_load_all(printed("jobset"))
    assert one["spec"]["ttlSecondsAfterFinished"] == manifests.KEPT_SECONDS


def test_no_image_no_pod() -> None:
    with pytest.raises(UsageError, match="no container image"):
        settings(image="").batch_text(BatchSpec(script="train.py"))
    with pytest.raises(UsageError, match="paceline submit"):
        settings(kind="jobset").request(agents())


if __name__ == "__main__":
    for each in KINDS:
        (FOLDER / f"{each}.yaml").write_text(printed(each))


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_limit_of_0_is_none(kind: Any) -> None:
    text = paceline.Kubernetes(image="i", kind=kind).batch_text(BatchSpec(script="train.py", time="0"))
    assert "activeDeadlineSeconds" not in text
    text = paceline.Kubernetes(image="i", kind=kind).batch_text(BatchSpec(script="train.py", time="0:30"))
    assert "activeDeadlineSeconds: 30" in text
