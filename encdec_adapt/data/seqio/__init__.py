"""SeqIO: its registered tasks as sources, and our objectives as tasks.

No other folder imports SeqIO. These modules are imported where records are
made, never by a training job.
"""
