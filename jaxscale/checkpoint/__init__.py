"""Saving and restoring the state of a run."""
