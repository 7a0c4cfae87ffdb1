"""Copies that differ by a bit, and devices that compute it otherwise, are found and named.

On every layout of 8 devices.
"""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxscale import sharding as shd
from jaxscale.config import AxisTypes, MeshConfig
from jaxscale.step import replay, replicas
from jaxscale.step.device_sums import device_sums
from jaxscale.step.feed import device_batches
from jaxscale.step.state import from_flat, init_state, to_flat
from tests.corrupted import with_flipped_bit
from tests.step.conftest import make_plan, small_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": dict(mesh=MeshConfig(data=8, fsdp=1)),
    "fsdp": dict(mesh=MeshConfig(fsdp=8)),
    "hsdp": dict(mesh=MeshConfig(data=2, fsdp=4)),
    "zero 1": dict(mesh=MeshConfig(data=2, fsdp=4, zero=1)),
    "auto": dict(
        mesh=MeshConfig(data=2, fsdp=4, zero=2, axis_types=AxisTypes.AUTO), grad_accumulation=2
    ),
    "tensor": dict(mesh=MeshConfig(data=2, fsdp=2, tensor=2), grad_accumulation=2),
    "context": dict(mesh=MeshConfig(data=2, fsdp=2, context=2)),
    "stages": dict(mesh=MeshConfig(stage=2, data=2, fsdp=2), grad_accumulation=2),
    "stages, tensor, context": dict(
        mesh=MeshConfig(stage=2, context=2, tensor=2), grad_accumulation=2
    ),
}


# Checksums.


@jax.jit
def sums_of_one(array):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    return device_sums([array], [PartitionSpec()], mesh=mesh)[0, 0]


def words(value):
    """Of an array on one device."""
    return np.asarray(sums_of_one(value)).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8", "float8_e4m3fn"])
def test_every_flipped_bit_changes_both_words(dtype):
    value = np.random.default_rng(0).normal(size=(5, 7)).astype(jnp.dtype(dtype))
    usual = words(value)
    for bit in range(0, 8 * value.nbytes, 11):
        flipped = value.copy()
        flipped.reshape(-1).view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
        first, second = words(flipped)
        assert first != usual[0] and second != usual[1], bit


def test_elements_that_changed_places_change_the_sum_also_if_they_differ_in_the_sign_alone():
    draw = random.Random(0)
    value = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    value[2048:] = -value[:2048]
    usual = words(value)
    for _ in range(100):
        i, j = draw.randrange(2048), draw.randrange(4096)
        for other in (j, i + 2048):
            swapped = value.copy()
            swapped[[i, other]] = swapped[[other, i]]
            assert words(swapped)[0] == usual[0]
            assert (words(swapped) == usual) == (i == other)


def test_nans_of_other_bits_are_told_apart():
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert words(nans[:1]) != words(nans[1:]) and words(nans[:1]) == words(nans[:1].copy())


# Copies.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bit_flipped_in_one_copy_of_any_part_of_the_state_names_leaf_and_device(layout):
    plan, draw = make_plan(small_config(**LAYOUTS[layout])), random.Random(0)
    state, devices = init_state(plan), list(plan.mesh.devices.flat)
    with shd.use(plan.mesh, plan.rules):
        checked = replicas.replicas_of(plan)
        assert checked.odd(state) == []
        flat = to_flat(state)
        assert set(checked.leaves) == {
            name
            for name, leaf in flat.items()
            if len({str(shard.index) for shard in leaf.addressable_shards}) < 8
        }
        assert "params.norm" in checked.leaves
        assert any(name.startswith("opt_state") for name in checked.leaves)
        for name in draw.sample(checked.leaves, min(6, len(checked.leaves))):
            place = draw.randrange(8)
            (group,) = (g for g in checked.groups[checked.leaves.index(name)] if place in g)
            size = flat[name].addressable_shards[0].data.nbytes
            flipped = with_flipped_bit(flat[name], devices[place], bit=draw.randrange(8 * size))
            (odd,) = checked.odd(from_flat(state, flat | {name: flipped}))
            certain = len(group) > 2
            places = (place,) if certain else group
            assert odd == replicas.Odd(name, places, len(group), certain)


def test_what_no_two_devices_hold_is_not_read():
    plan = make_plan(small_config(mesh=MeshConfig(fsdp=8)))
    checked, flat = replicas.replicas_of(plan), to_flat(plan.state)
    assert "params.embedding" in flat and "params.embedding" not in checked.leaves
    assert checked.num_bytes < 0.05 * sum(x.size * x.dtype.itemsize for x in flat.values()) / 8
    alone = make_plan(small_config(mesh=MeshConfig(fsdp=1)), 1)
    assert replicas.replicas_of(alone).leaves == ()
    assert replicas.replicas_of(alone).odd(init_state(alone)) == []


def test_the_majority_is_right_and_without_one_all_are_named():
    groups: dict[str, Any] = {"a": [(0, 1, 2)], "b": [(0, 3), (1, 2)], "c": [(0, 1, 2, 3)]}
    sums = np.zeros((4, 3, 2), np.uint32)
    sums[2, 0] = 1  # one of three
    sums[3, 1] = 1  # one of two
    sums[:2, 2] = 1  # two of four
    assert replicas.compare(sums, groups) == [
        replicas.Odd("a", (2,), 3, True),
        replicas.Odd("b", (0, 3), 2, False),
        replicas.Odd("c", (0, 1, 2, 3), 4, False),
    ]


# Replays.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_replays_are_alike_and_a_device_that_computes_otherwise_is_named(
    rows, layout, monkeypatch
):
    plan = make_plan(small_config(**LAYOUTS[layout]))
    state, loader = init_state(plan), device_batches(plan, rows, start=0)
    before = {name: np.asarray(leaf).tobytes() for name, leaf in to_flat(state).items()}
    place = 5
    with shd.use(plan.mesh, plan.rules):
        batch = next(loader)
        replayed = replay.Replay(plan)
        assert replayed.unlike(state, batch) is None
        assert {n: np.asarray(x).tobytes() for n, x in to_flat(state).items()} == before
        # The second time this device alone computes with another bit in its copy of a norm.
        flipped = with_flipped_bit(state.params.norm[...], plan.mesh.devices.flat[place], bit=22)
        other = from_flat(state, to_flat(state) | {"params.norm": flipped})
        sums, states = replayed.sums, [state, other]
        monkeypatch.setattr(replayed, "sums", lambda _, batch: sums(states.pop(0), batch))
        unlike = replayed.unlike(state, batch)
    loader.close()
    assert unlike is not None
    if plan.pipeline is None:
        # Those that share its rows and so sum with it: none before the output, here.
        assert unlike.what == replay.OUTPUT and unlike.places == (place,)
        assert unlike.num_others > 10
    else:
        assert unlike.what == replay.LOSS and place in unlike.places


def test_what_differs_first_names_the_devices():
    first = np.zeros((4, 3, 2), np.uint32)
    second = first.copy()
    assert replay.compare(first, second, names=["a", "b", "c"]) is None
    second[1, 1, 1] = 1
    second[:, 2] = 7  # spread by a collective
    assert replay.compare(first, second, names=["a", "b", "c"]) == replay.Unlike("b", (1,), 1)


def test_a_replay_has_a_row_for_the_output_the_loss_and_each_gradient(rows):
    plan = make_plan(small_config(mesh=MeshConfig(data=2, fsdp=4), grad_accumulation=2))
    loader = device_batches(plan, rows, start=0)
    with shd.use(plan.mesh, plan.rules):
        state, batch = init_state(plan), next(loader)
        names = replay.replayed(plan)
        sums = jax.jit(lambda s, b: replay.replay_sums(s, b, plan=plan))(state, batch)
    loader.close()
    assert sums.shape == (8, len(names), 2)
    assert len(names) == len(set(names)) == len(to_flat(plan.state.params)) + 2
    assert all(sum_.any() for sum_ in np.asarray(sums).reshape(-1, 2))
