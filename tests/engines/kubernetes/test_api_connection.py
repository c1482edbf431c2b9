"""Where requests go, and with which headers."""

from __future__ import annotations

import base64
import dataclasses
import ssl
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.kubernetes.certificates import certificates
from tests.engines.kubernetes.scripted_api import ScriptedApi

from paceline.core.errors import UnavailableError, UsageError
from paceline.engines.kubernetes.api_client import ApiClient, ApiError
from paceline.engines.kubernetes.kubeconfig import ClusterAccess

PODS = "/api/v1/namespaces/ml/pods"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_a_redirect_is_not_followed(api: ScriptedApi) -> None:
    """It would take the token along, to a server of another's choice."""
    with ScriptedApi().serving() as other:
        api.fault = lambda method, path: f"{other.address}/login?code=secret"
        with pytest.raises(ApiError, match=r"it redirects to 127.0.0.1 \(302\)") as told:
            api.client({"token": "abc"}).get(PODS)
        assert other.requests == []
    assert "secret" not in str(told.value)
    assert "log in to the cluster again" in told.value.remedy


def test_a_user_who_acts_as_another_one(api: ScriptedApi) -> None:
    user = {
        "token": "abc",
        "as": "zo\u00eb",
        "as-uid": "7",
        "as-groups": ["system:masters", "ml"],
        "as-user-extra": {"example.org/scope": ["view", "edit"]},
    }
    api.client(user).get(PODS)
    ((*given,),) = api.headers
    sent = [(name, value) for name, value in given if name.startswith("Impersonate-")]
    assert sent == [
        ("Impersonate-User", "zo\u00eb".encode().decode("latin-1")),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "system:masters"),
        ("Impersonate-Group", "ml"),
        ("Impersonate-Extra-example.org%2Fscope", "view"),
        ("Impersonate-Extra-example.org%2Fscope", "edit"),
    ]


def test_the_proxy_of_the_file_is_used_whatever_the_environment_says(
    api: ScriptedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "api.example")
    proxy = api.address.replace("//", "//me:a%20word@")
    client = api.client({"token": "abc"}, {"proxy-url": proxy}, "http://api.example:6443")
    assert client.get(PODS) == {"items": []}
    sent = dict(api.headers[0])
    assert sent["Host"] == "api.example:6443"
    assert base64.b64decode(sent["Proxy-Authorization"].removeprefix("Basic ")) == b"me:a word"


def test_certificates_that_cannot_be_used_are_named() -> None:
    """The server is not at fault, which is not reached with them."""
    cluster = {"certificate-authority-data": "bm9uZQ=="}
    with pytest.raises(UsageError, match="the certificates of the test cannot be used"):
        ApiClient(ClusterAccess("https://127.0.0.1", "ml", "the test", cluster, {}, Path())).get(PODS)


@pytest.mark.parametrize("none", ["127.0.0.0/8", "10.0.0.0/8, 127.0.0.1/32", "127.0.0.1"])
def test_networks_without_a_proxy(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch, none: str) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        api.client().get(PODS)
    monkeypatch.setenv("no_proxy", none)
    assert api.client().get(PODS) == {"items": []}


def test_no_proxy_leads_from_a_pod_to_its_cluster(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)
    access = dataclasses.replace(api.client().access, is_in_pod=True)
    assert ApiClient(access).get(PODS) == {"items": []}


def test_the_name_in_the_certificate_is_that_of_the_file(tmp_path: Path) -> None:
    authority, tls = certificates(["10.9.9.9"], tmp_path)
    trusted = {"certificate-authority-data": base64.b64encode(authority).decode()}
    with ScriptedApi(tls).serving() as api:
        with pytest.raises(UnavailableError, match="IP address mismatch"):
            api.client(cluster=trusted).get(PODS)
        named = {**trusted, "tls-server-name": "10.9.9.9"}
        assert api.client(cluster=named).get(PODS) == {"items": []}


def test_a_token_of_several_lines_is_in_no_message(api: ScriptedApi) -> None:
    with pytest.raises(UnavailableError, match="the header Authorization would have several lines") as told:
        api.client({"token": "hunter2\nhunter3"}).get(PODS)
    assert "hunter" not in str(told.value)


@pytest.mark.parametrize("to", ["/login", "http://[x"])
def test_redirects_to_no_other_host(api: ScriptedApi, to: str) -> None:
    api.fault = lambda method, path: to
    with pytest.raises(ApiError, match="it redirects to another page"):
        api.client().get(PODS)


def test_an_address_of_another_kind(api: ScriptedApi) -> None:
    with pytest.raises(UnavailableError, match=r"'api\.example' is not of the form https://HOST:PORT"):
        api.client(server="api.example").get(PODS)


def test_only_the_clusters_authority_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = ssl.create_default_context

    def as_in_3_13(**given: Any) -> ssl.SSLContext:
        context = default(**given)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_in_3_13)
    own, other = (certificates(["127.0.0.1"], tmp_path)[0] for _ in range(2))
    (tmp_path / "ca.crt").write_bytes(other)
    data = {"certificate-authority-data": base64.b64encode(own).decode()}
    for cluster, trusted in (
        (data, own),
        ({**data, "certificate-authority": "ca.crt"}, own),  # as with kubectl
        ({"certificate-authority": "ca.crt"}, other),
    ):
        context = ClusterAccess("https://127.0.0.1", "ml", "the test", cluster, {}, tmp_path).tls()
        assert context is not None
        assert context.get_ca_certs(binary_form=True) == [ssl.PEM_cert_to_DER_cert(trusted.decode())]
        assert not context.verify_flags & ssl.VERIFY_X509_STRICT
