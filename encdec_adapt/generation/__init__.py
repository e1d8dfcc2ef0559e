"""Models in memory: they encode prompts and chats, and generate text."""
