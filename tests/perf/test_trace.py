"""Traces are read from what jax.profiler writes, and what is none is told plainly."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.perf.anatomy import anatomy
from jaxscale.perf.programs import programs
from jaxscale.perf.trace import read
from tests.perf.traces import steps, write_trace


@pytest.fixture(scope="module")
def cpu_profile(tmp_path_factory):
    """What jax.profiler records of 8 CPUs that gather 8 x 64 x 32 float32 and sum 96 x 32."""
    folder = tmp_path_factory.mktemp("cpu")
    mesh = jax.make_mesh((8,), ("x",))

    def local(a):
        return jax.lax.all_gather(a, "x", tiled=True), jax.lax.psum(jnp.tile(a[:32], (3, 1)), "x")

    f = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=P("x"), out_specs=(P(None), P(None)), check_vma=False
        )
    )
    a = jax.device_put(jnp.ones((8 * 64, 32), jnp.float32), NamedSharding(mesh, P("x")))
    jax.block_until_ready(f(a))
    with jax.profiler.trace(folder):
        jax.block_until_ready(f(a))
    return folder


def test_the_sizes_of_messages_are_read_from_the_programs_in_a_trace(cpu_profile):
    (file,) = cpu_profile.rglob("*.xplane.pb")
    (program,) = (
        x for x in programs(file.read_bytes(), range(2**31)).values() if x.name == "jit_local"
    )
    assert set(program.message_bytes.values()) == {8 * 64 * 32 * 4, 96 * 32 * 4}


def test_the_newest_trace_of_a_folder_counts(tmp_path):
    for age, name in ((10, "new"), (1000, "old")):
        file = write_trace(
            tmp_path / name / "host.xplane.pb", {0: steps(1 if name == "new" else 2)}
        )
        os.utime(file, (10**9 - age, 10**9 - age))
    assert anatomy(read(tmp_path)).num_steps == 1
    assert anatomy(read(tmp_path / "old")).num_steps == 2


def test_a_trace_of_a_cpu_is_refused_with_how_to_get_another(cpu_profile):
    with pytest.raises(ValueError, match=r"xplane.pb has no GPU.*--config.profile.steps=3"):
        read(cpu_profile)


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match="absent: no such file or folder"):
        read(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"holds no \*.xplane.pb"):
        read(tmp_path)
    (tmp_path / "x.xplane.pb").write_text("hello world")
    with pytest.raises(ValueError, match=r"x.xplane.pb is not a profile"):
        read(tmp_path)
    with pytest.raises(ValueError, match="no kernels: CUPTI recorded none"):
        read(write_trace(tmp_path / "y.xplane.pb", {0: []}))
