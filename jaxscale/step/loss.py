"""A batch's documents, and the loss of a model's output, as a run has them.

B rows, S sequence, D model, V vocabulary.
"""

import jax

from jaxscale.data.batch import Batch
from jaxscale.ops.documents import Documents, documents_of
from jaxscale.ops.loss import cross_entropy
from jaxscale.step.plan import Plan


def documents_of_batch(batch: Batch, plan: Plan) -> Documents:
    """Of arrays [rows, seq]."""
    return documents_of(batch.segments, batch.positions, max_documents=plan.execution.max_documents)


# The scopes (`loss`, `optimizer`, `embedding`, `attention`) are how perf/anatomy.py tells the parts
# of an update apart.
def cross_entropy_of(output, targets_BS, *, plan: Plan, z_loss: float, enlarged=None):
    """Summed over tokens, float32. output: (x [B, S, D], the table [D, V], the logits' cap, ..).

    enlarged: as `ops.loss.cross_entropy` has it.
    """
    x_BSD, head_DV, cap, *_ = output
    with jax.named_scope("loss"):
        return cross_entropy(
            x_BSD,
            head_DV,
            targets_BS,
            vocab_size=plan.config.model.vocab_size,
            dtype=plan.execution.dtype,
            z_loss=z_loss,
            cap=cap,
            enlarged=enlarged,
        )
