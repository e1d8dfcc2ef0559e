"""Estimates memory and time of programs on hardware not at hand."""
