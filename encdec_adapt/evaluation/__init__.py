"""Measurements of trained models.

Folders, in order of imports: `results` (scores, their store and comparisons),
`measures` (quantities of a model on given inputs) and `tasks` (questions with
answers). The module `evaluators` runs measures and tasks during training.
"""
