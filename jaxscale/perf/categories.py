"""What a GPU launches: its names, and by them its row in the anatomy of a step."""

import functools
import re
from dataclasses import dataclass

# The rows of a table, in its order.
CATEGORIES = {
    "gemm": "matrix products",
    "attention": "attention",
    "elementwise": "element-wise, norms, the rest",
    "copy": "copies and zero fill",
    "embedding": "embedding",
    "loss_gemm": "loss: matrix products",
    "loss": "loss: the rest",
    "optimizer": "optimizer",
    "communication_exposed": "collectives, exposed",
    "transfer": "host copies, alone",
    "idle": "idle",
}
COMPUTE = ("gemm", "attention", "elementwise", "embedding", "loss_gemm", "loss", "optimizer")


@dataclass(frozen=True)
class Launch:
    """What is called again and again; an empty string is what the trace does not say.

    name: as the GPU knows it. hlo_op: XLA's instruction, "loop_add_fusion.3". op_name: what was
    traced, "jit(train_step)/transpose(jvp(loss))/mul". module: the program, "jit_train_step".
    graph: the CUDA graph that it is part of, "command_buffer_43"; the trace does not say hlo_op and
    op_name then, jaxscale/perf/graph_names.py finds them.
    """

    name: str
    hlo_op: str
    op_name: str
    module: str
    graph: str = ""


def _scope(name: str) -> str:
    """Matches `jax.named_scope(name)` in an op name.

    Also as transpose(jvp(name)), or merged with others by a colon.
    """
    return rf"(?:^|[/(:]){name}(?:$|[/):])"


GEMM = r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitk"
_ATTENTION = (
    r"sdpa|fmha|flash|dot_do_o|convert_dq|dot_product_attention|^cudnn::fusion|^void cudnn::fusion"
)
# Of fusions those that XLA names after moving data alone; `wrapped_` ones have a single operation.
_COPY = (
    r"^Mem(cpy|set)|^memcpy\d+(_post)?$|^copy[._-]?\d*$"
    r"|^wrapped_(copy|slice|transpose|concatenate|pad|broadcast|dynamic_(update_)?slice)[._]?\d*$"
    r"|^(loop_|input_)?(copy|slice|transpose|broadcast|dynamic_(update_)?slice)_fusion[._]?\d*$"
)
_NCCL = r"nccl|nvshmem|MemcpyP2P|all_?reduce_?kernel|MultiGpuBarrier"
_COLLECTIVE = r"^(ragged.)?all[-_](gather|reduce|to)|^reduce[-_]scatter|^collective[-_]|^psum"
# The first line that matches a launch says what it is: a pattern of its name or HLO operation, and
# one of its op name (the scopes it was traced under, and the primitive); None matches all.
RULES: tuple[tuple[str, str | None, str | None], ...] = (
    ("communication", _NCCL, None),
    ("communication", _COLLECTIVE, None),
    ("transfer", r"^Memcpy(H2D|D2H)", None),
    ("attention", _ATTENTION, None),
    ("attention", None, rf"{_scope('attention')}|dot_product_attention"),
    ("loss_gemm", GEMM, _scope("loss")),
    ("loss", None, _scope("loss")),
    ("optimizer", None, _scope("optimizer")),
    ("embedding", None, _scope("embedding")),
    ("gemm", GEMM, None),
    ("copy", _COPY, None),
    ("elementwise", None, None),
)
# By the HLO operation, which may be named after the primitive; else by NCCL's own name, where sends
# serve three kinds.
COLLECTIVE_KINDS = {
    "ragged-all-to-all": r"ragged.all.to.all",
    "all-to-all": r"all.to.all",
    "all-gather": r"all.?gather",
    "reduce-scatter": r"reduce.?scatter|psum.scatter",
    "all-reduce": r"all.?reduce|psum|pmax|pmin",
    "collective-permute": r"collective.permute|ppermute",
    "broadcast": r"broadcast",
    "send and receive": r"sendrecv|MemcpyP2P",
}


@functools.cache
def classify(launch: Launch) -> str:
    """The category of the first of RULES that matches.

    It is "communication" where CATEGORIES tells exposed from hidden.
    """
    for category, pattern, op_pattern in RULES:
        matches = pattern is None or any(
            re.search(pattern, text, re.IGNORECASE) for text in (launch.name, launch.hlo_op)
        )
        if matches and (op_pattern is None or re.search(op_pattern, launch.op_name)):
            return category
    raise AssertionError("the last rule matches all")


def collective_kind(launch: Launch) -> str:
    """A key of COLLECTIVE_KINDS, or "other"."""
    for text in (launch.hlo_op, launch.name):
        for kind, pattern in COLLECTIVE_KINDS.items():
            if re.search(pattern, text, re.IGNORECASE):
                return kind
    return "other"
