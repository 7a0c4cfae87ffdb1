"""Learning-rate schedules, one file each.

A file offers `Config` with `validate()` and `build(num_steps) -> optax.Schedule`.
"""
