import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops import loss
from jaxscale.ops.loss import cross_entropy

VOCAB, PADDED = 50, 64


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 12, 16)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(16, PADDED)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, (2, 12)), jnp.int32).at[0, 3:6].set(-1)
    return x, head, targets


def plain(x, head, targets, *, z_loss, vocab_size=VOCAB, cap=None):
    """The textbook formula, whole logits in float32."""
    logits = jnp.einsum("BSD,DV->BSV", x, head)[..., :vocab_size]
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    label = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(targets >= 0, lse - label + z_loss * lse**2, 0.0).sum()


@pytest.mark.parametrize(("z_loss", "cap"), [(0.0, None), (1e-2, None), (1e-2, 3.0)])
@pytest.mark.parametrize("vocab_size", [VOCAB, PADDED])
@pytest.mark.parametrize("chunk", [1, 8, 7, 4096])
def test_loss_and_gradients_equal_the_textbook_formula(
    batch, z_loss, cap, vocab_size, chunk, monkeypatch
):
    monkeypatch.setattr(loss, "CHUNK_TOKENS", chunk)
    x, head, targets = batch

    def mine(x, head):
        return 0.5 * cross_entropy(
            x, head, targets, vocab_size=vocab_size, z_loss=z_loss, cap=cap, dtype=jnp.float32
        )

    value, gradients = jax.jit(jax.value_and_grad(mine, argnums=(0, 1)))(x, head)
    halved = jax.value_and_grad(
        lambda x, head: (
            0.5 * plain(x, head, targets, z_loss=z_loss, vocab_size=vocab_size, cap=cap)
        ),
        argnums=(0, 1),
    )
    expected, expected_gradients = halved(x, head)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mine(x, head), expected, rtol=1e-6)  # without gradients


def test_masked_tokens_and_padded_words_get_no_gradient(batch):
    x, head, targets = batch
    dx, dhead = jax.grad(
        lambda x, head: cross_entropy(x, head, targets, vocab_size=VOCAB, dtype=jnp.float32),
        argnums=(0, 1),
    )(x, head)
    assert not np.asarray(dx)[0, 3:6].any() and np.asarray(dx)[0, :3].any()
    assert not np.asarray(dhead)[:, VOCAB:].any()


def test_bfloat16_rounds_but_keeps_a_float32_gradient_of_the_head(batch):
    x, head, targets = batch
    value, (dx, dhead) = jax.value_and_grad(
        lambda x, head: cross_entropy(x, head, targets, vocab_size=VOCAB, dtype=jnp.bfloat16),
        argnums=(0, 1),
    )(x.astype(jnp.bfloat16), head)
    assert dx.dtype == jnp.bfloat16 and dhead.dtype == jnp.float32
    np.testing.assert_allclose(value, plain(x, head, targets, z_loss=0.0), rtol=1e-2)


def test_enlarged_gradients_of_float16_are_not_lost():
    """Of words that are not likely."""
    key, words = jax.random.key(0), 32_768
    x = jax.random.normal(key, (2, 32, 16)).astype(jnp.float16)
    head = 1.5 * jax.random.normal(jax.random.key(1), (16, words))
    targets = jnp.zeros((2, 32), jnp.int32)

    def gradients(dtype, enlarged):
        def scaled(x, head):
            return 2.0**-4 * cross_entropy(
                x, head, targets, vocab_size=words, dtype=dtype, enlarged=enlarged
            )

        return jax.jit(jax.grad(scaled, argnums=(0, 1)))(x.astype(dtype), head)

    (_, exact), plain, enlarged = (
        gradients(dtype, enlarged)
        for dtype, enlarged in (
            (jnp.float32, None),
            (jnp.float16, None),
            (jnp.float16, jnp.float32(2**10)),
        )
    )
    # The head's, of each word: the worst of those that no token has for a target.
    errors = [
        np.max(np.linalg.norm(head - exact, axis=0)[1:] / np.linalg.norm(exact, axis=0)[1:])
        for _, head in (plain, enlarged)
    ]
    # 2% is what logits rounded to float16 leave.
    assert errors[0] > 1.0 and errors[1] < 0.04
    np.testing.assert_allclose(plain[0], enlarged[0], atol=1e-3, rtol=1e-2)


def test_no_float32_logits_of_the_batch_are_held(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 64)
    x, head = jnp.zeros((4, 128, 8), jnp.bfloat16), jnp.zeros((8, 1024), jnp.float32)
    targets = jnp.zeros((4, 128), jnp.int32)

    def gradients(x, head):
        return jax.grad(
            lambda x, head: cross_entropy(x, head, targets, vocab_size=1024, dtype=jnp.bfloat16),
            argnums=(0, 1),
        )(x, head)

    text = str(jax.make_jaxpr(gradients)(x, head))
    assert "[64,1024]" in text
    assert "[512,1024]" not in text and "[4,128,1024]" not in text
    logits_bytes = 512 * 1024 * 4
    analysis = jax.jit(gradients).lower(x, head).compile().memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < logits_bytes


@pytest.mark.parametrize(
    ("tokens", "num_parts", "chunks"),
    [
        (8192, 1, (2, 4096)),
        (4096, 1, (1, 4096)),
        (6000, 1, (2, 3000)),
        (8191, 1, (2, 4096)),
        (7, 1, (1, 7)),
        (2048, 4, (2, 1024)),
        (7, 4, (1, 7)),
    ],
)
def test_chunks_are_few_and_even(tokens, num_parts, chunks):
    assert loss._chunks(tokens, num_parts=num_parts) == chunks
