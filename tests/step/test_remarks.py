"""What is said before the first step about what works and costs."""

from typing import Any

import pytest

from jaxscale.config import Exchange
from jaxscale.step.remarks import remarks
from tests.step.conftest import make_plan, small_config


def said(*, gpus_per_host: int, **settings) -> list[str]:
    plan = make_plan(small_config(**settings), 8)
    return remarks(plan, host_of=lambda device: device.id // gpus_per_host)


def test_axes_inside_hosts_need_no_remark():
    assert said(gpus_per_host=2, fsdp=4, tensor=2) == []
    assert said(gpus_per_host=2, data=4, fsdp=2) == []
    assert said(gpus_per_host=4, fsdp=2, context=2, tensor=2) == []


def test_more_devices_than_key_heads_is_said():
    (remark,) = said(gpus_per_host=8, fsdp=2, tensor=4)
    assert remark.startswith("config.mesh.tensor=4 is more than config.model.num_kv_heads=2: ")


@pytest.mark.parametrize(
    ("axis", "settings", "fix"),
    [
        ("tensor", dict(fsdp=4, tensor=2), "set config.mesh.tensor=1"),
        ("context", dict(fsdp=4, context=2), "set config.mesh.context=1"),
    ],
)
def test_an_inner_axis_that_leaves_its_host_is_said_with_its_cost(axis, settings, fix):
    (remark,) = said(gpus_per_host=1, **settings)
    assert remark.startswith(f"config.mesh.{axis}=2 reaches over hosts of 1 devices: about ")
    assert "s at 50 GB/s" in remark and remark.endswith(fix)


def test_of_two_axes_that_a_host_cannot_hold_the_outer_one_is_said():
    (remark,) = said(gpus_per_host=2, fsdp=2, context=2, tensor=2)
    assert "config.mesh.context=2 reaches over hosts of 2 devices" in remark
    assert "make config.mesh.context * config.mesh.tensor a divisor of 2" in remark


def test_bytes_are_those_of_compiled_updates():
    """Llama 3 70B, tensor=8 on 64 H100: 1,056 + 754 GB; 8B, context=4, 131,072 tokens: 1,509 MB."""
    from jaxscale.step import remarks as module

    class Of:
        def __init__(self, *, exchange=Exchange.ALL_TO_ALL, dtype="bfloat16", **sizes):
            self.mesh = self.config = self.execution = self.model = self
            self.shape = dict.fromkeys(("stage", "data", "fsdp", "expert", "context", "tensor"), 1)
            self.exchange, self.dtype = exchange, dtype
            for name, value in sizes.items():
                if name in self.shape:
                    self.shape[name] = value
                setattr(self, name, value)

        def head_dim(self):
            return 128

    plan: Any = Of(fsdp=8, tensor=8, batch_size=128, seq_len=8192, model_dim=8192, num_layers=80)
    sent = module._tensor_bytes(plan)
    assert sent == pytest.approx(1810e9, rel=0.01)
    plan = Of(context=4, batch_size=1, seq_len=131_072, num_heads=32, num_kv_heads=8, num_layers=1)
    sent = module._context_bytes(plan)
    assert sent == pytest.approx(1509e6, rel=0.01)
