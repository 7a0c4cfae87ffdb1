"""Llama 3 405B.

    python scripts/train.py --config configs/llama3_405b.py --workdir runs/llama3_405b

with `--config.data.path=...` for text of your own.

Hardware: 512 H100 (with more, halve config.grad_accumulation): tensor 8 inside each node, 16 stages
and ZeRO-1 across the nodes. Not run at this size: compiled for 512 H100 on a machine without any
(jax 0.11.2), its update asks for 50.3 GiB a GPU besides NCCL and cuDNN and sends 87 GB between
nodes; as FSDP of 64 x tensor 8 in two microbatches 55.6 GiB and some 600 GB (docs/parallelism.md).
"""

from jaxscale.config import Config, DataConfig, MeshConfig, Remat
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine


def get_config(arg: str = "") -> Config:
    del arg
    return Config(
        model=llama.Config(
            vocab_size=128_256,
            model_dim=16_384,
            num_layers=126,
            num_heads=128,
            num_kv_heads=8,
            mlp_dim=53_248,
            max_seq_len=8192,
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(peak=8e-5, warmup_steps=8000),
        steps=100_000,
        batch_size=512,
        seq_len=8192,
        grad_accumulation=128,
        remat=Remat.ATTENTION,
        mesh=MeshConfig(stage=16, fsdp=-1, tensor=8, zero=1),
        data=DataConfig(path="python-stdlib", tokenizer="bytes"),
    )
