"""GPU clusters under SLURM: one batch job that requeues itself."""
