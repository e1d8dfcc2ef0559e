"""The processes of one job: start, barriers, preemption, watchdog, locks.

Imports `files`, `telemetry` and `base.errors`, and no model or data.
"""
