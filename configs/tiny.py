"""A 1.6 M parameter Llama on the source of the Python standard library, byte by byte.

    python scripts/train.py --config configs/tiny.py --workdir runs/tiny        (`make train`)

Hardware: 2 CPU cores, about two minutes. Expect a held-out loss of 1.8 nats a byte (unigram
entropy: 3.2), and 4,000 to 8,500 tokens/s (docs/benchmarks.md).
"""

from jaxscale.config import CheckpointConfig, Config, DataConfig, Dtype, EvalConfig
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
            num_heads=6,
            num_kv_heads=2,
            mlp_dim=512,
            rope_theta=10_000.0,
            tie_embeddings=True,
        ),
        optim=adamw.Config(),
        # With 10 the loss ends at 2.4: too short for this peak. Under 20, so that --config.steps=20
        # is a run.
        schedule=cosine.Config(peak=3e-3, warmup_steps=16),
        steps=240,
        batch_size=8,
        seq_len=256,
        # float32 is the faster type on a CPU.
        dtype=Dtype.FLOAT32,
        data=DataConfig(path="python-stdlib", tokenizer="bytes"),
        checkpoint=CheckpointConfig(every=50),
        evaluation=EvalConfig(batches=4),
    )
