"""Steps of which each host has a part become whole in the shared folder, or stay where they are."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.checkpoint import parts, tiers
from jaxscale.checkpoint.parts import Part
from jaxscale.config import CheckpointConfig


def said(*here):
    return parts.to_json(dict.fromkeys(here, Path("/nowhere")))


def test_each_process_copies_its_own_part_and_the_first_of_a_host_those_of_nobody():
    old, new = ([Part(number, 3, save) for number in range(3)] for save in ("a", "b"))
    # Processes 0 and 1 are on the host of 0 and 2; process 2 on another.
    first_host = said((8, new[2]), (8, new[0]), (8, old[1]), (4, old[0]))
    found = list(parts.newest_first([first_host, first_host, said((8, new[1]), (8, new[2]))]))
    assert found == [
        (8, {new[2]: 2, new[0]: 0, new[1]: 2}),
        (8, {old[1]: 1}),
        (4, {old[0]: 0}),
    ]


def test_what_the_whole_step_takes_of_a_part():
    names = [
        "metadata.json",
        "part.json",
        "state/_METADATA",
        "state/array_metadatas/process_1",
        "state/ocdbt.process_1/d/0a1b",
        "state/ocdbt.process_1/manifest.ocdbt",
    ]
    assert [name for name in names if parts.is_of_step(name, part=1)] == names[3:]
    assert [name for name in names if parts.is_of_step(name, part=0)] == [names[0], *names[2:]]


def test_a_part_that_cannot_be_read_is_not_there(tmp_path):
    for number, text in enumerate(["{", "[]", '{"number": 3}', '{"number":3,"of":4,"save":"a"}']):
        folder = parts.folder_of(tmp_path, number) / "8"
        folder.mkdir(parents=True)
        (folder / parts.PART).write_text(text)
    (tmp_path / "part-7" / "9").mkdir(parents=True)
    assert list(parts.find(tmp_path)) == [(8, Part(3, of=4, save="a"))]


SAVES = """
    import logging, pathlib, shutil, sys
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jaxscale.checkpoint import checkpointer, tiers
    from jaxscale.checkpoint.stored import CheckpointError
    from jaxscale.config import CheckpointConfig
    folder = pathlib.Path(arguments[0])
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)

    mesh = jax.make_mesh((2, 2), ("data", "x"), axis_types=(AxisType.Explicit,) * 2)
    P = PartitionSpec
    specs = {"all": P(("data", "x")), "some": P("x"), "none": P()}
    values = np.random.default_rng(0).normal(size=(9, 1 << 14)).astype(np.float32)

    def make(step):
        return {
            name: jax.make_array_from_callback(
                (1 << 14,), NamedSharding(mesh, spec), values[step].__getitem__
            )
            for name, spec in specs.items()
        }

    target = {
        name: jax.ShapeDtypeStruct((1 << 14,), np.float32, sharding=NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    (folder / "run").mkdir(exist_ok=True)

    def opened(local=f"host{index}", **settings):
        config = CheckpointConfig(local=local and str(folder / local), **settings)
        return tiers.open_checkpoints(config, folder / "run" / "checkpoints")

    def check(restored, step):
        assert restored[0] == step and restored[2] == {"saved": step}
        for name, array in restored[1].items():
            for shard in array.addressable_shards:
                assert np.array_equal(shard.data, values[step][shard.index]), name

    def save(checkpoints, step):
        checkpoints.save(step, make(step), metadata={"saved": step})
"""


def test_parts_are_copied_and_what_fails_on_one_process_fails_on_both_and_is_told_once(
    tmp_path, run_two_processes
):
    code = """
    def full(*arguments):
        raise OSError(28, "No space left on device")

    with opened(keep_last=2) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        copyfile = shutil.copyfile
        if index == 1:
            shutil.copyfile = full
        save(checkpoints, 2)
        said = None
        try:
            checkpoints.wait()
        except CheckpointError as error:
            said = str(error)
        print("said:", said)
        shutil.copyfile = copyfile
        check(checkpoints.restore(target), 1)
        save(checkpoints, 3)
        save(checkpoints, 4)
        check(checkpoints.restore(target, before=4), checkpoints._shared.steps()[-2])
        check(checkpoints.restore(target), 4)
    with opened() as checkpoints:
        check(checkpoints.restore(target), 4)
    """
    outputs = run_two_processes(SAVES + code, tmp_path)
    told = [line for output in outputs for line in output.splitlines() if line.startswith("said:")]
    assert len(told) == 2 and told[0] == told[1]
    assert "failed: process 1 (host " in told[0] and "No space left on device" in told[0]
    shared = os.listdir(tmp_path / "run" / "checkpoints")
    assert not [name for name in shared if name.endswith(".saving")] and "4" in shared
    for output in outputs:
        assert "Traceback" not in output and "primary_host" not in output, output


def test_what_is_late_on_one_process_is_left_out_by_both_but_for_what_is_kept_for_good(
    tmp_path, run_two_processes
):
    code = """
    import threading

    may_copy, copyfile = threading.Event(), shutil.copyfile
    if index == 1:
        shutil.copyfile = lambda *files: may_copy.wait(60) and copyfile(*files)
        # By itself this one would find the time for each.
        tiers.TieredCheckpointer._is_wanted = lambda self, step: True
    with opened(keep_last=9, keep_every=4) as checkpoints:
        for step in range(1, 7):
            save(checkpoints, step)
        checkpoints._fast.wait()
        may_copy.set()
        checkpoints.wait()
        assert checkpoints._shared.steps() == [1, 4, 6], checkpoints._shared.steps()
        assert checkpoints._fast.steps()[-2:] == [5, 6]
    """
    run_two_processes(SAVES + code, tmp_path)


def test_parts_that_nobody_had_copied_are_restored_by_one_process_too(tmp_path, run_two_processes):
    """Where one sees the disks of both."""
    code = """
    with opened() as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        checkpoints._is_wanted = lambda step: False
        save(checkpoints, 2)
        checkpoints.wait()
        assert checkpoints._shared.steps() == [1]
    """
    run_two_processes(SAVES + code, tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    id = (checkpoints / tiers.ID).read_text()
    (tmp_path / "host1" / id / "part-1").rename(tmp_path / "host0" / id / "part-1")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    names = ("all", "some", "none")
    target = {
        name: jax.ShapeDtypeStruct((1 << 14,), np.float32, sharding=sharding) for name in names
    }
    with tiers.open_checkpoints(
        CheckpointConfig(local=str(tmp_path / "host0")), checkpoints
    ) as one:
        step, state, metadata = one.restore(target) or pytest.fail()
    values = np.random.default_rng(0).normal(size=(9, 1 << 14)).astype(np.float32)
    assert (step, metadata) == (2, {"saved": 2})
    for name in names:
        assert np.array_equal(state[name], values[2])
    with tiers.open_checkpoints(CheckpointConfig(local=str(tmp_path / "host0")), checkpoints):
        assert not list((tmp_path / "host0" / id).glob("part-*/*"))


def test_what_one_host_had_saved_alone_is_gone_on_from_by_two(tmp_path, run_two_processes):
    code = """
    with opened(local="host0") as checkpoints:
        checkpoints._begin_copy = checkpoints._fast.on_published = lambda step: None
        save(checkpoints, 2)
    with opened() as checkpoints:
        assert checkpoints.latest_step() == 2
        check(checkpoints.restore(target), 2)
    """
    run_two_processes(SAVES + code, tmp_path)


def test_a_process_without_a_local_folder_beside_one_that_has_is_named(tmp_path, run_two_processes):
    code = """
    try:
        opened(local="host1" if index == 1 else "")
    except ValueError as error:
        print("said:", error)
    """
    for output in run_two_processes(SAVES + code, tmp_path):
        assert "said: config.checkpoint.local: process 0 has none, and others have; set" in output


def test_a_local_folder_that_cannot_be_made_is_named_by_its_key(tmp_path):
    (tmp_path / "file").write_text("")
    config = CheckpointConfig(local=str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"^config.checkpoint.local='.*/file' cannot .*; set"):
        tiers.open_checkpoints(config, tmp_path / "checkpoints")
