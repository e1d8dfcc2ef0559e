"""Starting jobs on machines that one rents: stdlib only, Python 3.9 or newer.

    python3 -m launch.tpu_vm --help     # Cloud TPU VMs, queued resources
    python3 -m launch.gke --help        # TPU slices of a GKE cluster
    python3 -m launch.slurm --help      # GPU clusters

`commands.py` is what the three share. Nothing here imports encdec_adapt,
which need not be installed where a job is started from.
"""
