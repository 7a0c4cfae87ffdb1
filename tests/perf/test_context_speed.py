"""The script that times rows split over `context` has runs that can be, and a check that counts."""

from typing import Any

import pytest

from jaxscale import sharding as shd
from jaxscale.command_line import read_config
from jaxscale.config import validate, validate_on
from jaxscale.kernels import xla_attention
from jaxscale.perf import context_speed
from jaxscale.step.layout import exchange_of
from tests.perf.scripts import ROOT, Script


@pytest.mark.parametrize("name", context_speed.CASES)
def test_a_case_can_be_trained_on_two_devices(name):
    case = context_speed.CASES[name]
    config = read_config([f"--config={ROOT / 'configs' / 'llama3_8b.py'}", *case.settings])
    validate(config)
    assert validate_on(config, 2)["context"] == case.context
    sizes = dict.fromkeys(shd.MESH_AXES, 1) | dict(fsdp=case.fsdp, context=case.context)
    if case.context > 1:
        assert exchange_of(config, sizes) == case.exchange and name.startswith(case.exchange)


def test_the_check_holds_for_plain_xla_in_bfloat16():
    *lines, last = context_speed.describe(context_speed.check(xla_attention, size=2))
    assert last.startswith("all are as plain XLA") and not any("NOT" in line for line in lines)
    # Three calls; two exchanges dealt in two ways each, and all-to-all.
    assert len(lines) == 3 * 5 + 5 * 4


def test_the_check_sees_a_log_sum_exp_that_is_none_of_the_kernels():
    backward = xla_attention.partial_backward

    class Wrong:
        partial_forward = staticmethod(xla_attention.partial_forward)

        @staticmethod
        def partial_backward(*arrays, lse_BSN, **options):
            return backward(*arrays, lse_BSN=lse_BSN + 0.1, **options)

    wrong: Any = Wrong
    name, parts, causal = next(context_speed._parts())
    errors = list(context_speed._check_call(wrong, name, parts=parts, causal=causal))
    assert [what.split(": ")[1] for what, error, bound in errors if error > bound] == [
        "dq",
        "dk",
        "dv",
    ]


def test_an_unknown_case_is_refused_with_those_there_are(capsys):
    assert Script("bench_context").run("--cases=ring_1k", "--workdir=unused") == 2
    assert "--cases=ring_1k is not one of all_to_all_32k" in capsys.readouterr().err
