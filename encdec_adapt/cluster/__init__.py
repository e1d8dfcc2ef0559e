"""The processes of a job: start, barriers, preemption, watchdog, locks, limits.

Imports `files`, `telemetry` and `base`, and no model or data.
"""
