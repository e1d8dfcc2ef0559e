"""The processes of one job: start, barriers, preemption, watchdog, locks.

Imports `files`, `telemetry` and `cli.errors`, and no model or data.
"""
