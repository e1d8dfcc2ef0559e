"""Opens the models, batches and rewards of a job, as declared by its recipe.

Imports `config` and stored models; recipes and the step do not import it.
"""
