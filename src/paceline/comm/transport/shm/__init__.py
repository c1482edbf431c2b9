"""Shared memory between the processes of one host: one anonymous segment per group, mapped by every rank.

`layout` says where things are in the segment, `sync` waits on words of it, `board` is who-does-what, `ring`
carries messages, `arena` hands out memory for tensors, `window` lets algorithms work on all ranks' memory,
`transport` puts them together. The segment is a memfd: it has no name, so nothing is left behind however the
processes end.
"""
