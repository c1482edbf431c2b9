"""Scripts of bench.slurm_start."""
