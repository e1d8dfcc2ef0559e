"""Errors, exit statuses, configuration keys and strings of options.

The lowest folder: it imports nothing else of the package.
"""
