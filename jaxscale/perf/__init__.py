"""Measuring a run instead of making one: traces, the anatomy of a step, benchmarks. Scripts alone import it."""
