"""jaxscale trains transformer language models on GPU clusters with JAX.

Importing the package loads nothing heavy; import the part you need:
`from jaxscale import sharding as shd`.
"""

__version__ = "0.1.0"
