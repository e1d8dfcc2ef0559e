"""Errors, exit statuses, config keys and strings of options.

The lowest folder: everything may import it, and it imports nothing of the
package.
"""
