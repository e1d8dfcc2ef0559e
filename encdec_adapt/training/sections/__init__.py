"""Configuration sections of training, plans and recipes."""
