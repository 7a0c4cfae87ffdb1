"""One update: how a run is laid out, what it carries, the function itself, and its batches."""
