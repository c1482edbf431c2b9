"""Messages between hosts: two authenticated connections between every two ranks, and threads for bulk data.

`dial` and `mesh_handshake` connect the ranks; `framed_socket` and `mesh` carry control and small messages,
`bulk_transfer` large ones; `exchange` moves all messages of a round and waits for them, and
`network_transport` puts them together. `native_backend` hands tensors to torch's backends.
"""
