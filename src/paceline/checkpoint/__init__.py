"""State to disk and back, verified.

A checkpoint is a folder of tensor files and one JSON state, named by a version and committed by a manifest
that holds a checksum of each file and of itself. `store` is the entry; `writer` saves while training runs.
Nothing here is ever unpickled. Must not know data, nor when a checkpoint is due.
"""
