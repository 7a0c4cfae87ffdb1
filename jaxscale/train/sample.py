"""Text from the model, to see what it has learned; a look at a run, not a server.

It keeps no key-value cache. B rows, S sequence, D model, V vocabulary.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale import sharding as shd
from jaxscale.config import AsyncTensor, Balance, Exchange
from jaxscale.models.decoder import forward, logits
from jaxscale.ops.deal import head_tail
from jaxscale.ops.documents import documents_of
from jaxscale.step.plan import Plan
from jaxscale.step.stages import without_stages
from jaxscale.step.state import TrainState
from jaxscale.step.update import model_of

# The window's length is rounded up to this: few lengths to compile.
WINDOW_MULTIPLE = 128


def sample_text(plan: Plan, state: TrainState, *, tokenizer) -> str:
    """The prompt of config.sample and what follows it."""
    wanted = plan.config.sample
    prompt = np.asarray(tokenizer.encode(wanted.prompt), np.int32)
    if plan.pipeline is not None:
        state, plan = without_stages(state, plan)
    with shd.use(plan.mesh, plan.rules):
        ids = sample(plan, state, prompt=prompt, num_tokens=wanted.tokens)
    return wanted.prompt + tokenizer.decode([int(i) for i in ids if i < tokenizer.vocab_size])


def sample(plan: Plan, state: TrainState, *, prompt: np.ndarray, num_tokens: int) -> np.ndarray:
    """`num_tokens` token ids that follow the prompt (int [any], not empty).

    With config.sample.temperature=0 the likeliest. Runs the whole window once a token, in one
    compiled loop. Prompt and tokens fit in config.seq_len: a prompt that leaves no room is cut at
    its start, and fewer tokens are made after a long one.
    """
    # Context and sequence parallelism split the window, the former into two chunks a device.
    split = plan.mesh.shape["tensor"] * plan.mesh.shape["context"]
    multiple = math.lcm(WINDOW_MULTIPLE, 2 * split)
    wanted = math.ceil((len(prompt) + num_tokens) / multiple) * multiple
    window = min(wanted, plan.config.seq_len)
    prompt = np.asarray(prompt, np.int32)[-(window - 1) :]
    num_tokens = min(num_tokens, window - len(prompt))
    # Every row is the same: the mesh axes that split rows each need one, or one for each half.
    num_rows = math.prod(plan.mesh.shape[axis] for axis in shd.mesh_axes("residual_rows"))
    num_rows *= 2 if plan.execution.async_tensor == AsyncTensor.HALVES else 1
    row = np.pad(prompt, (0, window - len(prompt)))[_order_of(plan, window)]
    rows = np.tile(row, (num_rows, 1))
    tokens_BS = jax.make_array_from_callback(
        rows.shape, shd.shardings(rows, "batch seq"), rows.__getitem__
    )
    loop = functools.partial(_continue, plan=plan, prompt_length=len(prompt), num_tokens=num_tokens)
    key = jax.random.key(plan.config.seed)
    compiled = jax.jit(loop, compiler_options=plan.shared_options)
    return np.asarray(compiled(state, tokens_BS, key=key))


def _continue(state, tokens_BS, *, key, plan: Plan, prompt_length: int, num_tokens: int):
    model = model_of(state, plan)
    temperature = plan.config.sample.temperature
    window = tokens_BS.shape[1]
    order_S = np.arange(window, dtype=np.int32)[_order_of(plan, window)]
    position_S = jnp.asarray(order_S)
    positions_BS = shd.constrain(jnp.broadcast_to(position_S, tokens_BS.shape), "batch seq")

    execution = dataclasses.replace(plan.execution, balance=Balance.HEAD_TAIL)

    def extend(i, tokens_BS):
        # What is ahead of the last token is padding, and the attention is causal.
        documents = documents_of(
            (positions_BS < i).astype(jnp.int32),
            positions_BS,
            max_documents=plan.execution.max_documents,
        )
        x_BSD, head_DV, cap, *_ = forward(
            model, tokens_BS, documents=documents, execution=execution
        )
        x_BSD = shd.constrain(x_BSD, "batch seq act_embed")
        is_last_S = (position_S == i - 1).astype(x_BSD.dtype)
        last_BD = shd.einsum("BSD,S->BD", x_BSD, is_last_S, out="batch act_embed")
        vocab_size = plan.config.model.vocab_size
        logits_BV = logits(last_BD, head_DV, cap=cap, vocab_size=vocab_size)
        if temperature > 0:
            # One draw for all rows: they stay the same.
            noise_V = jax.random.gumbel(jax.random.fold_in(key, i), logits_BV.shape[1:])
            logits_BV = logits_BV / temperature + noise_V
        next_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        return jnp.where(position_S[None] == i, next_B[:, None], tokens_BS)

    end = prompt_length + num_tokens
    tokens_BS = jax.lax.fori_loop(prompt_length, end, extend, tokens_BS)
    return shd.constrain(tokens_BS, "_ _")[0, np.argsort(order_S)[prompt_length:end]]


def _order_of(plan: Plan, window: int) -> np.ndarray | slice:
    """Which tokens of the window are where. By document they would move as the text grows."""
    if plan.execution.exchange == Exchange.ALL_TO_ALL:
        return slice(None)
    return head_tail(window, plan.mesh.shape["context"])
