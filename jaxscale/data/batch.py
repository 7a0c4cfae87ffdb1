"""What one training step reads."""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows of packed documents, each array int32 [rows, seq_len]; numpy on a host, jax once placed.

    tokens: token ids; 0 where padded.
    targets: the token that follows, or -1 where the loss must ignore the place: the last token of
        a document (what follows belongs to another document) and padding.
    segments: which document of the row a token belongs to, counted from 1; 0 is padding. Attention
        stays inside a segment.
    positions: place within the segment, from 0. A document that began in an earlier row restarts
        at 0 here: its earlier tokens cannot be seen from this row.
    """

    tokens: Any
    targets: Any
    segments: Any
    positions: Any
