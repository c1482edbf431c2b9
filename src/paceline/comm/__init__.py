"""Tensors between ranks: contexts, collectives, algorithms, transports, compression, rendezvous.

`context` is what users touch. The road of a call: collectives/ plans it, algorithms/ combines data,
transport/ moves bytes; rendezvous/ makes the transport. Must not know models, training, nor who started the
ranks.
"""
