"""Where the API server is, and with which credentials."""

from __future__ import annotations

import json
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from tests.engines.kubernetes.scripted_api import ScriptedApi
from tests.virtual_clock import VirtualClock

from paceline.core.errors import UnavailableError, UsageError
from paceline.engines.kubernetes import kubeconfig
from paceline.engines.kubernetes.access_check import own_address
from paceline.engines.kubernetes.api_client import ApiError
from paceline.engines.kubernetes.credential_plugin import CredentialPlugin
from paceline.engines.kubernetes.kubeconfig import find_cluster


def written(path: Path, user: dict[str, object], *, context: str = "here", current: bool = True) -> Path:
    content = {
        "contexts": [
            {"name": context, "context": {"cluster": "c", "user": f"u-{context}", "namespace": "ml"}}
        ],
        "clusters": [{"name": "c", "cluster": {"server": "https://api.example:6443/"}}],
        "users": [{"name": f"u-{context}", "user": user}],
        **({"current-context": context} if current else {}),
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_token_and_a_namespace(tmp_path: Path) -> None:
    found = find_cluster(str(written(tmp_path / "config", {"token": "abc"})))
    assert (found.server, found.namespace) == ("https://api.example:6443", "ml")
    assert found.headers() == {"Authorization": "Bearer abc"}


def test_a_token_file_beside_the_config_is_read_anew(tmp_path: Path) -> None:
    found = find_cluster(str(written(tmp_path / "config", {"tokenFile": "token"})))
    for text in ("first", "second"):
        (tmp_path / "token").write_text(f"{text}\n")
        assert found.headers() == {"Authorization": f"Bearer {text}"}
    (tmp_path / "token").unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        found.headers()


def test_a_plugin_gives_the_token(tmp_path: Path) -> None:
    program = (
        "import json, os; json.loads(os.environ['KUBERNETES_EXEC_INFO']);"
        "print(json.dumps({'status': {'token': os.environ['WHO']}}))"
    )
    plugin = {"command": sys.executable, "args": ["-c", program], "env": [{"name": "WHO", "value": "cloud"}]}
    found = find_cluster(str(written(tmp_path / "config", {"exec": plugin})))
    assert found.headers() == {"Authorization": "Bearer cloud"}


def test_a_plugin_that_fails_says_why(tmp_path: Path) -> None:
    plugin = {"command": sys.executable, "args": ["-c", "raise SystemExit('please log in')"]}
    found = find_cluster(str(written(tmp_path / "config", {"exec": plugin})))
    with pytest.raises(UnavailableError, match="please log in"):
        found.headers()


def test_arguments_of_a_plugin_are_in_no_message(tmp_path: Path) -> None:
    plugin = {"command": sys.executable, "args": ["-c", "raise SystemExit(3)", "--client-secret=hunter2"]}
    found = find_cluster(str(written(tmp_path / "config", {"exec": plugin})))
    with pytest.raises(UnavailableError, match="it ended with code 3") as told:
        found.headers()
    assert "hunter2" not in "".join(traceback.format_exception(told.value))


def test_several_files_are_one(tmp_path: Path) -> None:
    first = written(tmp_path / "first", {"token": "1"}, current=False)
    second = written(tmp_path / "second", {"token": "2"}, context="there")
    both = {"KUBECONFIG": f"{first}:{second}:{tmp_path / 'missing'}"}
    assert find_cluster(environment=both).headers() == {"Authorization": "Bearer 2"}
    assert find_cluster(context="here", environment=both).headers() == {"Authorization": "Bearer 1"}


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UnavailableError, match="no Kubernetes cluster is configured"):
        find_cluster(environment={})
    with pytest.raises(UsageError, match="there is no file"):
        find_cluster(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="has no context 'prod'"):
        find_cluster(str(written(tmp_path / "config", {})), "prod")
    (tmp_path / "config").write_text("just words")
    with pytest.raises(UsageError, match="not a kubeconfig file"):
        find_cluster(str(tmp_path / "config"))


def test_a_proxy_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "config", {})
    content = yaml.safe_load(path.read_text())
    content["clusters"][0]["cluster"]["proxy-url"] = "socks5://me:hunter2@127.0.0.1:1080"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UsageError, match=r"proxy-url of context 'here' .* of the kind 'socks5'") as told:
        find_cluster(str(path))
    assert "hunter2" not in str(told.value)


def test_in_a_pod_the_service_account_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "IN_CLUSTER", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text("pod")
    (tmp_path / "namespace").write_text("ml\n")
    found = find_cluster(environment={"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"})
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "ml")
    assert found.headers() == {"Authorization": "Bearer pod"}
    assert found.is_in_pod


def test_the_address_on_the_way_to_the_server() -> None:
    assert own_address("https://127.0.0.1:6443") == "127.0.0.1"
    with pytest.raises(UnavailableError, match="no way leads"):
        own_address("https://no-such-host.invalid:6443")


def plugin_that_counts(folder: Path, **more: object) -> dict[str, object]:
    """A plugin whose token is the number of times that it was asked."""
    program = (
        "import json, pathlib, sys; file = pathlib.Path(sys.argv[1]);"
        "count = int(file.read_text()) + 1 if file.exists() else 1; file.write_text(str(count));"
        "print(json.dumps({'status': {'token': str(count), **json.loads(sys.argv[2])}}))"
    )
    return {"command": sys.executable, "args": ["-c", program, str(folder / "count"), json.dumps(more)]}


def test_a_plugin_is_asked_once_until_its_answer_expires(tmp_path: Path) -> None:
    clock = VirtualClock(datetime(2026, 1, 2, 3, 0, tzinfo=UTC).timestamp())
    plugin = CredentialPlugin(plugin_that_counts(tmp_path, expirationTimestamp="2026-01-02T04:00:00Z"), clock)
    assert [plugin.answer("here")["token"] for _ in range(3)] == ["1", "1", "1"]
    clock.advance(3600.0)
    assert plugin.answer("here")["token"] == "2"


def test_a_plugin_is_asked_again_when_the_server_refuses_its_token(tmp_path: Path, api: ScriptedApi) -> None:
    user = {"exec": plugin_that_counts(tmp_path)}
    pods = "/api/v1/namespaces/ml/pods"
    for _ in range(2):
        api.client(user).get(pods)  # also another client of this process
    refused = iter([401, None])
    api.fault = lambda method, path: next(refused)
    assert api.client(user).get(pods) == {"items": []}
    assert api.tokens == ["Bearer 1", "Bearer 1", "Bearer 1", "Bearer 2"]
    api.fault = lambda method, path: 401
    with pytest.raises(ApiError, match="401"):
        api.client(user).get(pods)
