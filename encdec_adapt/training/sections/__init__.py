"""Sections of the configuration that training, plans and recipes read."""
