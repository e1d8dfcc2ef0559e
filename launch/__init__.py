"""Launchers of jobs on clouds and clusters: stdlib only, Python 3.9 or newer.

    python3 -m launch.tpu_vm --help     # Cloud TPU VMs, queued resources
    python3 -m launch.gke --help        # TPU slices of a GKE cluster
    python3 -m launch.slurm --help      # GPU clusters

The three share `commands.py`. Nothing here imports encdec_adapt, which need
not be installed on the machine that starts a job.
"""
