"""Llama 3 8B.

    python scripts/train.py --config configs/llama3_8b.py --workdir runs/llama3_8b

with `--config.data.path=...` for text of your own.

Hardware: 4 or more H200, or 8 or more H100, of one node (FSDP over all of them). Expect 11,300
tokens/s a GPU and 88 GiB on 4 H200, compiled in 23 s (docs/benchmarks.md).
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
            model_dim=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            mlp_dim=14_336,
            max_seq_len=8192,
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(peak=3e-4, warmup_steps=200),
        steps=10_000,
        # 2 rows a GPU on 4 GPUs, 1 on 8.
        batch_size=8,
        seq_len=8192,
        # 0.6% faster than GEMMS on 4 H200, and 18 GiB less. 8 H100 take 52 GiB a GPU (compiled for
        # them); a larger batch there may need another policy, which remat="auto" finds.
        remat=Remat.GEMMS_LEAN,
        scan_unroll=32,
        mesh=MeshConfig(fsdp=-1, reshard_after_forward=False),
        data=DataConfig(path="python-stdlib", tokenizer="bytes"),
    )
