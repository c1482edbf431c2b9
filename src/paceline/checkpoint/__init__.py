"""State to disk and back, verified.

Must not know data, nor when a checkpoint is due.
"""
