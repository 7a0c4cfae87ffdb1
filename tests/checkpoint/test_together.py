"""A save that fails on one process of several fails on all, alike and soon; the next succeeds."""

import pytest

SCRIPT = """
    import logging, os, pathlib, resource, signal, sys, time
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jaxscale.checkpoint import checkpointer, folders
    from jaxscale.checkpoint.checkpointer import Checkpointer
    from jaxscale.checkpoint.stored import CheckpointError
    folder, how, faulty = pathlib.Path(arguments[0]), arguments[1], set(map(int, arguments[2]))
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    values = np.random.default_rng(0).normal(size=(4, 1 << 16)).astype(np.float32)
    make = lambda step: {
        "w": jax.make_array_from_callback((1 << 16,), sharding, values[step].__getitem__)
    }
    target = {"w": jax.ShapeDtypeStruct((1 << 16,), np.float32, sharding=sharding)}

    def fail(*arguments, **options):
        raise OSError(30, "Read-only file system", str(folder))

    def disturb():
        # Undoes itself by the function that it returns.
        if index not in faulty:
            return lambda: None
        if how == "no space":
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
            return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
        owner, name = {
            "cannot begin": (folders.StepFolders, "clear"),
            "not shared": (checkpointer, "_wait_to_see"),
            "no checksums": (checkpointer.checksums, "compute"),
            "no name": (folders.StepFolders, "publish"),
        }[how]
        original = getattr(owner, name)
        setattr(owner, name, fail)
        return lambda: setattr(owner, name, original)

    with Checkpointer(folder, keep_last=1) as saves:
        saves.save(1, make(1), metadata={})
        saves.wait()
        undo, began, said = disturb(), time.monotonic(), None
        try:
            saves.save(2, make(2), metadata={})
            saves.wait()
        except CheckpointError as error:
            said, step = str(error), error.step
        undo()
        assert said and step == 2 and time.monotonic() - began < 30
        assert saves.latest_step() == 1
        print("said:", said)
        saves.save(3, make(3), metadata={})
        saves.wait()
        assert saves.steps() == [3]
        step, state, _ = saves.restore(target)
        assert step == 3
        for shard in state["w"].addressable_shards:
            assert np.array_equal(shard.data, values[3][shard.index])
    assert sorted(os.listdir(folder)) == ["3"], os.listdir(folder)
    print("process", index, "done")
"""

# What fails, and on which processes.
FAILURES = {
    "no space, the lead": ("no space", "0"),
    "no space, not the lead": ("no space", "1"),
    "no space, both": ("no space", "01"),
    "cannot begin": ("cannot begin", "0"),
    "not shared": ("not shared", "1"),
    "no checksums": ("no checksums", "1"),
    "no name": ("no name", "0"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_all_are_told_who_failed_and_why_and_the_next_save_succeeds(
    tmp_path, run_two_processes, failure
):
    how, faulty = FAILURES[failure]
    outputs = run_two_processes(SCRIPT, tmp_path, how, faulty)
    said = [line for output in outputs for line in output.splitlines() if line.startswith("said:")]
    assert len(said) == 2 and said[0] == said[1], outputs
    assert f"saving step 2 to {tmp_path} failed: process {faulty[0]} (host " in said[0]
    for process in (0, 1):
        assert (f"process {process} (host" in said[0]) == (str(process) in faulty)
    wanted = "File too large" if how == "no space" else "Read-only file system"
    assert wanted in said[0]
    for output in outputs:
        assert "done" in output and "Traceback" not in output, output
