"""Records the logits of tiny models of Hugging Face transformers in tests/models/golden.

    python tests/models/make_golden.py

needs torch and transformers, which the tests do not. Weights are drawn, not stored: `draw` makes
the same ones wherever numpy is, and tests/models/test_parity.py takes it from this file.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).with_name("golden")

SEED = 0
BATCH_SIZE, SEQ_LEN = 2, 40
# Of matrices and biases: scores of attention are then about 1, and a bias matters.
SCALE = 0.2
# Of the weights of norms, around the value with which a norm only normalises.
NORM_SCALE = 0.1

SIZES = dict(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
LLAMA = dict(
    SIZES,
    model_type="llama",
    hidden_act="silu",
    rms_norm_eps=1e-5,
    attention_bias=False,
    mlp_bias=False,
    rope_parameters=dict(rope_type="default", rope_theta=500_000.0),
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
QWEN2 = dict(
    SIZES,
    model_type="qwen2",
    hidden_act="silu",
    rms_norm_eps=1e-6,
    use_sliding_window=False,
    rope_parameters=dict(rope_type="default", rope_theta=1_000_000.0),
)
QWEN3 = QWEN2 | dict(model_type="qwen3", head_dim=16, attention_bias=False)
MISTRAL = dict(
    SIZES,
    model_type="mistral",
    hidden_act="silu",
    rms_norm_eps=1e-5,
    sliding_window=5,
    rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
)
GEMMA = SIZES | dict(
    num_hidden_layers=4,
    head_dim=16,
    tie_word_embeddings=True,
    hidden_activation="gelu_pytorch_tanh",
    rms_norm_eps=1e-6,
    attention_bias=False,
    sliding_window=5,
    query_pre_attn_scalar=24,
)
GEMMA2 = GEMMA | dict(
    model_type="gemma2",
    layer_types=["sliding_attention", "full_attention"] * 2,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=3.0,
    rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
)
GEMMA3 = GEMMA | dict(
    model_type="gemma3_text",
    # A pattern of three and one layer more.
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    rope_parameters=dict(
        full_attention=dict(rope_type="default", rope_theta=1_000_000.0),
        sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
    ),
)


def changed(config: dict, **changes) -> dict:
    """A copy; a change's name says where it goes, as in `rope_parameters__factor`."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        *path, last = name.split("__")
        place = config
        for key in path:
            place = place[key]
        place[last] = value
    return config


LINEAR = dict(
    rope_parameters__full_attention__rope_type="linear", rope_parameters__full_attention__factor=8.0
)
CONFIGS = {
    "llama3": LLAMA,
    "llama3.1": changed(LLAMA, rope_parameters=LLAMA3_ROPE),
    "llama3.2_tied": changed(LLAMA, tie_word_embeddings=True),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_linear": changed(GEMMA3, **LINEAR),
}

# Settings that leave the tensors as they are. Each must move the logits by over 1% of the largest,
# or a model without the option would pass.
MATTERS: dict[str, list[dict[str, Any]]] = {
    "llama3": [dict(rope_parameters__rope_theta=10_000.0)],
    "llama3.1": [dict(rope_parameters=dict(rope_type="default", rope_theta=10_000.0))],
    "mistral": [dict(sliding_window=6), dict(sliding_window=None)],
    "gemma2": [
        dict(sliding_window=6),
        dict(layer_types=["full_attention", "sliding_attention"] * 2),
        dict(attn_logit_softcapping=None),
        dict(final_logit_softcapping=None),
        dict(query_pre_attn_scalar=16),
        dict(hidden_activation="silu"),
    ],
    "gemma3": [
        dict(sliding_window=6),
        dict(layer_types=["sliding_attention"] * 3 + ["full_attention"]),
        dict(query_pre_attn_scalar=16),
        dict(hidden_activation="silu"),
        dict(rope_parameters__full_attention__rope_theta=10_000.0),
        dict(rope_parameters__sliding_attention__rope_theta=1_000_000.0),
        LINEAR,
    ],
}


def draw(shapes: Mapping[str, tuple[int, ...]], *, seed: int, norm: float) -> dict[str, np.ndarray]:
    """A float32 tensor for each name; norm: the value around which the weights of norms lie.

    `RandomState` is the generator whose stream numpy has promised to keep for ever.
    """
    stream = np.random.RandomState(seed)
    drawn = {}
    for name in sorted(shapes):
        normal = stream.standard_normal(shapes[name])
        tensor = norm + NORM_SCALE * normal if "norm" in name else SCALE * normal
        drawn[name] = tensor.astype(np.float32)
    return drawn


def norm_of(config: dict) -> float:
    """Gemma multiplies by 1 plus the weight."""
    return 0.0 if config["model_type"].startswith("gemma") else 1.0


def build(config: dict) -> Any:
    import torch
    import transformers

    keywords = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **copy.deepcopy(keywords))
    made._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(made).to(torch.float32).eval()


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Without a head that is the embedding, as a saved model has none."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def logits_of(config: dict, tokens: np.ndarray) -> tuple[dict[str, tuple[int, ...]], np.ndarray]:
    """The tensors' shapes, and float32 [batch, sequence, vocabulary]."""
    import torch

    model = build(config)
    shapes = shapes_of(model)
    weights = draw(shapes, seed=SEED, norm=norm_of(config))
    wrong = model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=False)
    assert not wrong.unexpected_keys and set(wrong.missing_keys) <= {"lm_head.weight"}, wrong
    with torch.no_grad():
        return shapes, model(torch.tensor(tokens)).logits.numpy()


def check_that_options_matter(name: str, tokens: np.ndarray) -> None:
    config = CONFIGS[name]
    _, logits = logits_of(config, tokens)
    for changes in MATTERS.get(name, ()):
        _, others = logits_of(changed(config, **changes), tokens)
        difference = np.abs(others - logits).max() / np.abs(logits).max()
        print(f"{name}: {changes} moves the logits by {difference:.3f} of the largest")
        assert difference > 0.01


def main() -> None:
    import torch
    import transformers

    FOLDER.mkdir(exist_ok=True)
    for name, config in CONFIGS.items():
        tokens = np.random.RandomState(SEED).randint(0, config["vocab_size"], (BATCH_SIZE, SEQ_LEN))
        check_that_options_matter(name, tokens)
        shapes, logits = logits_of(config, tokens)
        record = {
            "config": config,
            "seed": SEED,
            "norm": norm_of(config),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "shapes": shapes,
            "tokens": tokens.tolist(),
        }
        (FOLDER / f"{name}.json").write_text(to_text(record))
        np.savez(FOLDER / f"{name}.npz", logits=logits)
        print(f"{name}: logits up to {np.abs(logits).max():.2f}")


def to_text(record: dict) -> str:
    """JSON with a line for each entry of the first two levels."""
    lines = []
    for key, value in record.items():
        if isinstance(value, dict):
            entries = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()]
            lines.append(f"  {json.dumps(key)}: {{\n" + ",\n".join(entries) + "\n  }")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
