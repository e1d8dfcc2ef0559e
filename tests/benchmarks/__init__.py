"""Benchmarks: `python -m tests.benchmarks.NAME` from the repository's root.

Each measures what it compares in the same run, prints a table with ratios,
and with `--output=FILE` writes the numbers as JSON. Absolute numbers depend
on the machine and on what else it does; ratios much less.
"""
