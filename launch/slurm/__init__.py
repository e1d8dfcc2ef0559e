"""GPU clusters under SLURM: one batch job that puts itself back in line."""
