"""The frame of every command: flags, user errors, exit statuses."""
