"""Checkpoints come back bit for bit, in any layout, or not at all.

Damage, kills and full disks are survived.
"""

import json
import logging
import os
import random
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.checkpoint import checksums
from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.checkpoint.stored import CheckpointError

ROOT = Path(__file__).parents[2]


def sharding(*axes, x=4, y=2):
    mesh = jax.make_mesh((x, y), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    return NamedSharding(mesh, PartitionSpec(*axes))


def make_state(seed=0):
    rng = np.random.default_rng(seed)
    put = jax.device_put
    return {
        "params": {
            "embed": put(rng.normal(size=(64, 48)).astype(np.float32), sharding("x", "y")),
            "layers": [
                {"kernel": put(rng.normal(size=(8, 8)).astype(jnp.bfloat16), sharding(None, "x"))},
                {"kernel": put(rng.normal(size=(8, 8)).astype(jnp.bfloat16), sharding(None, "x"))},
            ],
        },
        "optimizer": {
            "count": put(np.int32(seed), sharding()),
            "rows": put(rng.integers(0, 99, 24, np.int32), sharding("y")),
        },
    }


def abstract(state, **changes):
    def describe(path, leaf):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=changes.get(path[-1].key, leaf.sharding)
        )

    return jax.tree_util.tree_map_with_path(describe, state)


def assert_same(restored, state):
    def check(new, old):
        assert new.dtype == old.dtype
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()

    jax.tree.map(check, restored, state)


def save_steps(folder, *steps, keep_last=10, keep_every=0):
    with Checkpointer(folder, keep_last=keep_last, keep_every=keep_every) as checkpointer:
        for step in steps:
            assert (
                checkpointer.save(step, make_state(step), metadata={"position": step * 8}) is True
            )


def restore_from(checkpointer, target=None, *, step=None):
    restored = checkpointer.restore(target or abstract(make_state()), step)
    assert restored is not None
    return restored


def restore(folder, target=None, *, step=None):
    with Checkpointer(folder, keep_last=1) as checkpointer:
        return restore_from(checkpointer, target, step=step)


def files_of(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def largest_file(step_folder):
    return max(files_of(step_folder), key=lambda path: path.stat().st_size)


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_state_comes_back_bit_for_bit_with_its_metadata(tmp_path):
    save_steps(tmp_path, 3)
    step, state, metadata = restore(tmp_path)
    assert (step, metadata) == (3, {"position": 24})
    assert_same(state, make_state(3))
    assert names(tmp_path) == ["3"]
    assert not [path for path in files_of(tmp_path) if path.suffix in (".pkl", ".pickle")]


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
    checkpointer = Checkpointer(tmp_path / "new", keep_last=1)
    assert checkpointer.restore(abstract(make_state())) is None
    assert checkpointer.latest_step() is None
    checkpointer.close()


@pytest.mark.parametrize(
    "mesh", [{"x": 8, "y": 1}, {"x": 1, "y": 8}, {"x": 2, "y": 2}, {"x": 1, "y": 1}]
)
def test_a_state_comes_back_in_the_layout_asked_for(tmp_path, mesh):
    save_steps(tmp_path, 5)
    wanted = {
        "embed": sharding("y", "x", **mesh),
        "kernel": sharding("x", "y", **mesh),
        "rows": sharding(("x", "y"), **mesh),
    }
    target = abstract(make_state(), **wanted)
    _, state, _ = restore(tmp_path, target)
    assert_same(state, make_state(5))
    for leaf, description in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == description.sharding


def test_floats_are_converted_to_the_dtype_asked_for_and_the_log_says_so(tmp_path, caplog):
    save_steps(tmp_path, 5)
    target = abstract(make_state())
    target["params"]["embed"] = jax.ShapeDtypeStruct((64, 48), jnp.bfloat16, sharding=sharding("x"))
    _, state, _ = restore(tmp_path, target)
    expected = np.asarray(make_state(5)["params"]["embed"]).astype(jnp.bfloat16)
    assert np.asarray(state["params"]["embed"]).tobytes() == expected.tobytes()
    assert "such as params.embed: saved float32, wanted bfloat16" in caplog.text


def test_metadata_is_read_without_touching_arrays(tmp_path):
    save_steps(tmp_path, 3)
    largest_file(tmp_path / "3" / "state").unlink()
    checkpointer = Checkpointer(tmp_path, keep_last=0)
    assert checkpointer.latest_step() == 3
    assert checkpointer.metadata(3) == {"position": 24}
    with pytest.raises(ValueError, match=r"step=4 is not in .*; it holds 3"):
        checkpointer.metadata(4)


def test_every_flipped_bit_is_found_and_the_step_before_is_used(tmp_path, caplog):
    save_steps(tmp_path, 1, 2)
    files, rng = files_of(tmp_path / "2"), random.Random(0)
    # Each file once, and 40 more places weighted by size: most bytes are array bytes.
    chosen = files + rng.choices(files, [path.stat().st_size for path in files], k=40)
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        for path in chosen:
            bit = rng.randrange(path.stat().st_size * 8)
            flip(path, bit)
            caplog.clear()
            step, state, metadata = restore_from(checkpointer)
            assert (step, metadata) == (1, {"position": 8}), f"bit {bit} of {path} went unseen"
            (message,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
            assert (
                message.startswith("checkpoint step 2 in")
                and path.relative_to(tmp_path / "2").as_posix() in message
            )
            flip(path, bit)
        assert_same(state, make_state(1))
        assert restore_from(checkpointer)[0] == 2


def test_no_flipped_bit_of_the_checksums_changes_a_checksum(tmp_path):
    save_steps(tmp_path, 1)
    path = tmp_path / "1" / checksums.NAME
    data, sound = path.read_bytes(), checksums.read(tmp_path / "1")
    for bit in range(0, len(data) * 8, 11):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert checksums.read(tmp_path / "1") == sound
        except checksums.ChecksumError:
            pass


DAMAGES = {
    "truncated": lambda folder: os.truncate(largest_file(folder), 100),
    "emptied": lambda folder: os.truncate(largest_file(folder), 0),
    "grown": lambda folder: os.truncate(
        largest_file(folder), largest_file(folder).stat().st_size + 1
    ),
    "missing": lambda folder: largest_file(folder).unlink(),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "no metadata": lambda folder: (folder / "metadata.json").unlink(),
    "empty folder": lambda folder: [path.unlink() for path in files_of(folder)],
}
MESSAGES = {
    "truncated": "has 100 bytes",
    "emptied": "has 0 bytes",
    "grown": "bytes, saved with",
    "missing": "is missing",
    "no checksums": "checksums.json is missing",
    "no metadata": "metadata.json is missing",
    "empty folder": "checksums.json is missing",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_named_passed_over_and_put_aside_by_the_next_save(
    tmp_path, caplog, damage
):
    save_steps(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "2")
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        with pytest.raises(
            CheckpointError, match=rf"(?s)2: .*{MESSAGES[damage]}.*restore another step \(1\)"
        ):
            checkpointer.restore(abstract(make_state()), step=2)
        step, state, _ = restore_from(checkpointer)
        assert step == 1 and MESSAGES[damage] in caplog.text
        assert_same(state, make_state(1))
        assert names(tmp_path) == ["1", "2"], "a restore must not change the folder"
        checkpointer.save(2, make_state(7), metadata={})
        checkpointer.wait()
        assert names(tmp_path) == ["2", "2.corrupt"]
        assert_same(restore_from(checkpointer)[1], make_state(7))


def test_a_step_under_the_name_of_another_is_refused_and_the_one_before_is_used(tmp_path, caplog):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "2").rename(tmp_path / "9")
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        assert checkpointer.latest_step() == 1
        with pytest.raises(CheckpointError, match="9: it holds step 2, saved under that name"):
            checkpointer.metadata(9)
        assert restore_from(checkpointer)[0] == 1
        assert "checkpoint step 9 in" in caplog.text and "it holds step 2" in caplog.text
        checkpointer.save(2, make_state(2), metadata={})
    assert names(tmp_path) == ["1", "2", "9.corrupt"]


def plant(path, kind):
    if kind == "a file":
        path.write_text("not a checkpoint")
    else:
        path.symlink_to(path.parent / "nowhere" if kind == "a link to nothing" else path.parent)


@pytest.mark.parametrize("kind", ["a file", "a link to nothing", "a link to a folder"])
def test_what_stands_where_a_step_goes_stops_no_save(tmp_path, caplog, kind):
    save_steps(tmp_path, 1)
    for name in ("2", "2.saving", "2.replaced", "0.deleting"):
        plant(tmp_path / name, kind)
    save_steps(tmp_path, 2, keep_last=2)
    is_stray = kind != "a link to a folder"  # that is a step, until one of its name is saved
    assert names(tmp_path) == ["1", "2"] + ["2.stray"] * is_stray
    assert ("2 to 2.stray; delete it" in caplog.text) == is_stray
    assert restore(tmp_path)[0] == 2


def test_a_step_that_is_a_link_to_a_folder_is_restored(tmp_path):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "2").rename(tmp_path / "elsewhere")
    (tmp_path / "2").symlink_to(tmp_path / "elsewhere")
    assert restore(tmp_path)[0] == 2
    save_steps(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["3", "elsewhere"]


def test_when_no_step_is_sound_the_error_lists_each(tmp_path):
    save_steps(tmp_path, 1, 2)
    DAMAGES["truncated"](tmp_path / "1")
    DAMAGES["no checksums"](tmp_path / "2")
    with pytest.raises(
        CheckpointError,
        match=r"no sound checkpoint .*\n  2: checksums.json is missing.*"
        r"\n  1: state/.* has 100 bytes",
    ):
        restore(tmp_path)


def test_latest_step_passes_over_a_step_whose_metadata_is_damaged(tmp_path):
    save_steps(tmp_path, 1, 2)
    flip(tmp_path / "2" / "metadata.json", 99)
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    assert checkpointer.latest_step() == 1
    with pytest.raises(CheckpointError, match=r"metadata\.json has changed"):
        checkpointer.metadata(2)


def test_a_step_that_does_not_exist_cannot_be_restored(tmp_path):
    save_steps(tmp_path, 1, 2)
    with pytest.raises(ValueError, match=r"step=7 is not in .*; it holds 1, 2"):
        restore(tmp_path, step=7)


def test_a_step_saved_again_is_replaced(tmp_path):
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        checkpointer.save(4, make_state(1), metadata={"try": 1})
        checkpointer.save(4, make_state(2), metadata={"try": 2})
        step, state, metadata = restore_from(checkpointer)
    assert (step, metadata, names(tmp_path)) == (4, {"try": 2}, ["4"])
    assert_same(state, make_state(2))


def test_a_replacement_cut_short_leaves_the_older_save_in_use(tmp_path):
    save_steps(tmp_path, 4)
    (tmp_path / "4").rename(tmp_path / "4.replaced")
    assert_same(restore(tmp_path)[1], make_state(4))
    save_steps(tmp_path, 6)
    assert names(tmp_path) == ["4", "6"]


def test_saving_after_going_back_puts_newer_steps_aside_and_the_next_start_leaves_them(tmp_path):
    save_steps(tmp_path, 5, 10, 15)
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        checkpointer.restore(abstract(make_state()), step=5)
        checkpointer.save(6, make_state(6), metadata={})
    assert names(tmp_path) == ["10.superseded", "15.superseded", "5", "6"]
    assert restore(tmp_path)[0] == 6


@pytest.mark.parametrize(
    "keep_last, keep_every, kept",
    [
        (1, 0, {9}),
        (3, 0, {7, 8, 9}),
        (1, 4, {4, 8, 9}),
        (2, 3, {3, 6, 8, 9}),
        (20, 0, set(range(1, 10))),
    ],
)
def test_the_last_steps_and_every_nth_are_kept(tmp_path, keep_last, keep_every, kept):
    save_steps(tmp_path, *range(1, 10), keep_last=keep_last, keep_every=keep_every)
    assert names(tmp_path) == sorted(map(str, kept))


def test_nothing_is_deleted_before_the_newer_step_is_whole(tmp_path, monkeypatch):
    save_steps(tmp_path, 1)

    def fail(folder, names):
        raise OSError("the checksums failed")

    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(checksums, "compute", fail)
            checkpointer.save(2, make_state(2), metadata={})
            with pytest.raises(
                CheckpointError, match=r"saving step 2 to .* failed: OSError: the checksums failed"
            ):
                checkpointer.wait()
        assert restore_from(checkpointer)[0] == 1
        checkpointer.save(2, make_state(2), metadata={})
    assert names(tmp_path) == ["2"]


def donate(state):
    return jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 7, tree), donate_argnums=0)(state)


def delete(state):
    # Stricter than donation, which a CPU refuses while numpy still looks at the buffer.
    return jax.tree.map(lambda leaf: leaf.delete(), state)


@pytest.mark.parametrize("destroy", [donate, delete])
def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path, destroy):
    def make(step):  # 4 MiB: long enough in the writing that a late copy would be seen
        return {
            "w": jax.device_put(
                np.random.default_rng(step).normal(size=1 << 20).astype(np.float32), sharding("x")
            )
        }

    with Checkpointer(tmp_path, keep_last=20) as checkpointer:
        for step in range(6):
            state = make(step)
            checkpointer.save(step, state, metadata={})
            destroy(state)
        for step in range(6):
            assert_same(restore_from(checkpointer, abstract(make(step)), step=step)[1], make(step))


def test_save_returns_before_the_files_are_written(tmp_path, monkeypatch):
    import threading

    may_write, compute = threading.Event(), checksums.compute
    monkeypatch.setattr(checksums, "compute", lambda *args: may_write.wait(600) and compute(*args))
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, make_state(1), metadata={})
        assert names(tmp_path) == ["1.saving"] and checkpointer.latest_step() is None
        may_write.set()
        checkpointer.wait()
        assert checkpointer.latest_step() == 1


@pytest.mark.parametrize("entry", ["save", "wait", "close"])
def test_a_write_that_fails_in_the_background_is_raised_by_the_next_call(tmp_path, entry):
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    # One shard: when several fail, callbacks of Orbax 0.12 find their event loop closed and warn.
    state = {
        "w": jax.device_put(
            np.random.default_rng(0).normal(size=1 << 18).astype(np.float32), sharding(x=1, y=1)
        )
    }
    checkpointer.save(1, state, metadata={})
    checkpointer.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, limits[1])
    )  # the kernel refuses to write more: a full disk
    try:
        checkpointer.save(2, state, metadata={})
        with pytest.raises(
            CheckpointError,
            match=f"saving step 2 to {tmp_path} failed: .*check that there is space",
        ):
            {
                "save": lambda: checkpointer.save(3, state, metadata={}),
                "wait": checkpointer.wait,
                "close": checkpointer.close,
            }[entry]()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if entry != "close":
        assert restore_from(checkpointer, abstract(state))[0] == 1
        checkpointer.save(4, state, metadata={})
        checkpointer.close()
        assert names(tmp_path) == ["4"]


FAILING = """
    # Every write fails, as on a full disk, and the process leaves in each of the ways it may.
    import logging, resource, signal, sys
    import jax, numpy as np
    from jaxscale.checkpoint.checkpointer import Checkpointer
    from jaxscale.checkpoint.stored import CheckpointError
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    state = {str(n): jax.numpy.ones((300, 300)) * n for n in range(12)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
    try:
        with Checkpointer(sys.argv[1], keep_last=1) as checkpointer:
            checkpointer.save(1, state, metadata={})
            if sys.argv[2] == "wait":
                checkpointer.wait()
            if sys.argv[2] == "raise":
                raise ValueError("what ended the run")
    except (CheckpointError, ValueError) as error:
        print("error:", error, "from", type(error).__name__)
"""


@pytest.mark.parametrize("way", ["close", "wait", "raise"])
def test_a_save_that_fails_is_told_in_one_line_and_without_a_traceback(tmp_path, way):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAILING), str(tmp_path), way],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    lines = done.stdout.splitlines()
    told = f"saving step 1 to {tmp_path} failed: "
    assert done.returncode == 0 and done.stdout.count(told) == 1, done.stdout
    assert len(lines) == (2 if way == "raise" else 1), done.stdout
    if way == "raise":
        assert told in lines[0]
        assert lines[1] == "error: what ended the run from ValueError"


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"workdir: checkpoints cannot be written to .*set workdir to a folder"
    ):
        Checkpointer(tmp_path / "file" / "checkpoints", keep_last=1)


def test_a_reader_creates_nothing_and_cannot_save(tmp_path):
    checkpointer = Checkpointer(tmp_path / "absent", keep_last=0)
    assert (
        checkpointer.latest_step() is None and checkpointer.restore(abstract(make_state())) is None
    )
    with pytest.raises(ValueError, match="set keep_last to 1 or more"):
        checkpointer.save(1, make_state(), metadata={})
    assert names(tmp_path) == []


def test_leaves_that_differ_are_named(tmp_path):
    save_steps(tmp_path, 1)
    state = make_state()
    state["params"]["embed"] = jax.device_put(np.zeros((32, 48), np.float32), sharding("x"))
    state["params"]["layers"].append({"kernel": state["params"]["layers"][0]["kernel"]})
    state["optimizer"]["rows"] = jax.device_put(np.zeros(24, np.float32), sharding("y"))
    del state["optimizer"]["count"]
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        with pytest.raises(ValueError) as raised:
            checkpointer.restore(abstract(state))
    lines = str(raised.value).split("\n  ")[1:]
    assert sorted(lines) == [
        "optimizer.count: saved int32[], wanted absent",
        "optimizer.rows: saved int32[24], wanted float32[24]",
        "params.embed: saved float32[64, 48], wanted float32[32, 48]",
        "params.layers.2.kernel: saved absent, wanted bfloat16[8, 8]",
    ]


@pytest.mark.parametrize(
    "leaf, message",
    [
        (np.zeros(3), "a.b of the state is ndarray"),
        (3, "a.b of the state is int"),
        (lambda: jax.random.key(0), "jax.random.key_data"),
        (lambda: jnp.zeros((0, 4)), r"shape \(0, 4\)"),
    ],
)
def test_a_leaf_that_cannot_be_saved_is_named_before_anything_is_written(tmp_path, leaf, message):
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        with pytest.raises(ValueError, match=message):
            checkpointer.save(1, {"a": {"b": leaf() if callable(leaf) else leaf}}, metadata={})
        with pytest.raises(ValueError, match="metadata of a checkpoint must be JSON"):
            checkpointer.save(1, make_state(), metadata={"path": tmp_path})
        with pytest.raises(ValueError, match="step=-1"):
            checkpointer.save(-1, make_state(), metadata={})
    assert names(tmp_path) == []


def test_a_wanted_leaf_without_a_sharding_is_refused(tmp_path):
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        with pytest.raises(ValueError, match=r"a of abstract_state .* with a sharding"):
            checkpointer.restore({"a": jax.ShapeDtypeStruct((3,), jnp.float32)})


def test_orbax_is_quiet_and_other_absl_messages_are_not(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    save_steps(tmp_path, 1)
    restore(tmp_path)
    assert {record.name for record in caplog.records} <= {
        "jaxscale.checkpoint.checkpointer",
        "jaxscale.checkpoint.stored",
        "asyncio",
    } | {
        record.name
        for record in caplog.records
        if record.name.startswith("jax.") or record.name.startswith("jax._src")
    }
    from absl import logging as absl_logging

    absl_logging.warning("somebody else's message")
    assert "somebody else's message" in caplog.text


KILLED = """
    # Each child goes on where the last one was killed; the parent knows the last step that a child
    # called whole.
    import os, random, select, signal, sys, time
    import jax, numpy as np
    from jaxscale.checkpoint.checkpointer import Checkpointer

    def train(pipe):
        checkpointer = Checkpointer(sys.argv[1], keep_last=2)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = lambda shape: jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        target = {"w": wanted((1 << 16,)), "b": wanted(())}
        restored = checkpointer.restore(target)
        step = 0
        if restored:
            step, state, metadata = restored
            assert metadata == {"position": step}
            assert (np.asarray(state["w"]) == step).all() and int(state["b"]) == step
        os.write(pipe, f"restored {step}\\n".encode())
        while True:
            step += 1
            state = {"w": np.full(1 << 16, step, np.int32), "b": np.int32(step)}
            checkpointer.save(step, jax.device_put(state, sharding), metadata={"position": step})
            checkpointer.wait()
            os.write(pipe, f"whole {step}\\n".encode())

    rng, whole, kills = random.Random(int(sys.argv[2])), 0, int(sys.argv[3])
    for kill in range(kills + 1):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                train(writer)
            finally:
                os._exit(1)
        os.close(writer)
        lines = os.fdopen(reader)
        word, step = lines.readline().split()
        assert word == "restored" and int(step) in (whole, whole + 1), (step, whole)
        whole = int(step)
        if kill < kills:
            time.sleep(rng.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for line in lines:
            whole = int(line.split()[1])
    print("kills", kills, "last whole step", whole, sorted(os.listdir(sys.argv[1])))
"""


def test_after_kill_9_at_any_moment_the_last_whole_step_is_restored(tmp_path):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        # The last of two flags counts.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), "0", "8"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "kills 8" in done.stdout, done.stdout


TWO_PROCESSES = """
    import logging, os, pathlib
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    folder = pathlib.Path(arguments[0])
    from jaxscale.checkpoint.checkpointer import Checkpointer
    logging.basicConfig(level=logging.WARNING)

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    values = np.random.default_rng(0).normal(size=(3, 4096)).astype(np.float32)
    make_w = lambda step: jax.make_array_from_callback((4096,), sharding, values[step].__getitem__)
    make = lambda step: {"w": make_w(step)}
    target = {"w": jax.ShapeDtypeStruct((4096,), np.float32, sharding=sharding)}
    checkpointer = Checkpointer(folder, keep_last=2)
    try:
        checkpointer.save(1, {"w": jax.numpy.zeros(3)}, metadata={})
    except ValueError as error:
        assert "this process only" in str(error)
    for step in (1, 2):
        checkpointer.save(step, make(step), metadata={"position": step})
    checkpointer.wait()
    multihost_utils.sync_global_devices("saved")
    assert sorted(os.listdir(folder)) == ["1", "2"], os.listdir(folder)
    assert not list(folder.glob("2/checksums.json.*"))
    step, state, metadata = checkpointer.restore(target)
    assert (step, metadata) == (2, {"position": 2})
    for shard in state["w"].addressable_shards:
        assert np.array_equal(shard.data, values[2][shard.index])
    if index == 0:  # damage what process 1 wrote
        path = max(folder.glob("2/state/ocdbt.process_1/d/*"), key=lambda path: path.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    multihost_utils.sync_global_devices("damaged")
    step, state, metadata = checkpointer.restore(target)
    assert step == 1, step
    for shard in state["w"].addressable_shards:
        assert np.array_equal(shard.data, values[1][shard.index])
    checkpointer.save(2, make(2), metadata={})
    checkpointer.close()
    multihost_utils.sync_global_devices("closed")
    assert sorted(os.listdir(folder)) == ["1", "2", "2.corrupt"], os.listdir(folder)
    print("process", index, "done")
"""


def test_two_processes_save_and_agree_on_the_step_to_restore(tmp_path, run_two_processes):
    outputs = run_two_processes(TWO_PROCESSES, tmp_path)
    for index, output in enumerate(outputs):
        assert f"process {index} done" in output, output
    assert outputs[0].count("is damaged and not used") == 1 and "is damaged" not in outputs[1]
    files = json.loads((tmp_path / "2" / "checksums.json").read_bytes())["files"]
    assert {name.split("/")[1] for name in files if "/" in name} >= {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }
