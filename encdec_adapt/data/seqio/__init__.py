"""SeqIO: registered tasks as sources, and objectives as tasks.

No other folder imports SeqIO. Sources `seqio:..` import these modules; training
jobs never do. README.md has a worked example.
"""
