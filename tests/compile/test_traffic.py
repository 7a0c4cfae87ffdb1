"""What an update sends, read out of a compiled module's text."""

import types

import numpy as np
import pytest

from jaxscale.compile.traffic import (
    Traffic,
    axes_of,
    collectives_of,
    groups_in,
    groups_over,
    table_of,
    traffic_of,
)

SIZES = dict(data=2, fsdp=2, tensor=2)
GROUPS = "replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}, use_global_device_ids=true"
HLO = f"""HloModule jit_update

%sum (a: f32[], b: f32[]) -> f32[] {{
  ROOT %add = f32[] add(%a, %b)
}}

%sliced (x: bf16[8]) -> bf16[4] {{
  ROOT %kernel = bf16[4]{{0}} custom-call(%slice), custom_call_target="mosaic_gpu_v2"
}}

%scaled (x: bf16[8]) -> bf16[8] {{
  ROOT %twice = bf16[8]{{0}} multiply(%x, %two)
}}

%body (carry: (s32[], bf16[8])) -> (s32[], bf16[8]) {{
  %start = ((bf16[4]{{0}}), bf16[8]{{0}}) all-gather-start(%x), channel_id=1, {GROUPS}
  %product = bf16[8]{{0}} custom-call(%y), custom_call_target="__cublas$lt$matmul"
  %sliced.1 = bf16[4]{{0}} fusion(%y), kind=kCustom, calls=%sliced, metadata={{}}
  %scaled.1 = bf16[8]{{0}} fusion(%y), kind=kLoop, calls=%scaled
  %done = bf16[8]{{0}} all-gather-done(%start), metadata={{}}
  ROOT %scatter = f32[4]{{0}} reduce-scatter(%z), {GROUPS}, to_apply=%sum
}}

%condition (carry: (s32[], bf16[8])) -> pred[] {{
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (p: bf16[8]) -> bf16[8] {{
  %loop = (s32[], bf16[8]{{0}}) while(%t), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
  %alone = f32[4]{{0}} all-reduce(%q), replica_groups={{{{0}},{{1}}}}, to_apply=%sum
  %sent = bf16[8]{{0}} collective-permute(%r), source_target_pairs={{{{0,4}},{{4,0}}}}
  ROOT %total = f32[4]{{0}} all-reduce(%q), replica_groups=[1,8]<=[8], to_apply=%sum
}}
"""


def mesh(*, gpus_per_host: int):
    devices = [types.SimpleNamespace(process_index=i // gpus_per_host) for i in range(8)]
    return types.SimpleNamespace(shape=SIZES, devices=np.array(devices, object).reshape(2, 2, 2))


def test_the_three_notations_of_groups_are_read_alike():
    groups = groups_over(SIZES, ["fsdp"])
    assert groups == {frozenset(pair) for pair in ((0, 2), (1, 3), (4, 6), (5, 7))}
    for text in (
        "{{0,2},{1,3},{4,6},{5,7}}",
        "[4,2]<=[2,2,2]T(0,2,1)",
        "mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}",
        "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_1'}",
    ):
        assert groups_in(text) == groups
    assert groups_in("[2,4]<=[8]") == groups_over(SIZES, ["fsdp", "tensor"])


@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "tensor"), tuple(SIZES)])
def test_axes_are_those_in_which_a_group_differs(axes):
    assert axes_of(groups_over(SIZES, axes), SIZES) == axes


def test_collectives_of_one_device_are_none():
    assert [each.operation for each in collectives_of(HLO)] == [
        "all-gather",
        "reduce-scatter",
        "collective-permute",
        "all-reduce",
    ]


def test_turns_bytes_and_what_is_beside():
    gather, scatter, sent, total = collectives_of(HLO)
    # Half of the gathered 16 bytes in each of 3 turns, beside a product and a kernel of slices.
    assert (gather.num_bytes, gather.times, gather.work_beside) == (8, 3, 2)
    assert (scatter.num_bytes, scatter.times, scatter.work_beside) == (16, 3, 0)
    assert (sent.num_bytes, sent.times) == (16, 1)
    assert (total.num_bytes, total.times) == (2 * 16 * 7 // 8, 1)


def test_links_follow_from_where_the_hosts_are():
    sent = traffic_of(HLO, mesh(gpus_per_host=4))
    assert sent == [
        Traffic(("data", "fsdp", "tensor"), "all-reduce", True, 1, 28, 28),
        Traffic(("data",), "collective-permute", True, 1, 16, 16),
        Traffic(("fsdp",), "reduce-scatter", False, 3, 48, 48),
        Traffic(("fsdp",), "all-gather", False, 3, 24, 0),
    ]
    assert not any(each.is_between_hosts for each in traffic_of(HLO, mesh(gpus_per_host=8)))
    assert "between hosts" in table_of(sent).splitlines()[1]


@pytest.mark.parametrize(
    "types",
    [
        "((bf16[4]{0}), bf16[8]{0})",
        "(bf16[4]{0}, bf16[8]{0})",
        "((bf16[2]{0}, bf16[2]{0}), (bf16[4]{0}, bf16[4]{0}))",
    ],
)
def test_what_starts_a_collective_has_its_operands_first(types):
    hlo = (
        f"ENTRY %main (p: bf16[8]) -> bf16[8] {{\n  %start = {types} all-gather-start(%x), {GROUPS}"
    )
    (gather,) = collectives_of(hlo)
    assert gather.num_bytes == 8
