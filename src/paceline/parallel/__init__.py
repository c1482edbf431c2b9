"""Data parallelism for a user's own loop: DistributedDataParallel and its buckets.

Must not know the training loop of `train`, nor checkpoints.
"""
