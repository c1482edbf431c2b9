"""Shared memory between the processes of one host: one anonymous segment per group, mapped by every rank.

`core.shm_segment_layout` lays out what is in the segment. `futex` waits on words of it, `status_board` is a
row per rank (tick, process, state, status), `message_rings` carries messages, `arena` hands out memory for
tensors, `window` and `cross_memory` let algorithms work on the memory of all ranks, `transport` puts them
together. The segment is a memfd: it has no name, so nothing is left behind however the processes end.
"""
