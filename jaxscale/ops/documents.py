"""The documents that a batch of packed rows holds; they travel with the activations.

B rows, S sequence, M documents a row at most.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """Which document each token is of, and where in it; all int32.

    segments_BS: the document's number in its row, from 1; 0 is padding. positions_BS: the token's
    place in its document. lengths_BM: the tokens of documents 1 to M of each row, 0 for none.
    Documents stand in the order of their numbers from a row's start, and padding ends it: some
    kernels go by lengths alone.
    """

    segments_BS: jax.Array
    positions_BS: jax.Array
    lengths_BM: jax.Array


# The logical axes of each.
AXES = dict(segments_BS="batch seq", positions_BS="batch seq", lengths_BM="batch _")


def documents_of(segments_BS, positions_BS, *, max_documents: int) -> Documents:
    """The documents of packed rows; those of a row beyond `max_documents` must be padding."""
    number_M = jnp.arange(1, max_documents + 1, dtype=segments_BS.dtype)
    lengths_BM = (segments_BS[:, :, None] == number_M).sum(1, dtype=jnp.int32)
    return Documents(segments_BS, positions_BS, lengths_BM)
