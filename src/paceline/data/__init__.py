"""Datasets in any form as sources of batches, the order of their samples, and checksummed shard files.

Must not know checkpoint, nor what is learned from the samples.
"""
