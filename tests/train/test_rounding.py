"""A run puts what rounding to 8 bits loses on record; looking changes nothing."""

import json
import logging

from jaxscale.config import CheckpointConfig, PrecisionConfig, Recipe
from jaxscale.train.loop import train
from tests.train.small import config_of, steps


def test_what_rounding_loses_is_on_record(tmp_path, caplog):
    (tmp_path / "text.txt").write_text("The cat sat on the mat.\n\n" * 200)
    losses = []
    for every in (2, 0):
        config = config_of(
            tmp_path,
            steps=5,
            checkpoint=CheckpointConfig(enabled=False),
            precision=PrecisionConfig(
                recipe=Recipe.FP8_TENSORWISE, emulate=True, statistics_every=every
            ),
        )
        with caplog.at_level(logging.INFO):
            train(config, tmp_path / str(every))
        losses.append([record["loss"] for record in steps(tmp_path / str(every))])
    assert losses[0] == losses[1]
    lines = (tmp_path / "2" / "rounding.jsonl").read_text().splitlines()
    looks = [json.loads(line) for line in lines]
    assert [look["step"] for look in looks] == [2, 4]
    assert set(looks[0]["qkv.gradient"]) == {"lost", "full", "scales"}
    assert sum("rounding to 8 bits: " in message for message in caplog.messages) == 2
    assert not (tmp_path / "0" / "rounding.jsonl").exists()
