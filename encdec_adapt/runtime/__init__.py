"""What a running job needs around its arithmetic: errors, locks, disks,
metrics, signals, processes, the environment. Imports nothing else of ours.
"""
