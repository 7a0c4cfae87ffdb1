"""Normalisation.

B rows, S sequence, D model dimension.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxscale import sharding as shd
from jaxscale import warned
from jaxscale.config import Norm
from jaxscale.kernels import rms_norm as kernel
from jaxscale.kernels import varying
from jaxscale.ops.execution import Execution


def choose(x_BSD, execution: Execution) -> Norm:
    """What norms this residual stream, XLA or TRITON: the one the config names, if one.

    Raises ValueError for a kernel that cannot run.
    """
    if (wanted := execution.norm) == Norm.XLA:
        return wanted
    reason = kernel.supported(
        x_BSD, platform=execution.platform, compute_capability=execution.compute_capability
    )
    if wanted == Norm.TRITON:
        if reason:
            raise ValueError(f"config.norm='triton' cannot run: {reason}; set config.norm='auto'")
        return wanted
    # XLA rounds to 8 bits in the launches that norm: 338 MB of 16,384 tokens of 4096, and 470 where
    # a kernel of ours comes before the rounding.
    if execution.fp8:
        return Norm.XLA
    if reason and execution.platform != "cpu":
        warned.once(f"XLA norms the residual stream, in more than one pass back: {reason}")
    return Norm.XLA if reason else Norm.TRITON


def rms_norm(x, scale, *, eps: float):
    """x / rms(x) * scale over the last dim (Zhang & Sennrich 2019, arXiv:1910.07467).

    Statistics are float32, the result has x's dtype.
    """
    return kernel.reference(x, scale, eps=eps)


def normed_stream(x_BSD, scale_D, *, eps: float, axes: str, execution: Execution, added_BSD=None):
    """(x, rms_norm(x)) of the residual stream, or of what it becomes with `added_BSD`.

    That sum is named "residual" (`ops/layers.py`). axes: of the stream. Where `choose` takes the
    kernel of our own (`kernels/rms_norm.py`) each pass is one launch, the sum included; the one
    back is of both that come out.
    """
    if choose(x_BSD, execution) == Norm.XLA:
        if added_BSD is not None:
            x_BSD = checkpoint_name(x_BSD + added_BSD, "residual")
        return x_BSD, rms_norm(x_BSD, scale_D, eps=eps)
    options = _Options(axes, eps, execution.compute_capability, execution.is_rich)
    scale_D = varying.as_operands(scale_D, x_BSD)
    if added_BSD is None:
        made = _forward(*jax.lax.stop_gradient((x_BSD, scale_D)), options)
    else:
        x_BSD, made = _summed(x_BSD, added_BSD, scale_D, options)
        x_BSD = checkpoint_name(x_BSD, "residual")
    return _normed(x_BSD, scale_D, made, options)


class _Options(NamedTuple):
    axes: str
    eps: float
    compute_capability: str
    is_rich: bool

    @property
    def token_axes(self) -> str:
        return self.axes.rpartition(" ")[0]

    def mapped(self, function, *, in_axes: tuple[str, ...], out_axes, **settings):
        """A function of the kernel on each device's own part."""
        local = functools.partial(function, compute_capability=self.compute_capability, **settings)
        return shd.shard_map(local, in_axes=in_axes, out_axes=out_axes, check_vma=False)


def _forward(x_BSD, scale_D, options: _Options):
    axes, tokens = options.axes, options.token_axes
    mapped = options.mapped(
        kernel.forward, in_axes=(axes, "norm"), out_axes=(axes, tokens), eps=options.eps
    )
    return mapped(x_BSD, scale_D)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(x_BSD, added_BSD, scale_D, options):
    """(their sum, what `_forward` makes of it), whose gradient `_normed` gives to the sum."""
    axes, tokens = options.axes, options.token_axes
    mapped = options.mapped(
        kernel.forward_of_sum,
        in_axes=(axes, axes, "norm"),
        out_axes=(axes, (axes, tokens)),
        eps=options.eps,
    )
    return mapped(x_BSD, added_BSD, scale_D)


_summed.defvjp(
    lambda x_BSD, added_BSD, scale_D, options: (_summed(x_BSD, added_BSD, scale_D, options), None),
    lambda options, _, grads: (grads[0], grads[0], None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normed(x_BSD, scale_D, made, options):
    """(x, its norm), of what `_forward` made of x."""
    return x_BSD, made[0]


def _normed_fwd(x_BSD, scale_D, made, options):
    # To make again what came with a sum takes what was added, a product of the forward pass; of x,
    # which remat keeps, it is one launch. What XLA keeps anyway (128 MiB a layer, 16,384 tokens of
    # 4096) is not made again.
    normed_BSD, inverse_BS = made if options.is_rich else _forward(x_BSD, scale_D, options)
    return (x_BSD, normed_BSD), (x_BSD, scale_D, inverse_BS)


def _normed_bwd(options, residuals, grads):
    x_BSD, scale_D, inverse_BS = residuals
    axes, tokens = options.axes, options.token_axes

    def local(*operands, **settings: Any):
        dx_BSD, dscale_D = kernel.backward(*operands, **settings)
        return dx_BSD, dscale_D[None, None]

    # Each device's part of the scale's gradient; XLA adds them, as it would its own.
    mapped = options.mapped(
        local, in_axes=(axes, "norm", tokens, axes, axes), out_axes=(axes, axes)
    )
    dx_BSD, dscale_BSD = mapped(x_BSD, scale_D, inverse_BS, *grads)
    return dx_BSD, dscale_BSD.sum(axis=(0, 1)).astype(scale_D.dtype), None


# optimize_remat: the forward pass runs `_normed`, what is made again is `_normed_fwd`'s.
_normed.defvjp(_normed_fwd, _normed_bwd, optimize_remat=True)
