"""Shared entry point of the commands: flags, subcommands, help.

Imports `base` and `cluster`; only commands and the sub-commands of `convert`
import it.
"""
