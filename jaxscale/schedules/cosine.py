"""Linear warm-up, then half a cosine down to a share of the peak (Loshchilov & Hutter 2017)."""

import dataclasses

import optax

from jaxscale.config import check_fields, number


@dataclasses.dataclass(slots=True, kw_only=True)
class Config:
    """peak: the highest learning rate; warmup_steps: those that lead to it."""

    peak: float = number(above=0, most=1e30, default=3e-4)
    warmup_steps: int = number(least=0, default=100)
    # Where the cosine ends, as a share of the peak; the step after the last one would have it.
    final: float = number(least=0, most=1, default=0.1)

    def validate(self) -> None:
        check_fields(self, "config.schedule")

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
