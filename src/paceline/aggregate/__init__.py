"""Train without a barrier in every step: asynchronous SGD.

A layer above train and elastic: uses both, and the synchronous loop must not know it. Must not know
monitor, nor which front door starts it.
"""
