"""SeqIO: its registered tasks as sources, and our objectives as tasks.

No other folder imports SeqIO. These modules are imported for sources
`seqio:..`, never by a training job. README.md has a worked example.
"""
