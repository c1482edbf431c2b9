"""SLURM: agents as jobs of their own, as steps of an allocation, or a whole run as a batch script.

Talks to SLURM by its commands (sbatch, srun, squeue, scancel, scontrol, sinfo), which every cluster has.
"""
