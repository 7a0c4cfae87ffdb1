"""Text from the model, to see what it has learned; a look at a run, not a server (it keeps no key-value cache)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale import sharding as shd
from jaxscale.step.state import Plan

# The window's length is rounded up to this: few lengths to compile.
WINDOW_MULTIPLE = 128


def sample(
    plan: Plan, params, prompt: np.ndarray, *, num_tokens: int, temperature: float, seed: int
) -> np.ndarray:
    """`num_tokens` token ids that follow the prompt (int [any], not empty); temperature 0 takes the likeliest.

    Runs the whole window once a token, in one compiled loop. Prompt and tokens fit in config.seq_len: a prompt that leaves
    no room is cut at its start, and fewer tokens are made after a long one.
    """
    multiple = math.lcm(
        WINDOW_MULTIPLE, plan.mesh.shape["tensor"]
    )  # sequence parallelism splits the window
    window = min(shd.padded(len(prompt) + num_tokens, multiple), plan.config.seq_len)
    prompt = np.asarray(prompt, np.int32)[-(window - 1) :]
    num_tokens = min(num_tokens, window - len(prompt))
    # Every row is the same: the mesh's batch axes each need one.
    num_rows = plan.mesh.shape["data"] * plan.mesh.shape["fsdp"] * plan.mesh.shape["expert"]
    rows = np.tile(np.pad(prompt, (0, window - len(prompt))), (num_rows, 1))
    tokens_BS = shd.global_array(lambda index: rows[index], rows.shape, "batch seq")
    continued = jax.jit(_continue, static_argnums=(0, 3, 4, 5))(
        _Static(plan), params, tokens_BS, len(prompt), num_tokens, temperature, jax.random.key(seed)
    )
    return np.asarray(continued)


class _Static:
    """A plan as a static argument: equal only to itself."""

    def __init__(self, plan: Plan):
        self.plan = plan


def _continue(static, params, tokens_BS, prompt_length, num_tokens, temperature, key):
    plan = static.plan
    model = nnx.merge(plan.graphdef, params)
    position_S = jnp.arange(tokens_BS.shape[1], dtype=jnp.int32)
    positions_BS = shd.constrain(jnp.broadcast_to(position_S, tokens_BS.shape), "batch seq")

    def extend(i, tokens_BS):
        # What is ahead of the last token is padding, and the attention is causal.
        segments_BS = (positions_BS < i).astype(jnp.int32)
        x_BSD = model(tokens_BS, segments_BS, positions_BS, plan.execution)
        is_last_S = (position_S == i - 1).astype(x_BSD.dtype)
        last_BD = shd.einsum("BSD,S->BD", x_BSD, is_last_S, out="batch act_embed")
        head_DV = shd.gather(model.head(), dtype=x_BSD.dtype, axes="embed vocab")
        logits_BV = shd.einsum("BD,DV->BV", last_BD, head_DV, out="batch vocab").astype(jnp.float32)
        logits_BV = shd.constrain(logits_BV, "batch _")[:, : plan.config.model.vocab_size]
        if temperature > 0:
            # One draw for all rows: they stay the same.
            noise_V = jax.random.gumbel(jax.random.fold_in(key, i), logits_BV.shape[1:])
            logits_BV = logits_BV / temperature + noise_V
        next_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        return jnp.where(position_S[None] == i, next_B[:, None], tokens_BS)

    tokens_BS = jax.lax.fori_loop(prompt_length, prompt_length + num_tokens, extend, tokens_BS)
    return shd.constrain(tokens_BS, "_ seq")[0, prompt_length : prompt_length + num_tokens]
