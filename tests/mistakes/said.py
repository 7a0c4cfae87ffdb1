"""What a mistake is answered with, and the small run beside which mistakes are made."""

import hashlib
from pathlib import Path

import numpy as np

from jaxscale.data.indexed import IndexedWriter

CONFIG = """
from jaxscale.config import (
    CheckpointConfig, Config, DataConfig, Dtype, EvalConfig, LogConfig, SampleConfig
)
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine


def get_config(arg=""):
    if arg:
        raise ValueError(f"{arg} is not a variant of this file")
    return Config(
        model=llama.Config(
            vocab_size=257, model_dim=32, num_layers=1, num_heads=4, num_kv_heads=4, mlp_dim=64
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(peak=3e-3, warmup_steps=2),
        steps=4,
        batch_size=8,
        seq_len=32,
        dtype=Dtype.FLOAT32,
        data=DataConfig(path="text", cache_dir="cache", eval_fraction=0.3),
        checkpoint=CheckpointConfig(every=2),
        evaluation=EvalConfig(batches=1),
        sample=SampleConfig(tokens=0),
        log=LogConfig(tensorboard=False),
    )
"""


def write_run(folder):
    """config.py, and text/ with documents that are several rows long."""
    (folder / "config.py").write_text(CONFIG)
    (folder / "text").mkdir()
    for number in range(10):
        (folder / "text" / f"{number}.txt").write_text(
            f"The cat {number} sat on the mat and looked at the moon. " * 4
        )


def content(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_mistake(answer, *fragments, touched_devices=False):
    assert answer.code == 2, answer.err
    assert answer.err.count("\nerror: ") == 1, answer.err
    assert "Traceback" not in answer.err
    for fragment in fragments:
        assert fragment in answer.err, answer.err
    assert answer.touched_devices == touched_devices


def write_store(prefix, *, bad_id=None, at=0):
    ids = np.random.default_rng(0).integers(0, 250, (40, 1000)).astype(np.uint16)
    if bad_id is not None:
        ids[at // 1000, at % 1000] = bad_id
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in ids:
            writer.add(document)
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])
