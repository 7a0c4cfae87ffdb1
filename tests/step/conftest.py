"""A small model and a small store of packed documents, trained on meshes of 8 virtual devices."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale import config as run_config
from jaxscale import sharding as shd
from jaxscale.compile.fit import jit_update
from jaxscale.data.indexed import IndexedDataset, IndexedWriter
from jaxscale.data.rows import TokenRows
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine
from jaxscale.step.feed import device_batches
from jaxscale.step.plan import Plan, plan_of_run
from jaxscale.step.state import init_state, to_flat
from jaxscale.step.update import update

VOCAB_SIZE = 257  # not a multiple of any axis: the padding is part of what is tested
# Of a decoder; the layers are each test's own.
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, model_dim=64, num_heads=8, num_kv_heads=2, mlp_dim=96
)


def small_config(**changes) -> run_config.Config:
    """8 query heads over 2 key heads, so that tensor=4 and 8 have more devices than key heads."""
    num_layers, peak = changes.pop("num_layers", 2), changes.pop("peak", 1e-3)
    pipeline = run_config.PipelineConfig(
        schedule=run_config.PipelineSchedule(changes.pop("stages_take_turns", "auto")),
        chunks=changes.pop("chunks", 2),
        lean=changes.pop("lean", False),
    )
    mesh = {key: changes.pop(key) for key in list(changes) if hasattr(run_config.MeshConfig(), key)}
    precision = run_config.PrecisionConfig(emulate=True)
    for key in [key for key in changes if hasattr(precision, key)]:
        setattr(precision, key, changes.pop(key))
    precision.recipe = run_config.Recipe(precision.recipe)
    config = run_config.Config(
        model=llama.Config(**SIZES, num_layers=num_layers, qk_norm=True),
        optim=adamw.Config(),
        schedule=cosine.Config(peak=peak, warmup_steps=2),
        steps=5,
        batch_size=16,
        seq_len=32,
        dtype=run_config.Dtype.FLOAT32,
        mesh=run_config.MeshConfig(**mesh),
        pipeline=pipeline,
        precision=precision,
    )
    for key, value in changes.items():
        setattr(config, key, value)
    run_config.validate(config)
    return config


def in_8_bits(recipe: str) -> dict[str, Any]:
    """Changes for `small_config`: a model of which every product can be in this recipe.

    Blocks of 128 want a larger one and more tokens; on fsdp=8 a device's part of a weight still is
    an eighth of a block.
    """
    changes: dict[str, Any] = dict(dtype="bfloat16", recipe=recipe)
    if recipe != "fp8_blockwise":
        return changes
    model = dataclasses.replace(small_config().model, model_dim=128, num_heads=4, mlp_dim=256)
    return changes | dict(model=model, batch_size=32)


def make_plan(config, num_devices=8) -> Plan:
    """A plan over the first devices only."""
    return plan_of_run(config, devices=jax.devices()[:num_devices])


@dataclasses.dataclass
class Run:
    """What a few steps did: losses and gradient norms of each, arrays by name before and after.

    first_moments: Adam's, after step 1.
    """

    losses: np.ndarray
    grad_norms: np.ndarray
    first_batch: list[np.ndarray]
    initial: dict[str, np.ndarray]
    final: dict[str, np.ndarray]
    first_moments: dict[str, np.ndarray]


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> TokenRows:
    """Documents of 3 to 40 tokens, low ids much likelier, packed in rows of 32."""
    prefix = tmp_path_factory.mktemp("store") / "documents"
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for length in rng.integers(3, 40, 600):
            writer.add((VOCAB_SIZE * rng.random(length) ** 4).astype(np.uint16))
    return TokenRows(
        IndexedDataset(prefix),
        seq_len=32,
        seed=0,
        vocab_size=VOCAB_SIZE,
        split="train",
        eval_fraction=0.1,
        shuffle=True,
        max_documents_per_row=32,
    )


@pytest.fixture(scope="session")
def run(rows):
    """`run(num_devices, **config changes) -> Run`: five steps through the loader and the update."""

    @functools.cache
    def run(num_devices: int = 8, **changes) -> Run:
        return train(small_config(**changes), rows, num_devices=num_devices)

    return run


def train(config, rows: TokenRows, *, num_devices: int) -> Run:
    """The config's steps, on the first devices."""
    plan = make_plan(config, num_devices)
    state = init_state(plan)
    initial = arrays(state)
    first_moments, first_batch, metrics = {}, [], []
    loader = device_batches(plan, rows, start=0)
    step = jit_update(update, plan)
    with shd.use(plan.mesh, plan.rules):
        for i in range(config.steps):
            batch = next(loader)
            state, measured = step(state, batch)
            metrics.append(measured)
            if i == 0:
                first_batch = [np.asarray(x).reshape(config.batch_size, -1) for x in batch]
                first_moments = {name: x for name, x in arrays(state).items() if ".mu." in name}
    loader.close()
    losses, norms = (np.array([float(m[key]) for m in metrics]) for key in ("loss", "grad_norm"))
    return Run(losses, norms, first_batch, initial, arrays(state), first_moments)


def arrays(state) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in to_flat(state).items()}
