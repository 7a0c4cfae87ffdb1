"""Llama 3 70B.

    python scripts/train.py --config configs/llama3_70b.py --workdir runs/llama3_70b

with `--config.data.path=...` for text of your own.

Hardware: 64 or more H100: tensor 4 inside each node, FSDP across the nodes. Not run at this size:
compiled for 64 H100 on a machine without any (jax 0.11.2), its update asks for 66.1 GiB a GPU
besides NCCL and cuDNN, and 355 GB of what it sends have no work beside them, about 2 s of some 14;
with tensor 8 and without async_tensor 1,395 GB, over 5 s (docs/parallelism.md). For a long run add
`--config.scan_unroll=80`: 67.8 GiB and 235 GB, 1.2 s; compiling takes minutes, once.
"""

from jaxscale.config import AsyncTensor, Config, DataConfig, MeshConfig, Remat
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine


def get_config(arg: str = "") -> Config:
    del arg
    return Config(
        model=llama.Config(
            vocab_size=128_256,
            model_dim=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            mlp_dim=28_672,
            max_seq_len=8192,
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(peak=1.5e-4, warmup_steps=2000),
        steps=100_000,
        batch_size=128,
        seq_len=8192,
        remat=Remat.ATTENTION,
        mesh=MeshConfig(fsdp=-1, tensor=4, async_tensor=AsyncTensor.AUTO),
        data=DataConfig(path="python-stdlib", tokenizer="bytes"),
    )
