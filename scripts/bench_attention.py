"""Times packed attention.

    python scripts/bench_attention.py [--shape=2,8192,32,8,128] [--bounds=1,8,32] [--documents=1,8]

For each bound on the documents of a row and each number of documents in it, milliseconds of the
forward pass and of forward and backward, beside dense causal attention through jax.nn (cuDNN on a
GPU).
"""

from absl import app, flags

from jaxscale.perf import attention_speed

SHAPE = flags.DEFINE_list(
    "shape", ["2", "8192", "32", "8", "128"], "rows, sequence, query heads, key heads, head size"
)
BOUNDS = flags.DEFINE_list("bounds", ["1", "8", "16", "32", "64"], "documents a row may hold")
DOCUMENTS = flags.DEFINE_list("documents", ["1", "8"], "documents that a row does hold")
REPEATS = flags.DEFINE_integer(
    "repeats", 20, "calls of one timing; the median of 3 timings is printed"
)


def main(argv: list[str]) -> None:
    del argv
    rows, seq, heads, kv_heads, head_size = map(int, SHAPE.value)
    shape = attention_speed.Shape(
        rows=rows, seq=seq, heads=heads, kv_heads=kv_heads, head_size=head_size
    )
    lines = attention_speed.measure(
        shape,
        bounds=[int(bound) for bound in BOUNDS.value],
        documents=[int(number) for number in DOCUMENTS.value],
        repeats=REPEATS.value,
    )
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    app.run(main)
