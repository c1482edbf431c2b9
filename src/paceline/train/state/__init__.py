"""The state of a run: what it consists of, its checkpoints, its records and its folder."""
