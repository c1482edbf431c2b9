"""Benchmarks: each module measures one claim, prints a table with the peer in the same run, and can be run
by itself.

`python -m bench` (or `make bench`) runs all of them and writes tables and plots to bench/results/. They are
measurements, not tests: nothing here fails a build, targets that are missed are shown as missed.
"""
