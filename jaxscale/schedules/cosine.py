"""Linear warm-up, then half a cosine down to a share of the peak (Loshchilov & Hutter 2017)."""

import dataclasses

import optax

from jaxscale.schedules import check_warmup


@dataclasses.dataclass(slots=True, kw_only=True)
class Config:
    """peak: the highest learning rate; warmup_steps: those that lead to it."""

    peak: float = 3e-4
    warmup_steps: int = 100
    # Where the cosine ends, as a share of the peak; the step after the last one would have it.
    final: float = 0.1

    def validate(self) -> None:
        check_warmup(self.peak, self.warmup_steps)
        if not 0 <= self.final <= 1:
            raise ValueError(f"config.schedule.final={self.final}: set it between 0 and 1")

    def build(self, num_steps: int) -> optax.Schedule:
        """Raises ValueError if the warm-up leaves no step for the cosine."""
        if self.warmup_steps >= num_steps:
            raise ValueError(
                f"config.schedule.warmup_steps={self.warmup_steps} must be under "
                f"config.steps={num_steps}"
            )
        # From step + 1: the first update is not lost to a learning rate of 0.
        warmup = optax.linear_schedule(
            self.peak / max(self.warmup_steps, 1), self.peak, max(self.warmup_steps - 1, 1)
        )
        cosine = optax.cosine_decay_schedule(self.peak, num_steps - self.warmup_steps, self.final)
        return optax.join_schedules([warmup, cosine], [self.warmup_steps])
