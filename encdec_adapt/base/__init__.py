"""Errors, exit statuses, config keys, strings of options, module discovery.

The lowest folder: everything may import it, and it imports nothing of the
package.
"""
