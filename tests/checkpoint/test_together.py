"""A save that fails on one process of several fails on all, alike and soon; the next succeeds."""

import json
import re

import pytest

SCRIPT = """
    import json, logging, os, pathlib, resource, signal, sys, time, traceback
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from jaxscale.checkpoint import checkpointer, folders
    from jaxscale.checkpoint.checkpointer import Checkpointer
    from jaxscale.checkpoint.stored import CheckpointError
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
        raise OSError(30, "Read-only file system", "here")

    def disturb(how):
        # Undoes itself by the function that it returns.
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

    def fail_once(folder, how, faulty):
        with Checkpointer(folder, keep_last=1) as saves:
            saves.save(1, make(1), metadata={})
            saves.wait()
            undo = disturb(how) if str(index) in faulty else lambda: None
            began, said = time.monotonic(), None
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

    for name, (how, faulty) in json.loads(arguments[1]).items():
        print("failure:", name, flush=True)
        try:
            fail_once(pathlib.Path(arguments[0]) / name, how, faulty)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        print("process", index, "done", flush=True)
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


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, run_two_processes):
    """What each of two processes prints of each failure, by its name; and the folder of all."""
    folder = tmp_path_factory.mktemp("together")
    printed = run_two_processes(SCRIPT, folder, json.dumps(FAILURES))
    one = re.compile(r"^failure: (.*)\n((?:(?!failure: ).*\n)*)", re.MULTILINE)
    parts = [dict(one.findall(text)) for text in printed]
    return {name: [part[name] for part in parts] for name in FAILURES}, folder


@pytest.mark.parametrize("failure", FAILURES)
def test_all_are_told_who_failed_and_why_and_the_next_save_succeeds(outputs, failure):
    (how, faulty), (printed, folder) = FAILURES[failure], outputs
    mine = printed[failure]
    said = [line for text in mine for line in text.splitlines() if line.startswith("said:")]
    assert len(said) == 2 and said[0] == said[1], mine
    assert f"saving step 2 to {folder}/{failure} failed: process {faulty[0]} (host " in said[0]
    for process in (0, 1):
        assert (f"process {process} (host" in said[0]) == (str(process) in faulty)
    wanted = "File too large" if how == "no space" else "Read-only file system"
    assert wanted in said[0]
    for text in mine:
        assert "done" in text and "Traceback" not in text, text
