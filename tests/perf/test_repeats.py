"""An update that is run again from one start: that the same bits are told, and where others are."""

import functools

import jax
import numpy as np
import pytest

from jaxscale.perf import repeats
from jaxscale.step.state import init_state, replaced
from tests.perf.scripts import Script


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, write_small_config):
    return write_small_config(tmp_path_factory.mktemp("config"), batch_size=8)


@pytest.fixture(scope="module")
def script():
    return Script("try_repeats")


@pytest.fixture
def try_repeats(script, config_file, monkeypatch, capsys):
    """`try_repeats(*arguments)`: its exit code and what it printed, on two devices."""
    on_two = functools.partial(repeats.repeat, devices=jax.devices()[:2])
    monkeypatch.setattr(script.module.repeats, "repeat", on_two)

    def run(*arguments):
        layout = "--config.mesh.tensor=2", "--config.mesh.fsdp=1"
        code = script.run("--config", config_file, *layout, *arguments)
        return code, *capsys.readouterr()

    return run


def test_the_same_bits_are_told(try_repeats):
    code, printed, _ = try_repeats("--times=3", "--updates=2")
    first, second, last = printed.splitlines()
    assert code == 0
    for number, line in enumerate((first, second), 1):
        assert line.startswith(f"update {number}: loss ") and line.count("loss") == 1
        assert line.endswith("; the state is the same")
    assert last.startswith("the same bits, 3 times on ")


def test_other_bits_are_an_error_that_names_leaves_and_devices(try_repeats, monkeypatch):
    starts = []

    def another_start(plan):
        """The second time with one bit of one weight changed."""
        state = init_state(plan)
        starts.append(state)
        if len(starts) != 2:
            return state
        norm = state.params["norm"][...]
        values = np.array(norm)
        values[0] = np.nextafter(values[0], np.float32(np.inf))
        changed = jax.device_put(values, norm.sharding)
        return state._replace(params=replaced(state.params, {"norm": changed}))

    monkeypatch.setattr(repeats, "init_state", another_start)
    code, printed, errors = try_repeats("--times=2", "--updates=2")
    (line,) = printed.splitlines()  # what comes after differs by it
    assert code == 1 and len(starts) == 2
    assert (
        "params.norm" in line
        and "; of the state differ, on devices 0, 1: " in line
        and line.endswith(" more")
    )
    assert "error: other bits, 2 times on " in errors and "config.deterministic=True" in errors


def test_an_update_that_does_not_fit_is_refused(try_repeats, monkeypatch):
    def refuse(update, plan):
        raise ValueError("config.remat='gemms' does not fit the memory of these devices")

    monkeypatch.setattr(repeats, "compile_to_fit", refuse)
    code, printed, errors = try_repeats()
    assert (code, printed) == (2, "") and "does not fit the memory of these devices" in errors


def test_what_differs_is_named_with_its_devices():
    def compare(*sums):
        runs = [("loss nan, norm nan", np.array(each, np.uint32)) for each in sums]
        return repeats.compare(7, runs, names=["params.a", "params.b"])

    # [devices, leaves, words]
    same = [[[1, 1], [2, 2]], [[1, 1], [3, 3]]]
    other = [[[1, 1], [2, 2]], [[1, 1], [3, 4]]]
    assert compare(same, same, same).is_same
    compared = compare(same, same, other)
    assert compared.different == {"params.b": (1,)} and not compared.is_same
    assert str(compared) == (
        "update 7: loss nan, norm nan; of the state differ, on devices 1: params.b"
    )


def test_results_that_differ_are_all_told():
    sums = np.zeros((1, 1, 2), np.uint32)
    runs = [(f"loss {loss}, norm 1.0", sums) for loss in (1.5, 2.5, 1.5)]
    compared = repeats.compare(1, runs, names=["params.a"])
    assert not compared.is_same
    assert str(compared).startswith("update 1: loss 1.5, norm 1.0; loss 2.5, norm 1.0; ")
