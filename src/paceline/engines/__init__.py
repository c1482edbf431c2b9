"""Start processes: `local`, on this machine, from a warm fork server; requests are plain data.

Control plane: never imports torch. Must not know parallel, aggregate, nor what a worker computes.
"""
