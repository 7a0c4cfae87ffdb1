"""Warm-up, stable, decay (MiniCPM, arXiv:2404.06395).

Linear up, constant, and linear down over the last steps.
"""

import dataclasses

import optax

from jaxscale.config import check_fields, number


@dataclasses.dataclass(slots=True, kw_only=True)
class Config:
    """peak: the highest learning rate; warmup_steps: those that lead to it."""

    peak: float = number(above=0, most=1e30, default=3e-4)
    warmup_steps: int = number(least=0, default=100)
    # Steps of the final decay, the first of which still has the peak; the step after the last one
    # would have `final`, a share of the peak.
    decay_steps: int = number(least=2, default=1000)
    final: float = number(least=0, most=1, default=0.0)

    def validate(self) -> None:
        check_fields(self, "config.schedule")

    def build(self, num_steps: int) -> optax.Schedule:
        """Raises ValueError if warm-up and decay are longer than the run."""
        if self.warmup_steps + self.decay_steps > num_steps:
            raise ValueError(
                f"config.schedule.warmup_steps={self.warmup_steps} and "
                f"config.schedule.decay_steps={self.decay_steps} are longer than "
                f"config.steps={num_steps}; shorten one of them"
            )
        warmup = optax.linear_schedule(
            self.peak / max(self.warmup_steps, 1), self.peak, max(self.warmup_steps - 1, 1)
        )
        decay = optax.linear_schedule(self.peak, self.peak * self.final, self.decay_steps)
        stable = optax.constant_schedule(self.peak)
        return optax.join_schedules(
            [warmup, stable, decay], [self.warmup_steps, num_steps - self.decay_steps]
        )
