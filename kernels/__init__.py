"""Kernels of ours, imported as `jaxscale.kernels`.

An attention kernel's file, `x_attention.py`, offers
  `attention(q, k, v, *, documents, scale, window=None, cap=None, deterministic=False)`: the last,
    whether the backward pass must add in one order;
  `reference`, the same in plain jnp;
  `supported(q, k, *, platform, compute_capability, cap, v_head_size)`: None, or why it cannot run
    these shapes, with values of this head size if it is not that of the keys;
  `partial_forward(q, k, v, *, parts, causal, scale)`, the same over some of the keys: output and
    log-sum-exp. parts: a pytree, as in `ops/deal.py`;
  `partial_backward(q, k, v, *, ..., out_BSNH, lse_BSN, grad_BSNH, deterministic=False)`, of the
    output and log-sum-exp over all keys: that part of dq, dk, dv;
  `HAS_QUADRATIC_MEMORY`; `TRACKS_VMA`: whether its primitives tell JAX over which mesh axes a
    value varies.
Other kernels offer `supported` too, of what they need to know.
"""

# Where a checkout is on sys.path, this folder is found under its bare name too, which belongs to a
# package of other people. Libraries look for theirs by importing the name and reading a version, so
# that works, and the version is lower than any they take. Nothing else is here under that name: a
# module imported under two names exists twice.
if __name__ != "jaxscale.kernels":
    __version__ = "0"
    __path__ = []
