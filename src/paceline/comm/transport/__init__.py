"""Ways for bytes to get from rank to rank, all behind `base.Transport` and the capabilities beside it.

`shm/`: shared memory between the processes of one host. `tcp/`: authenticated connections between hosts.
`hybrid`: shared memory inside each host, connections between hosts. `wait_watch` is the slow path of every
wait. Must not know reductions, algorithms or what the bytes mean.
"""
