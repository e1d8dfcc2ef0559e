"""Shared entry point of the commands: flags, user errors, exit statuses."""
