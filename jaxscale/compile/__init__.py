"""Compiling an update: to fit the memory, and ahead of time for GPUs that are elsewhere."""
