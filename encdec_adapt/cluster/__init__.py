"""The processes of a job: start, barriers, preemption, watchdog, locks, limits.

Of the package, this folder imports only `files`, `telemetry` and `base`.
"""
