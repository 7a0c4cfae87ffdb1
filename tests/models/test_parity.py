"""Logits are those of Hugging Face transformers, as tests/models/make_golden.py recorded them."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.config import Dtype
from jaxscale.models import gemma, llama
from jaxscale.models.decoder import forward
from jaxscale.ops.documents import documents_of
from jaxscale.ops.execution import Execution
from jaxscale.step.pretrained import read_params

HERE = Path(__file__).parent
GOLDEN = sorted(path.stem for path in (HERE / "golden").glob("*.json"))
# The file of jaxscale.models that knows a model_type.
MODULES = {family: module for module in (llama, gemma) for family in module.FAMILIES}
# Of the largest logit, in float32.
TOLERANCE = 1e-4

spec = importlib.util.spec_from_file_location("make_golden", HERE / "make_golden.py")
assert spec and spec.loader
make_golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_golden)


def path_of(path):
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def load(config, tensors, weights):
    """The model with these weights."""
    graphdef, abstract = nnx.split(jax.eval_shape(lambda: config.build(nnx.Rngs(0))))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        path_of(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    }
    folder: Any = SimpleNamespace(path="golden", tensors=lambda: tensors, read=weights.__getitem__)
    params = read_params(wanted, folder)
    filled = jax.tree_util.tree_map_with_path(lambda path, _: params[path_of(path)], abstract)
    return nnx.merge(graphdef, filled)


def logits(model, tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    documents = documents_of(jnp.ones_like(tokens), positions, max_documents=1)
    execution = Execution(dtype=Dtype.FLOAT32)
    x, head, cap, *_ = forward(model, tokens, documents=documents, execution=execution)
    out = np.asarray(jnp.einsum("BSD,DV->BSV", x, head)[..., : model.c.vocab_size])
    return out if cap is None else cap * np.tanh(out / cap)


def test_every_golden_file_is_there():
    assert set(GOLDEN) == set(make_golden.CONFIGS)
    assert sum(path.stat().st_size for path in (HERE / "golden").iterdir()) < 1e6


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_equal_those_of_hugging_face_transformers(name):
    record = json.loads((HERE / "golden" / f"{name}.json").read_text())
    module = MODULES[record["config"]["model_type"]]
    config = module.from_hugging_face(record["config"])
    config.validate()
    shapes = {tensor: tuple(shape) for tensor, shape in record["shapes"].items()}
    tensors = module.hugging_face_names(config)
    assert {tensor.name: tensor.shape for tensor in tensors} == shapes
    weights = make_golden.draw(shapes, seed=record["seed"], norm=record["norm"])
    with np.load(HERE / "golden" / f"{name}.npz") as arrays:
        expected = arrays["logits"]
    with jax.default_matmul_precision("highest"):
        actual = logits(load(config, tensors, weights), record["tokens"])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GOLDEN)
def test_the_recorded_logits_are_those_of_the_transformers_that_is_here(name):
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    record = json.loads((HERE / "golden" / f"{name}.json").read_text())
    _, logits = make_golden.logits_of(record["config"], np.array(record["tokens"]))
    with np.load(HERE / "golden" / f"{name}.npz") as arrays:
        expected = arrays["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
