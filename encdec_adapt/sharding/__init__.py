"""Meshes, sharding rules of logical axes, and shardings of all arrays."""
