"""Manifests against the schemas of Kubernetes, version by version, and of JobSet."""

from __future__ import annotations

import pytest
import yaml
from tests.engines.kubernetes.test_manifests import agents, printed, settings

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="the schemas: pip install kubernetes-validate (make test-engines does)"
)

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")


@pytest.mark.parametrize("version", VERSIONS)
def test_strictly_valid(version: str) -> None:
    for kind in ("job", "statefulset"):
        for one in yaml.safe_load_all(printed(kind)):
            kubernetes_validate.validate(one, version, strict=True)
        request = settings(kind=kind, node_selector={"gpu": "yes"}, image_pull_secret="pull").request(
            agents()
        )
        for one in request["objects"]:
            kubernetes_validate.validate(one, version, strict=True)


def test_a_typo_is_found() -> None:
    (job,) = settings().request(agents())["objects"]
    job["spec"]["completion"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.33", strict=True)


def test_job_sets() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="JobSet's models: pip install kubeflow-trainer-api"
    )
    (one,) = yaml.safe_load_all(printed("jobset"))
    read = models.JobsetV1alpha2JobSet.from_dict(one)
    # The models leave out what they do not know: nothing is left out.
    assert read.spec.to_dict() == models.JobsetV1alpha2JobSetSpec.from_dict(one["spec"]).to_dict()
    assert {part.name: part.replicas for part in read.spec.replicated_jobs} == {"head": 1, "agents": 1}
    assert set(one["spec"]) <= {field.alias or name for name, field in type(read.spec).model_fields.items()}
    for part in one["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **part["template"]}
        kubernetes_validate.validate(job, "1.33", strict=True)
