"""Every family trains on a mesh as on one device: packed rows, microbatches and all."""

from typing import Any

import pytest

from jaxscale.models import families, gemma, llama
from tests.step.alike import assert_trains_like

SIZES: dict[str, Any] = dict(
    vocab_size=257, model_dim=64, num_heads=8, num_kv_heads=2, mlp_dim=96, head_size=16
)
MODELS = {
    "llama 3, tied": llama.Config(**SIZES, num_layers=2, tie_embeddings=True),
    "qwen 2": llama.Config(**SIZES, num_layers=2, qkv_bias=True),
    "mistral": llama.Config(**SIZES, num_layers=2, window=5),
    "gemma 2": gemma.Config(
        **SIZES, num_layers=3, global_every=2, window=5, qk_norm=False, score_cap=5.0, logit_cap=3.0
    ),
    "gemma 3": gemma.Config(**SIZES, num_layers=4, global_every=3, window=5, query_scale=24.0),
}
# The second and third have more tensor devices than key heads.
LAYOUTS: dict[str, dict[str, Any]] = {
    "hsdp tp sp": dict(data=2, fsdp=2, tensor=2),
    "zero2 tp4": dict(fsdp=2, tensor=4, zero=2, grad_accumulation=2),
    "zero1 tp4 auto": dict(fsdp=2, tensor=4, zero=1, axis_types="auto"),
}


def test_every_family_is_here():
    here = {families.of_config(config) for config in MODELS.values()}
    assert here == set(families.FAMILIES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_family_trains_on_a_mesh_as_on_one_device(run, model, layout):
    alone = run(1, model=MODELS[model])
    assert_trains_like(run(8, model=MODELS[model], **LAYOUTS[layout]), alone)


# Of gemma 2 one layer is left over when the turns are done.
TURNS: dict[str, tuple[str, dict[str, Any]]] = {
    "unrolled": ("gemma 3", dict(scan_unroll=4, remat="attention")),
    "unrolled zero1": ("gemma 3", dict(scan_unroll=4, zero=1, remat="gemms")),
    "zero1": ("gemma 2", dict(zero=1)),
}


@pytest.mark.parametrize("case", TURNS)
def test_layers_that_take_turns_train_the_same(run, case):
    model, settings = TURNS[case]
    here = run(8, model=MODELS[model], fsdp=8, **settings)
    assert_trains_like(here, run(1, model=MODELS[model]))
