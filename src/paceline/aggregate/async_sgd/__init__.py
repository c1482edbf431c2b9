"""Asynchronous SGD: a server applies gradients as workers deliver them, weighted by their staleness."""
