"""Host memory for saves is pinned ahead: how much, where, and when not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.checkpoint import pinned


@pytest.mark.parametrize(
    ("spec", "each"),
    [
        (P("fsdp"), 4 * 64 * 8 // 8),
        (P(None, "tensor"), 4 * 64 * 8 // 8),  # halves, which four devices each hold
        (P(), 4 * 64 * 8 // 8),
    ],
)
def test_devices_share_in_what_is_copied(spec, each):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    leaf = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
    empty = jax.ShapeDtypeStruct((0, 8), jnp.float32, sharding=NamedSharding(mesh, P()))
    blocks = list(pinned.blocks_of([leaf, empty], has_pool=lambda device: True))
    assert [size for _, size in blocks] == [each] * 8
    assert {device for device, _ in blocks} == set(jax.devices())
    assert not list(pinned.blocks_of([leaf], has_pool=lambda device: False))


def leaf_of(num_bytes: int):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct((num_bytes,), np.uint8, sharding=sharding)


@pytest.fixture
def taken(monkeypatch):
    """Sizes in the order in which they were pinned."""
    taken = []

    def put(array, place):
        taken.append((array.nbytes, place.memory_kind))
        return array

    monkeypatch.setattr(pinned, "_has_pool", lambda device: True)
    monkeypatch.setattr(pinned.jax, "device_put", put)
    return taken


def test_the_pool_grows_to_all_that_is_saved(taken):
    state = {"params": leaf_of(300), "mu": leaf_of(200)}
    with pinned.pin_ahead(state, host_memory_gib=1, num_processes=1) as pinning:
        pinning.wait()
    assert sorted(taken) == [(200, "pinned_host"), (300, "pinned_host")]


@pytest.mark.parametrize("num_processes", [1, 4])
def test_a_host_without_the_memory_pins_nothing_ahead(taken, num_processes):
    leaf = leaf_of(2**30 // num_processes)
    with pinned.pin_ahead(leaf, host_memory_gib=2.4, num_processes=num_processes) as pinning:
        pinning.wait()
    assert not taken


def test_what_cannot_be_pinned_is_left_to_the_save(taken, monkeypatch):
    def fail(array, place):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(pinned.jax, "device_put", fail)
    with pinned.pin_ahead(leaf_of(100), host_memory_gib=1, num_processes=1) as pinning:
        pinning.wait()


def test_a_run_that_is_refused_does_not_wait_for_all(taken, monkeypatch):
    @dataclasses.dataclass
    class First:
        pinning: pinned.Pinning | None = None

        def put(self, array, place):
            taken.append(array.nbytes)
            while self.pinning is None or not self.pinning._is_over.is_set():
                pass
            return array

    first = First()
    monkeypatch.setattr(pinned.jax, "device_put", first.put)
    state = [leaf_of(1), leaf_of(2), leaf_of(3)]
    with pinned.pin_ahead(state, host_memory_gib=1, num_processes=1) as first.pinning:
        pass
    assert taken == [1]


def test_a_cpu_has_no_pool():
    assert not pinned._has_pool(jax.devices()[0])
