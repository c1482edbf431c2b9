"""Where processes run: local, Ray, SLURM, Kubernetes, MPI; requests are plain data.

Control plane: never imports torch. Must not know parallel, aggregate, nor what a worker computes.
"""
