"""Collectives of one rank, from the caller's data to the caller's data.

`data_movement`, `reduction` and `shard_sums` check the arguments and plan a call; `call_queue` numbers the
calls of a context, runs them in order, and sends and receives messages beside them. `message_encoding` turns
messages into bytes, `reduction_input` turns what can be reduced into a flat tensor.
"""
