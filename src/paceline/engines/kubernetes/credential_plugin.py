"""Credential plugins: `exec` of a kubeconfig file (EKS, GKE, AKS, OIDC). A plugin is a program that takes a
second or talks to a cloud, so that what it gives is kept for as long as it is valid, as `kubectl` does.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, final

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import UnavailableError

_PLUGIN_SECONDS: Final = 60.0
_EXEC_INFO: Final = "KUBERNETES_EXEC_INFO"


@final
class CredentialPlugin:
    """One plugin with its arguments and variables."""

    def __init__(self, settings: Mapping[str, Any], clock: Clock | None = None) -> None:
        self._settings, self._clock = settings, clock or WallClock()
        self._kept: Mapping[str, str] | None = None

    def answer(self, source: str) -> Mapping[str, str]:
        """Return what the plugin gave, the same object until it expires; without a time that is when the API
        server refuses it. `source`: where the plugin is named, for messages."""
        kept = self._kept
        if kept is None or self._has_expired(kept):
            kept = self._kept = self._ask(source)
        return kept

    def forget(self) -> bool:
        """Have the next answer be a new one; return whether one was kept."""
        was_kept, self._kept = self._kept is not None, None
        return was_kept

    def _has_expired(self, answer: Mapping[str, str]) -> bool:
        text = answer.get("expirationTimestamp")
        return bool(text) and self._clock.now() >= datetime.fromisoformat(str(text)).timestamp()

    def _ask(self, source: str) -> Mapping[str, str]:
        plugin = self._settings
        version = plugin.get("apiVersion", "client.authentication.k8s.io/v1")
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
        environment = {entry["name"]: entry["value"] for entry in plugin.get("env") or ()}
        command = [str(plugin.get("command", "")), *(plugin.get("args") or ())]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment, _EXEC_INFO: json.dumps(info)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PLUGIN_SECONDS,
                check=True,
            )
            found = dict(json.loads(done.stdout)["status"])
            self._has_expired(found)  # a time that cannot be read is a mistake of the plugin
            return found
        # What the standard library says of a command that failed has its arguments, which may be secrets.
        except subprocess.TimeoutExpired:
            told = f"it did not end within {_PLUGIN_SECONDS:g} s (does it wait for a login?)"
        except subprocess.CalledProcessError as error:
            told = str(error.stderr).strip() or f"it ended with code {error.returncode}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            told = str(error)
        raise UnavailableError(
            f"the credential plugin `{command[0]}` of {source} gave no credentials: {told}",
            remedy=plugin.get("installHint") or "log in to the cluster again; `kubectl get pods` must work",
        )


@functools.lru_cache(maxsize=16)
def plugin_of(settings: str) -> CredentialPlugin:
    """Return the plugin with these settings (JSON), the same one for all clients of this process."""
    return CredentialPlugin(json.loads(settings))
