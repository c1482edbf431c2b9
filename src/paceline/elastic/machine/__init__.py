"""The deciding machine: `step(state, event, now) -> (state, actions, reason)`; no I/O, no clock."""
