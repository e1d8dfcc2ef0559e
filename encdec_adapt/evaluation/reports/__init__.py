"""Tables, figures, findings and pages, made from scores and runs.

Of the other rooms of `evaluation`, `measures` and `results` are imported. No
model is read or run here.
"""
