"""Errors, exit statuses, config keys, option strings, module discovery.

The lowest folder: every module may import it, and it must not import other
folders of the package.
"""
