"""Agents by MPI: on the ranks of the mpirun in which this process runs, or by mpirun on the hosts of a file.

Control plane: never imports torch. Must not know what a worker computes.
"""
