"""Hand-written kernels, one file each, with a plain-jnp `reference` beside it. Imported as `jaxscale.kernels`."""

# The bare name belongs to another package on PyPI, and a module imported under two names exists twice.
if __name__ != "jaxscale.kernels":
    raise ImportError(
        f"this folder is the package jaxscale.kernels, not {__name__!r}: write `from jaxscale.kernels import ...`, "
        "and run tests as `pytest`, not `python -m pytest`, which puts the checkout on sys.path"
    )
