"""Meshes, what logical axes mean on them, and where every array lives."""
