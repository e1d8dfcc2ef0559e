"""Measurements of trained models.

Rooms, each of which imports only those before it: `results` (scores, their
store and statistics), `measures` (quantities of a model on given inputs),
`tasks` (questions with answers), and `reports`, which does not import `tasks`.
The module `evaluators` runs measures and tasks during training.
"""
