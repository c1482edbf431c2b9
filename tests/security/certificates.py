"""An authority of our own, and certificates that it signs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import final

from paceline.core.tls import Tls


@final
class Authority:
    """Signs certificates into files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        new = ["req", "-newkey", "rsa:2048", "-nodes", "-x509", "-subj", "/CN=authority"]
        self._openssl([*new, "-keyout", "authority.key", "-out", "authority.pem"])

    def issue(self, name: str) -> Tls:
        new = ["req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
        self._openssl([*new, "-keyout", f"{name}.key", "-out", f"{name}.csr"])
        sign = ["x509", "-req", "-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial"]
        self._openssl([*sign, "-in", f"{name}.csr", "-out", f"{name}.pem"])
        return Tls(self._folder / f"{name}.pem", self._folder / f"{name}.key", self._folder / "authority.pem")

    def _openssl(self, arguments: list[str]) -> None:
        subprocess.run(["openssl", *arguments], check=True, cwd=self._folder, capture_output=True)
