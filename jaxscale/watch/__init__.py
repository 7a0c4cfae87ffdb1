"""Beside every process of a run stands a watchdog, a small process that imports no jax.

It notices that another process is gone, within a second, and which of them is stuck, by the steps
that they tell and by what the kernel says of them; says so with Python's stacks; and ends its own.
"""
