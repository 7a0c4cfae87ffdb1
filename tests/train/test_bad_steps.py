"""Steps that are not finite, or spikes: skipped bit by bit, named, and gone back over."""

import dataclasses
import json
import logging
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.config import BadStepsConfig, CheckpointConfig, Config
from jaxscale.data.loader import open_dataset
from jaxscale.step import update as step_update
from jaxscale.train.bad_steps import BadStepError
from jaxscale.train.loop import train
from tests.train.small import config_of, leaves_saved, steps, write_cats

MARK = 7  # a byte that one document alone has


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """40 documents, of which one in batch 10 has the mark, once."""
    folder = write_cats(tmp_path_factory.mktemp("marked"))
    config = marked_config(folder)
    corpus = open_dataset(config.data, seed=config.seed, seq_len=32, vocab_size=257)
    document, _ = corpus.train.documents([8 * 10 + 4])[0]
    text = bytes(corpus.dataset[document][:-1].tolist()).decode()
    (folder / f"{text.split()[2]}.txt").write_text(text.replace("mat.", f"mat{chr(MARK)}", 4))
    return folder


def marked_config(folder, **changes) -> Config:
    defaults: dict[str, Any] = dict(steps=16, checkpoint=CheckpointConfig(every=2, keep_last=20))
    return config_of(folder, shuffle=False, **(defaults | changes))


@pytest.fixture
def poison(monkeypatch):
    """`poison(nan)`: what the loss of a microbatch with the mark in it is multiplied by."""
    original = step_update._loss

    def poison(factor):
        def poisoned(held, counts, *, extra, microbatch, **options):
            loss, others = original(held, counts, extra=extra, microbatch=microbatch, **options)
            is_marked = (microbatch.tokens == MARK).any()
            return loss * jnp.where(is_marked, jnp.float32(factor), jnp.float32(1)), others

        monkeypatch.setattr(step_update, "_loss", poisoned)

    return poison


def marked_batches(config):
    """The numbers of the batches that the mark is in."""
    corpus = open_dataset(config.data, seed=config.seed, seq_len=32, vocab_size=257)
    batches = [corpus.train.rows(np.arange(8) + 8 * n).tokens for n in range(config.steps)]
    return [n for n, tokens in enumerate(batches) if (tokens == MARK).any()]


@pytest.mark.parametrize("factor, spike", [(np.nan, 0.0), (np.inf, 0.0), (50.0, 8.0)])
def test_a_bad_step_is_skipped_counted_and_its_documents_named(
    folder, tmp_path, poison, caplog, factor, spike
):
    poison(factor)
    settings = BadStepsConfig(spike=spike, window=8)
    config = marked_config(
        folder, bad_steps=settings, checkpoint=CheckpointConfig(every=1, keep_last=99)
    )
    marked = marked_batches(config)
    assert not spike or marked[0] >= 9  # a limit needs eight losses, two steps before
    caplog.set_level(logging.INFO)
    assert train(config, tmp_path).step == 16
    skipped = [record["step"] for record in steps(tmp_path) if record["skipped"]]
    assert skipped == [n + 1 for n in marked] and skipped
    lines = [json.loads(line) for line in (tmp_path / "bad_batches.jsonl").read_text().splitlines()]
    store = open_dataset(config.data, seed=0, seq_len=32, vocab_size=257).dataset
    for line, batch in zip(lines, marked, strict=True):
        assert (line["step"], line["batch"]) == (batch + 1, batch)
        assert line["rows"] == [8 * batch, 8 * batch + 7]
        documents = {n for a, b in line["documents"] for n in range(a, b + 1)}
        assert any((store[n] == MARK).any() for n in documents)
        # Of values that are not finite the place is named, once for steps in a row.
        is_first = not spike and batch - 1 not in marked
        assert line.get("from") == ("the loss" if is_first else None)
    before, after = (leaves_saved(tmp_path, step) for step in (marked[0], marked[0] + 1))
    changed = [key for key in before if before[key].tobytes() != after[key].tobytes()]
    assert changed == ["step"]
    assert f"{len(marked)} updates were skipped; bad_batches.jsonl has their batches" in caplog.text


def test_too_many_in_a_row_stop_the_run_and_nothing_of_them_is_in_the_state(
    folder, tmp_path, monkeypatch, poison
):
    poison(np.nan)
    monkeypatch.setattr(f"{__name__}.MARK", ord("T"))  # every document has it
    with pytest.raises(
        BadStepError,
        match=r"step 3: loss is nan, grad_norm is nan, the last of 3 in a row\. Values were not "
        r"finite from the loss on\. The run stopped",
    ):
        train(marked_config(folder, bad_steps=BadStepsConfig(stop_after=3)), tmp_path)
    (saved,) = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == 2
    assert all(np.isfinite(leaf).all() for leaf in leaves_saved(tmp_path, 2).values())


def test_looking_for_the_place_is_left_out_where_it_does_not_fit_or_is_not_wanted(
    folder, tmp_path, poison, monkeypatch, caplog
):
    poison(np.nan)
    monkeypatch.setattr("jaxscale.train.beside.pool_of", lambda plan: 1e-4)
    config = marked_config(folder)
    losses = []
    for is_wanted in (True, False):
        settings = BadStepsConfig(locate=is_wanted)
        workdir = tmp_path / str(is_wanted)
        caplog.clear()
        assert train(dataclasses.replace(config, bad_steps=settings), workdir).step == 16
        warned = [m for m in caplog.messages if m.startswith("looking for where")]
        # Once, though there are several rows of bad steps.
        assert len(warned) == is_wanted
        assert all("is left out from here on: it takes 0.0 GiB of 0.0" in m for m in warned)
        lines = (workdir / "bad_batches.jsonl").read_text().splitlines()
        assert lines and not any("from" in json.loads(line) for line in lines)
        losses.append([(r["loss"], r["skipped"]) for r in steps(workdir)])
    np.testing.assert_array_equal(losses[0], losses[1])


def test_a_run_goes_back_over_bad_steps_and_leaves_their_batches_out_also_after_a_restart(
    folder, tmp_path, poison, caplog
):
    poison(np.nan)
    settings = BadStepsConfig(stop_after=1, roll_back=3)
    config = marked_config(folder, bad_steps=settings, checkpoint=CheckpointConfig(every=4))
    marked = marked_batches(config)
    assert marked[0] >= 4  # behind the first checkpoint
    caplog.set_level(logging.INFO)
    assert train(dataclasses.replace(config, steps=14), tmp_path / "run").step == 14
    assert "and leaving out the batches since" in caplog.text
    assert [record["step"] for record in steps(tmp_path / "run")] == list(range(1, 15))
    assert not any(record["skipped"] for record in steps(tmp_path / "run"))
    train(config, tmp_path / "run")
    # The same run as one that never saw the batches between.
    first, last = marked[0] // 4 * 4, marked[-1]
    left_out = last + 1 - first
    assert f"to {marked[0] + 1} were skipped: going back to step {first}" in caplog.text
    numbers = [*range(first), *range(first + left_out, 16 + left_out)]
    tokens = [record["tokens"] for record in steps(tmp_path / "run")]
    corpus = open_dataset(config.data, seed=0, seq_len=32, vocab_size=257)
    rows = [corpus.train.rows(np.arange(8) + 8 * n) for n in numbers]
    assert tokens == [int((row.targets >= 0).sum()) for row in rows]


def test_without_a_checkpoint_from_before_there_is_no_way_back(
    folder, tmp_path, poison, monkeypatch
):
    poison(np.nan)
    monkeypatch.setattr(f"{__name__}.MARK", ord("T"))
    settings = BadStepsConfig(stop_after=2, roll_back=1)
    with pytest.raises(BadStepError, match="steps 1 to 2 were skipped, and there is no checkpoint"):
        train(marked_config(folder, bad_steps=settings), tmp_path)


def test_the_limit_of_a_spike_is_the_same_after_a_restart(folder, tmp_path):
    config = marked_config(folder, bad_steps=BadStepsConfig(spike=0.5, window=8))
    train(config, tmp_path / "whole")
    skipped = [record["step"] for record in steps(tmp_path / "whole") if record["skipped"]]
    again = shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for path in (again / "checkpoints").iterdir():
        if int(path.name) > 12:
            shutil.rmtree(path)
    train(config, again)
    losses = [
        [(r["step"], r["loss"], r["skipped"]) for r in steps(tmp_path / run)]
        for run in ("whole", "again")
    ]
    assert losses[0] == losses[1]
    print(skipped)
