"""Ways for bytes to get from rank to rank, all behind `base.Transport`.

`shm`: shared memory between processes of one host. `threads`: the same memory between threads of one
process, for tests. `torchdist`: torch.distributed between hosts. `hybrid`: shared memory inside a host,
torch.distributed between hosts. Must not know of reductions, algorithms or what the bytes mean.
"""
