"""Tensors between ranks: contexts, collectives, transports, compression.

Must not know models, training, nor who started the ranks.
"""
