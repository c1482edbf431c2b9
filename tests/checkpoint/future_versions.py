"""Checkpoints as a later Paceline would write them."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.checksummed_json import decode_document, encode_document

MANIFEST = "v{:08d}/manifest.json"


def from_the_future(folder: Path, version: int) -> None:
    """Rewrites the manifest as the next Paceline would."""
    file = folder / MANIFEST.format(version)
    file.write_bytes(
        encode_document({**decode_document(file.read_bytes()), "format": "paceline-checkpoint-2"})
    )
