"""The shape of Llama 3.2 1B with an output table of its own: 1.5 B parameters.

    python scripts/train.py --config configs/llama3_1b.py --workdir runs/llama3_1b

with `--config.data.path=...` for text of your own.

`--config configs/llama3_1b.py:tied` is Llama 3.2 1B itself (1.24 B). Hardware: one H100.
Expect 57,000 tokens/s and 61 GiB, compiled in 12 s (docs/benchmarks.md); half of the rows,
`--config.batch_size=2`, take 41 GiB and give 54,000.
"""

from jaxscale.config import Config, DataConfig, Remat
from jaxscale.models import llama
from jaxscale.ops.rope import Scaling
from jaxscale.optim import adamw
from jaxscale.schedules import cosine


def get_config(arg: str = "") -> Config:
    if arg not in ("", "tied"):
        raise ValueError(
            f"configs/llama3_1b.py:{arg} is not a variant; leave it out or write 'tied'"
        )
    return Config(
        model=llama.Config(
            vocab_size=128_256,
            model_dim=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            mlp_dim=8192,
            rope_scaling=Scaling(factor=32.0),
            tie_embeddings=arg == "tied",
            max_seq_len=131_072,
        ),
        optim=adamw.Config(),
        schedule=cosine.Config(peak=3e-4, warmup_steps=200),
        steps=10_000,
        batch_size=4,
        seq_len=8192,
        remat=Remat.GEMMS,
        scan_unroll=16,
        data=DataConfig(path="python-stdlib", tokenizer="bytes"),
    )
