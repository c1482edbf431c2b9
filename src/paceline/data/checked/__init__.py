"""Datasets as checksummed shard files: written once, verified at every read, never silently wrong.

Must not know who reads which sample, nor what is learned from them.
"""

from __future__ import annotations

from paceline.data.checked.shard_manifest import CorruptShardError, ShardDamage, ShardManifest, ShardRecord
from paceline.data.checked.shard_reader import CheckedShards
from paceline.data.checked.shard_verify import repair, verify
from paceline.data.checked.shard_writer import write_shards

__all__ = [
    "CheckedShards",
    "CorruptShardError",
    "ShardDamage",
    "ShardManifest",
    "ShardRecord",
    "repair",
    "verify",
    "write_shards",
]
