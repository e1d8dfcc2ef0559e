"""Models on disk, whoever wrote them: read, compared, converted, described.

Above interop (which knows files) and training (which knows checkpoints), below
the mains that use it.
"""
