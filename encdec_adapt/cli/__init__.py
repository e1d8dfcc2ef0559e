"""Shared entry point of the commands: flags, subcommands, help.

Imports `base` and `cluster`; only commands import it.
"""
