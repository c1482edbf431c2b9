"""Find the API server and the credentials for it: a kubeconfig file, or the service account of the pod that
this process runs in. `kubectl` and this module come to the same answer.

Credentials are read when a request is made and not before: tokens of service accounts expire within the hour,
and those of cloud providers too (credential_plugin.py).
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import yaml

from paceline.core.errors import UnavailableError, UsageError
from paceline.engines.kubernetes.credential_plugin import CredentialPlugin, plugin_of

IN_CLUSTER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_DEFAULT_FILE: Final = "~/.kube/config"
_NOTHING: Final[Mapping[str, str]] = {}


@final
@dataclass(frozen=True)
class ClusterAccess:
    """One cluster and one user of it. `source` names where they were found, for messages."""

    server: str
    namespace: str
    source: str
    cluster: Mapping[str, Any]
    user: Mapping[str, Any]
    folder: Path
    is_in_pod: bool = False
    """Whether this process runs in the cluster: no proxy of the environment is on the way to the server."""

    @property
    def tls_name(self) -> str:
        """Return the name that the server's certificate has in place of its address; mostly empty."""
        return str(self.cluster.get("tls-server-name") or "")

    @property
    def proxy(self) -> str:
        """Return the proxy that the file names; mostly empty."""
        return str(self.cluster.get("proxy-url") or "")

    def tls(self) -> ssl.SSLContext | None:
        """Return the settings of the connection, with the user's certificate; None for plain HTTP."""
        if not self.server.lower().startswith("https:"):
            return None
        try:
            data = base64.b64decode(self.cluster.get("certificate-authority-data") or "").decode()
            # With neither these are the system's authorities.
            file = None if data else self._path(self.cluster, "certificate-authority")
            context = ssl.create_default_context(cafile=file, cadata=data or None)
            # On since Python 3.13. Authorities of clusters (EKS, older GKE, MicroK8s) lack extensions that it
            # wants, and kubectl does without.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if self.cluster.get("insecure-skip-tls-verify"):
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self._load_certificate(context)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the certificates of {self.source} cannot be used: {error}",
                remedy="check certificate-authority, client-certificate and client-key there",
            ) from error
        return context

    def headers(self) -> dict[str, str]:
        """Return the header that proves the user, empty where a certificate does."""
        if self.user.get("username"):
            pair = f"{self.user['username']}:{self.user.get('password', '')}"
            return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
        token = self._token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def impersonation(self) -> list[tuple[str, str]]:
        """Return the headers with which this user acts as another one; a name may stand several times."""
        user = self.user
        found = [("User", user.get("as")), ("Uid", user.get("as-uid"))]
        found += [("Group", group) for group in user.get("as-groups") or ()]
        for key, values in (user.get("as-user-extra") or {}).items():
            found += [(f"Extra-{urllib.parse.quote(key, safe='')}", value) for value in values]
        return [(f"Impersonate-{name}", str(value)) for name, value in found if value]

    def _token(self) -> str:
        if path := self._path(self.user, "tokenFile"):
            try:
                return Path(path).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise UsageError(
                    f"the token of {self.source} cannot be read: {error}",
                    remedy="mount the service account's token, or name another kubeconfig file",
                ) from error
        if token := self.user.get("token"):
            return str(token)
        return str(self.from_plugin().get("token", ""))

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        given = {**self.user, **self._plugin_certificate()}
        chain = self._path(given, "client-certificate")
        if chain:
            context.load_cert_chain(chain, self._path(given, "client-key"))
        elif given.get("client-certificate-data"):
            # `ssl` loads a chain from files only; these can be read by this user alone and are gone at once.
            with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
                files = []
                for name in ("client-certificate-data", "client-key-data"):
                    path = Path(folder, name)
                    path.touch(mode=0o600)
                    path.write_bytes(base64.b64decode(given.get(name, "")))
                    files.append(str(path))
                context.load_cert_chain(*files)

    def _plugin_certificate(self) -> dict[str, str]:
        found = self.from_plugin()
        names = {"clientCertificateData": "client-certificate-data", "clientKeyData": "client-key-data"}
        return {
            field: base64.b64encode(found[name].encode()).decode()
            for name, field in names.items()
            if found.get(name)
        }

    def from_plugin(self) -> Mapping[str, str]:
        """Return what the credential plugin gave, the same object while it is valid; empty where the user
        has credentials of another kind."""
        plugin = self._plugin()
        return _NOTHING if plugin is None else plugin.answer(self.source)

    def forget(self) -> bool:
        """Have a plugin asked anew: the cluster refused what it gave. False where there is none."""
        plugin = self._plugin()
        return plugin is not None and plugin.forget()

    def _plugin(self) -> CredentialPlugin | None:
        if self.user.get("token") or self.user.get("tokenFile") or not self.user.get("exec"):
            return None
        return plugin_of(json.dumps(self.user["exec"], sort_keys=True))

    def _path(self, entry: Mapping[str, Any], name: str) -> str | None:
        value = entry.get(name)
        return str(self.folder / Path(value).expanduser()) if value else None


def find_cluster(
    kubeconfig: str = "", context: str = "", environment: Mapping[str, str] | None = None
) -> ClusterAccess:
    """Return the cluster of a kubeconfig file: the one that is named, those of $KUBECONFIG, or
    ~/.kube/config; where there is none, that of the pod in which this process runs."""
    variables = os.environ if environment is None else environment
    text = kubeconfig or variables.get("KUBECONFIG", "")
    paths = [Path(part).expanduser() for part in text.split(os.pathsep) if part]
    default = Path(_DEFAULT_FILE).expanduser()
    if not paths and default.exists():
        paths = [default]
    existing = [path for path in paths if path.exists()]
    if existing:
        return _from_files(existing, context)
    if kubeconfig:
        raise UsageError(f"there is no file {kubeconfig}", remedy="give the path of a kubeconfig file")
    if variables.get("KUBERNETES_SERVICE_HOST") and (IN_CLUSTER / "token").exists():
        return _from_pod(variables)
    raise UnavailableError(
        f"no Kubernetes cluster is configured: there is no {text or _DEFAULT_FILE}, and this process runs in "
        "no pod that has a service account's token",
        remedy="make `kubectl get pods` work here, or name the file: Kubernetes(kubeconfig=...) or "
        "export KUBECONFIG=FILE",
    )


def _from_pod(variables: Mapping[str, str]) -> ClusterAccess:
    host, port = variables["KUBERNETES_SERVICE_HOST"], variables.get("KUBERNETES_SERVICE_PORT", "443")
    namespace = (IN_CLUSTER / "namespace").read_text(encoding="utf-8").strip()
    return ClusterAccess(
        f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace,
        "this pod's service account",
        {"certificate-authority": "ca.crt"},
        {"tokenFile": "token"},
        IN_CLUSTER,
        is_in_pod=True,
    )


def _from_files(paths: list[Path], context: str) -> ClusterAccess:
    """Merge the files as kubectl does: the first file that has an entry counts."""
    merged: dict[str, dict[str, tuple[Any, Path]]] = {"contexts": {}, "clusters": {}, "users": {}}
    current = ""
    for path in paths:
        content = _content(path)
        current = current or str(content.get("current-context") or "")
        for kind, entries in merged.items():
            for entry in content.get(kind) or ():
                entries.setdefault(str(entry["name"]), (entry.get(kind[:-1]) or {}, path.parent))
    source = os.pathsep.join(map(str, paths))
    wanted = context or current
    if wanted not in merged["contexts"]:
        names = ", ".join(merged["contexts"]) or "none"
        what = f"has no context {wanted!r}" if wanted else "has no current context"
        raise UsageError(
            f"{source} {what} (it has: {names})", remedy="kubectl config use-context NAME, or context=NAME"
        )
    chosen = merged["contexts"][wanted][0]
    cluster, folder = merged["clusters"].get(str(chosen.get("cluster")), ({}, Path()))
    user, user_folder = merged["users"].get(str(chosen.get("user")), ({}, folder))
    if not cluster.get("server"):
        raise UsageError(
            f"{source} names no server for context {wanted!r}", remedy="kubectl config set-cluster ..."
        )
    kind = str(cluster.get("proxy-url") or "http").partition(":")[0]
    if kind != "http":
        raise UsageError(
            f"proxy-url of context {wanted!r} of {source} is a proxy of the kind {kind!r}, which Paceline "
            "cannot use",
            remedy="give a proxy like http://HOST:PORT, or a server that is reached without one",
            key="proxy-url",
        )
    own = {name: str(user_folder / value) for name, value in user.items() if _is_file(name, value)}
    return ClusterAccess(
        str(cluster["server"]).rstrip("/"),
        str(chosen.get("namespace") or "default"),
        f"context {wanted!r} of {source}",
        cluster,
        {**user, **own},
        folder,
    )


def _is_file(name: str, value: object) -> bool:
    return name in ("client-certificate", "client-key", "tokenFile") and isinstance(value, str)


def _content(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}", remedy="give a kubeconfig file") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a kubeconfig file", remedy="give a kubeconfig file")
    return content
