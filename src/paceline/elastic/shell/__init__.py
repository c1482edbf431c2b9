"""What carries the machine's actions out: control port, workers' processes, journal, verdicts.

Decides nothing about the job: that is `elastic.machine`. Must not know what a worker computes.
"""
