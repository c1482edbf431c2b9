"""Read the journal and the history of a run: progress on a terminal, report, charts, timeline and audit.

Reads events and records only; must not change a run.
"""
