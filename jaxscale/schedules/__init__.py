"""Learning-rate schedules, one file each.

A file offers `Config` with `validate()` and `build(num_steps) -> optax.Schedule`.
"""


def check_warmup(peak: float, warmup_steps: int) -> None:
    """Raises ValueError for a peak or a warm-up that cannot be."""
    if not peak > 0:
        raise ValueError(f"config.schedule.peak={peak}: set it above 0")
    if warmup_steps < 0:
        raise ValueError(f"config.schedule.warmup_steps={warmup_steps}: set it to 0 or more")
