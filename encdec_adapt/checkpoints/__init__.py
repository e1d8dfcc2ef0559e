"""Checkpoints of training jobs, written by Orbax and verified by checksums.

`manager` saves and restores steps and decides which are kept, `checksums`
writes the manifest that a step is verified against, and `resume_checks`
compares what a job resumes with. Only `manager`, `orbax_folder` and `streaming`
import Orbax.
"""
