"""What a plan does that works and costs: said before the first step, a line each."""

import math
from collections.abc import Callable, Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxscale.config import Exchange, num_row_shards
from jaxscale.step.plan import Plan

# Bytes a second that a GPU sends to another host: one port of 400 Gb/s for each.
BETWEEN_HOSTS = 50e9
# Gathers and reduce-scatters of a layer's activations over `tensor`, forward, recomputed and back
# (compiled for Llama 3 70B on 64 H100: 562 and 401 of 80 layers).
TENSOR_COLLECTIVES = 12
# What a layer sends over `context` in an update, in units of its forward pass
# (docs/parallelism.md).
CONTEXT_PASSES = {Exchange.ALL_TO_ALL: 3, Exchange.ALL_GATHER: 4, Exchange.RING: 4.3}


def remarks(plan: Plan, *, host_of: Callable[[Any], Hashable]) -> list[str]:
    """host_of: device -> what names its host."""
    hosts = np.vectorize(host_of, otypes=[object])(plan.mesh.devices)
    return [*_key_heads(plan), *_crossing(plan, hosts)]


def _key_heads(plan: Plan) -> list[str]:
    tensor, heads = plan.mesh.shape["tensor"], plan.config.model.num_kv_heads
    if tensor <= heads:
        return []
    return [
        f"config.mesh.tensor={tensor} is more than config.model.num_kv_heads={heads}: each device "
        "makes the keys and values of all heads, and uses those of its query heads"
    ]


def _crossing(plan: Plan, hosts: np.ndarray) -> list[str]:
    """Axes with messages in every layer that leave a host though they need not."""
    names, sizes, found = list(plan.mesh.shape), plan.mesh.shape, []
    per_host = max(np.unique(hosts.astype(str), return_counts=True)[1].tolist())
    for axis, num_bytes in (("tensor", _tensor_bytes), ("context", _context_bytes)):
        lines = np.moveaxis(hosts, names.index(axis), -1).reshape(-1, sizes[axis])
        if all(len(set(line)) == 1 for line in lines.tolist()):
            continue
        fix = f"set config.mesh.{axis}={math.gcd(sizes[axis], per_host)}"
        if per_host % sizes[axis] == 0:
            fix = (
                f"make config.mesh.context * config.mesh.tensor a divisor of {per_host}, and "
                "number the processes of a host one after the other"
            )
        sent = num_bytes(plan)
        found.append(
            f"config.mesh.{axis}={sizes[axis]} reaches over hosts of {per_host} devices: about "
            f"{sent / 1e9:,.1f} GB a device and update, {sent / BETWEEN_HOSTS:,.1f} s at "
            f"{BETWEEN_HOSTS / 1e9:.0f} GB/s; {fix}"
        )
    return found


def _tokens(plan: Plan) -> float:
    """Of an update, on the devices that share rows over context and tensor."""
    config, sizes = plan.config, plan.mesh.shape
    return config.batch_size * config.seq_len / num_row_shards(sizes)


def _layers(plan: Plan) -> float:
    """Of a device."""
    return plan.config.model.num_layers / plan.mesh.shape["stage"]


def _itemsize(plan: Plan) -> int:
    return jnp.dtype(plan.execution.dtype).itemsize


def _tensor_bytes(plan: Plan) -> float:
    model, sizes = plan.config.model, plan.mesh.shape
    activations = _tokens(plan) / sizes["context"] * model.model_dim * _itemsize(plan)
    others = (sizes["tensor"] - 1) / sizes["tensor"]
    return TENSOR_COLLECTIVES * _layers(plan) * activations * others


def _context_bytes(plan: Plan) -> float:
    model, sizes, exchange = plan.config.model, plan.mesh.shape, plan.execution.exchange
    tensor, context = sizes["tensor"], sizes["context"]
    heads = model.num_kv_heads
    if exchange == Exchange.ALL_TO_ALL:
        heads = (model.num_heads + model.num_kv_heads) / context
    each = 2 * _tokens(plan) * model.head_dim() * heads / tensor * _itemsize(plan)
    return CONTEXT_PASSES[exchange] * _layers(plan) * each * (context - 1) / context
