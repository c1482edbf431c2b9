"""Datasets as checksummed shard files: written once, verified at every read, never silently wrong.

Must not know who reads which sample, nor what is learned from them.
"""

from __future__ import annotations

from paceline.data.checked.manifest import CorruptShardError, Damage, Manifest, ShardRecord
from paceline.data.checked.reader import CheckedShards
from paceline.data.checked.verify import repair, verify
from paceline.data.checked.writer import write_shards

__all__ = [
    "CheckedShards",
    "CorruptShardError",
    "Damage",
    "Manifest",
    "ShardRecord",
    "repair",
    "verify",
    "write_shards",
]
