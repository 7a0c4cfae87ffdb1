"""A small run, and what it leaves behind: what the tests of training share."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from jaxscale.checkpoint.checkpointer import Checkpointer
from jaxscale.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    Dtype,
    EvalConfig,
    LogConfig,
    SampleConfig,
)
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.perf.records import Record, read_records
from jaxscale.schedules import cosine


def write_cats(
    folder: Path, *, documents: int = 40, doing: str = "sat on the mat", times: int = 8
) -> Path:
    """Text files, each another cat's; returns the folder."""
    for number in range(documents):
        (folder / f"{number}.txt").write_text(f"The cat {number} {doing}. " * times)
    return folder


def config_of(
    folder: Path, *, eval_fraction: float = 0.2, shuffle: bool = True, **changes
) -> Config:
    """One layer in float32 on the text files of a folder, 12 steps of 8 rows of 32 tokens.

    It saves nothing but its end, and has no sample and no TensorBoard, unless `changes` say so.
    """
    return dataclasses.replace(
        Config(
            model=llama.Config(
                vocab_size=257, model_dim=32, num_layers=1, num_heads=4, num_kv_heads=4, mlp_dim=64
            ),
            optim=adamw.Config(),
            schedule=cosine.Config(peak=3e-3, warmup_steps=2),
            steps=12,
            batch_size=8,
            seq_len=32,
            dtype=Dtype.FLOAT32,
            data=DataConfig(
                path=str(folder / "*.txt"),
                cache_dir=str(folder / "cache"),
                eval_fraction=eval_fraction,
                shuffle=shuffle,
            ),
            checkpoint=CheckpointConfig(every=0),
            evaluation=EvalConfig(batches=1),
            sample=SampleConfig(tokens=0),
            log=LogConfig(tensorboard=False),
        ),
        **changes,
    )


def records(workdir: Path) -> list[Record]:
    """All of them, in order, of a run that has begun."""
    path = workdir / "metrics.jsonl"
    assert path.exists(), path
    return read_records(path)


def steps(workdir: Path) -> list[Record]:
    """Those of training steps, in order."""
    return [record for record in records(workdir) if "loss" in record]


def leaves_saved(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Of the state, by path."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def wanted(leaves, metadata):
        return {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for path, leaf in leaves.items()
        }

    with Checkpointer(workdir / "checkpoints", keep_last=0) as checkpointer:
        restored = checkpointer.restore(wanted, step)
    assert restored is not None
    _, state, _ = restored
    return {path: np.asarray(leaf) for path, leaf in state.items()}
