"""Learning-rate schedules: what every file in jaxscale/schedules offers, and the values of each."""

import dataclasses
import importlib
import math
import pkgutil

import numpy as np
import pytest

from jaxscale import schedules
from jaxscale.schedules import cosine, wsd

MODULES = [
    importlib.import_module(f"jaxscale.schedules.{info.name}")
    for info in pkgutil.iter_modules(schedules.__path__)
]
NAMES = [module.__name__.rpartition(".")[2] for module in MODULES]
STEPS = 2000


def values(config, num_steps=STEPS):
    """The learning rate of each update."""
    schedule = config.build(num_steps)
    return np.array([float(schedule(step)) for step in range(num_steps)])


def test_the_schedules_are_found():
    assert cosine in MODULES and wsd in MODULES


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_a_schedule_is_a_valid_config_that_starts_above_zero_and_never_exceeds_its_peak(module):
    config = module.Config(peak=0.5)
    config.validate()
    assert dataclasses.is_dataclass(config) and module.__doc__
    rates = values(config)
    assert rates.max() == 0.5
    assert (rates > 0).all() and np.isfinite(rates).all()


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_the_warm_up_is_a_line_to_the_peak(module):
    rates = values(module.Config(peak=2.0, warmup_steps=50))
    np.testing.assert_allclose(rates[:50], 2.0 * np.arange(1, 51) / 50, rtol=1e-5)
    assert rates[50] == 2.0 and values(module.Config(peak=2.0, warmup_steps=0))[0] == 2.0
    np.testing.assert_allclose(values(module.Config(peak=2.0, warmup_steps=1))[:2], 2.0)


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [("peak", 0.0), ("peak", math.nan), ("warmup_steps", -1), ("final", 1.5), ("final", -0.1)],
)
def test_values_out_of_range_are_refused_with_key_and_fix(module, key, value):
    with pytest.raises(ValueError, match=rf"config\.schedule\.{key}={value}: set it"):
        module.Config(**{key: value}).validate()


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_a_warm_up_longer_than_the_run_is_refused_with_both_keys(module):
    with pytest.raises(ValueError, match=r"config\.schedule\.warmup_steps=100 .*config\.steps=50"):
        module.Config(warmup_steps=100).build(50)


def test_cosine_falls_as_half_a_cosine_to_its_final_share():
    rates = values(cosine.Config(peak=1.0, warmup_steps=100, final=0.1))
    share = np.arange(STEPS - 100) / (STEPS - 100)
    np.testing.assert_allclose(rates[100:], 0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2, rtol=1e-5)
    np.testing.assert_allclose(
        float(cosine.Config(peak=1.0, final=0.1).build(STEPS)(STEPS)), 0.1, rtol=1e-6
    )


def test_wsd_is_flat_and_falls_in_a_line_over_its_last_steps():
    config = wsd.Config(peak=1.0, warmup_steps=100, decay_steps=500, final=0.2)
    rates = values(config)
    assert (rates[99 : STEPS - 500 + 1] == 1.0).all()
    np.testing.assert_allclose(rates[-500:], 1 - 0.8 * np.arange(500) / 500, rtol=1e-5)
    np.testing.assert_allclose(float(config.build(STEPS)(STEPS)), 0.2, rtol=1e-6)
    with pytest.raises(ValueError, match="decay_steps=0: set it to 2 or more"):
        wsd.Config(decay_steps=0).validate()
