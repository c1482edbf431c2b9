"""One request to an API server over HTTP: to that server and to no other, whatever it answers, by the proxy
and under the name that the kubeconfig file gives.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import ssl
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from paceline.engines.kubernetes.kubeconfig import ClusterAccess

_SECONDS: Final = 15.0
_MOST_BYTES: Final = 64 << 20
_PORTS: Final = {"http": 80, "https": 443}

Headers = Sequence[tuple[str, str]]


@final
@dataclass(frozen=True)
class ApiAnswer:
    """What a server answered; `location`: where it redirects to."""

    status: int
    body: bytes
    location: str


def exchange(
    access: ClusterAccess,
    tls: ssl.SSLContext | None,
    method: str,
    path: str,
    headers: Headers,
    data: bytes | None,
) -> ApiAnswer:
    """Return what the server answers. A redirect is an answer too: the user's credentials go nowhere else.
    OSError, HTTPException or ValueError where no answer comes within 15 seconds."""
    server = urllib.parse.urlsplit(access.server)
    host = server.hostname
    if server.scheme not in _PORTS or not host:
        raise ValueError(f"{access.server!r} is not of the form https://HOST:PORT")
    where, target = (host, server.port or _PORTS[server.scheme]), server.path + path
    proxy = _proxy(access, server.scheme, host)
    if proxy is None:
        connection = _ApiConnection(where, tls, access.tls_name or host)
    else:
        proof = _proof(proxy)
        way = (proxy.hostname or "", proxy.port or _PORTS["http"])
        connection = _ApiConnection(way, tls, access.tls_name or host)
        if tls is None:
            target, headers = access.server + path, [*headers, *proof]
        else:
            connection.set_tunnel(*where, dict(proof))
    with contextlib.closing(connection):
        connection.putrequest(method, target)
        length = [] if data is None else [("Content-Length", str(len(data)))]
        for name, value in (*headers, *length, ("Connection", "close")):
            if "\n" in value or "\r" in value:
                # http.client refuses it too, and says the value, which may be a token.
                raise ValueError(f"the header {name} would have several lines")
            connection.putheader(name, value.encode())
        connection.endheaders(data)
        answer = connection.getresponse()
        return ApiAnswer(answer.status, answer.read(_MOST_BYTES), answer.headers.get("Location", ""))


@final
class _ApiConnection(http.client.HTTPConnection):
    """A connection, with TLS where it has settings for it. The server's certificate has to have `name`."""

    def __init__(self, where: tuple[str, int], tls: ssl.SSLContext | None, name: str) -> None:
        super().__init__(*where, timeout=_SECONDS)
        self._tls, self._name = tls, name

    def connect(self) -> None:
        super().connect()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


def _proxy(access: ClusterAccess, scheme: str, host: str) -> urllib.parse.SplitResult | None:
    """Return the proxy that the kubeconfig file names, else that of the environment; None: there is none on
    the way."""
    text = access.proxy
    if not text and not access.is_in_pod and not _needs_no_proxy(host):
        text = urllib.request.getproxies().get(scheme, "")
    if not text:
        return None
    return urllib.parse.urlsplit(text if "://" in text else f"//{text}")


def _needs_no_proxy(host: str) -> bool:
    """Return whether NO_PROXY has this host, by a name, an address or a network (10.0.0.0/8), which urllib
    does not know."""
    if urllib.request.proxy_bypass(host):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for entry in urllib.request.getproxies().get("no", "").split(","):
        with contextlib.suppress(ValueError):  # a name
            if address in ipaddress.ip_network(entry.strip(), strict=False):
                return True
    return False


def _proof(proxy: urllib.parse.SplitResult) -> list[tuple[str, str]]:
    """Return the header with the user and the password that the proxy's address has."""
    if proxy.username is None:
        return []
    pair = f"{urllib.parse.unquote(proxy.username)}:{urllib.parse.unquote(proxy.password or '')}"
    return [("Proxy-Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")]
