"""Spreads a model over ranks: data, tensor, pipeline and sharded parallelism.

Must not know aggregate, engines, nor the training loop.
"""
