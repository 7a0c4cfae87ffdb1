"""The model of configs/tiny.py on every mesh axis at once, for a look at layouts without a GPU.

    XLA_FLAGS=--xla_force_host_platform_device_count=16 \\
    python scripts/train.py --config configs/tiny_mesh.py --workdir runs/tiny_mesh

Hardware: 2 CPU cores, as 16 virtual devices (32 for data=2), about a minute of compiling and one of
training. Expect the losses of the same model on one device; no figure in docs/benchmarks.md.
"""

from jaxscale.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    Dtype,
    EvalConfig,
    MeshConfig,
    PipelineConfig,
    Remat,
)
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine


def get_config(arg: str = "") -> Config:
    del arg
    return Config(
        model=llama.Config(
            vocab_size=257,
            model_dim=192,
            num_layers=4,
            num_heads=8,
            num_kv_heads=2,
            mlp_dim=512,
            rope_theta=10_000.0,
            tie_embeddings=True,
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(peak=3e-3, warmup_steps=20),
        steps=40,
        batch_size=16,
        grad_accumulation=4,
        seq_len=128,
        dtype=Dtype.FLOAT32,
        remat=Remat.ATTENTION,
        mesh=MeshConfig(stage=2, data=-1, fsdp=2, context=2, tensor=2),
        pipeline=PipelineConfig(chunks=2),
        data=DataConfig(path="python-stdlib", tokenizer="bytes"),
        checkpoint=CheckpointConfig(every=20),
        evaluation=EvalConfig(batches=2),
    )
