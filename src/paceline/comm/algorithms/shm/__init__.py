"""All-reduce in shared memory: every rank reads the memory of its peers and reduces the slice that it owns.

`all_reduce` decides between three ways: small tensors in one barrier, `in_place` for tensors that peers can
reach, `staged` through slots for all others. `task` is what they pass around, `checksums` what they check.
"""
