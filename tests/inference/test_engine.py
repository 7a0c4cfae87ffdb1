"""What is continued with kept keys and values is what the whole text gives, token by token."""

import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.config import Dtype
from jaxscale.inference import score
from jaxscale.inference.engine import CHUNK, Engine
from jaxscale.inference.sampling import Sampling
from jaxscale.inference.score import Passage, scores, windows
from jaxscale.models import families
from jaxscale.models.decoder import forward
from jaxscale.ops.documents import documents_of
from jaxscale.ops.execution import Execution

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
GREEDY = Sampling(temperature=0.0)
# Longer than the windows of the golden files' families, 5.
PROMPTS = [np.array(prompt, np.int32) for prompt in ([1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2])]


class Drawn:
    """Weights that are drawn: the same for the engine and for the whole model."""

    tokenizer, companions = "bytes", []

    def __init__(self, name):
        hf = json.loads((GOLDEN / f"{name}.json").read_text())["config"]
        self.model = families.of_config_json(hf).from_hugging_face(hf)

    def value(self, path, leaf):
        rng = np.random.default_rng(zlib.crc32(path.encode()))
        return jnp.asarray(rng.normal(size=leaf.shape) * 0.3, leaf.dtype)

    def read(self, abstract):
        return {
            path: jax.device_put(self.value(path, leaf), leaf.sharding)
            for path, leaf in abstract.items()
        }

    def whole_model(self):
        abstract = jax.eval_shape(lambda: self.model.build(nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
        filled = [
            (path, box.replace(self.value(".".join(map(str, path)), box.get_value())))
            for path, box in nnx.to_flat_state(state)
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(filled))


def whole_logits(model):
    """`logits(text)`: float32 [text length, vocabulary], from the whole text; compiled once."""
    execution = Execution(dtype=Dtype.FLOAT32)

    @jax.jit
    def padded_logits(tokens, length):
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        documents = documents_of((positions < length).astype(jnp.int32), positions, max_documents=1)
        x, head, cap, *_ = forward(model, tokens, documents=documents, execution=execution)
        out = (x[0] @ head)[:, : model.c.vocab_size]
        return out if cap is None else cap * jnp.tanh(out / cap)

    def logits(text):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(text)] = text
        return np.asarray(padded_logits(tokens, len(text)))[: len(text)]

    return logits


def likeliest(logits, text, num_tokens):
    """The likeliest tokens after a text, from the whole text each time."""
    text, made = list(text), []
    for _ in range(num_tokens):
        made.append(int(np.argmax(logits(text)[-1])))
        text.append(made[-1])
    return made


def joined(chunks):
    return [np.concatenate(rows).tolist() for rows in zip(*chunks, strict=True)]


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.json")))
def test_kept_keys_and_values_give_the_tokens_that_the_whole_text_gives(name):
    weights, num_tokens = Drawn(name), CHUNK + 3
    engine = Engine(weights, dtype=Dtype.FLOAT32, devices=jax.devices()[:2])
    made = joined(engine.continued(PROMPTS, sampling=GREEDY, max_tokens=num_tokens))
    assert [len(row) for row in made] == [num_tokens] * len(PROMPTS)
    logits = whole_logits(weights.whole_model())
    for prompt, row in zip(PROMPTS, made, strict=True):
        assert row == likeliest(logits, prompt, num_tokens)


@pytest.fixture(scope="module")
def gemma():
    """Of windows that are shorter than the texts, and caps."""
    return Drawn("gemma2")


@pytest.fixture(scope="module")
def engine(gemma):
    return Engine(gemma, dtype=Dtype.FLOAT32, devices=jax.devices()[:2])


def test_a_stop_token_ends_its_text_and_no_other(engine):
    free = joined(engine.continued(PROMPTS, sampling=GREEDY, max_tokens=6))
    stop = free[0][3]
    made = joined(engine.continued(PROMPTS, sampling=GREEDY, max_tokens=6, stop_ids=[stop]))
    for row, all_of_it in zip(made, free, strict=True):
        end = all_of_it.index(stop) if stop in all_of_it else len(all_of_it)
        assert row == all_of_it[:end]


def test_a_seed_draws_the_same_tokens_again_and_another_seed_others(engine):
    def drawn(seed):
        sampling = Sampling(temperature=1.0, seed=seed)
        return joined(engine.continued(PROMPTS, sampling=sampling, max_tokens=20))

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([np.array([], np.int32)], 4, "prompt 1 holds no token"),
        ([np.array([1]), np.array([1, 5000])], 4, "prompt 2 holds token 5000; the model has 100"),
        ([np.array([1])], 0, "max_tokens=0: set it to 1 or more"),
        ([np.array([1])], 5000, "longer than the 4096 that the model is meant for"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(engine, prompts, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        next(engine.continued(prompts, sampling=GREEDY, max_tokens=max_tokens))


# How likely text is.


@pytest.fixture
def short_rows(monkeypatch):
    """128 tokens: attention over the product's 2048 takes seconds."""
    monkeypatch.setattr(score, "ROW_TOKENS", 128)


def loss_of(logits, text):
    """-log p of each token but the first, from the whole model."""
    log_p = np.asarray(jax.nn.log_softmax(logits(text), axis=-1))
    return -log_p[np.arange(len(text) - 1), text[1:]]


@pytest.mark.usefixtures("short_rows")
def test_the_score_of_packed_passages_is_that_of_each_alone(gemma, engine):
    rng, logits = np.random.default_rng(0), whole_logits(gemma.whole_model())
    texts = [rng.integers(0, 100, length) for length in (5, 40, 2, 17)]
    passages = [Passage(text.astype(np.int32), first=1 + n % 2) for n, text in enumerate(texts)]
    for passage, given in zip(passages, scores(engine, passages), strict=True):
        expected = loss_of(logits, passage.tokens)[passage.first - 1 :]
        np.testing.assert_allclose(given.loss, expected.sum(), rtol=1e-5)
        assert given.num_tokens == len(expected)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize(("dtype", "rtol"), [(Dtype.BFLOAT16, 5e-3), (Dtype.FLOAT16, 6e-4)])
def test_a_score_is_as_near_as_its_dtype_lets_it_be(gemma, dtype, rtol):
    logits = whole_logits(gemma.whole_model())
    text = np.random.default_rng(0).integers(0, 100, 64).astype(np.int32)
    engine = Engine(gemma, dtype=dtype, devices=jax.devices()[:2])
    (given,) = scores(engine, [Passage(text, first=1)])
    np.testing.assert_allclose(given.loss, loss_of(logits, text).sum(), rtol=rtol)
    (row,) = joined(engine.continued(PROMPTS[:1], sampling=GREEDY, max_tokens=4))
    assert len(row) == 4 and max(row) < 100


@pytest.mark.usefixtures("short_rows")
def test_what_is_likeliest_is_said_so(engine):
    (prompt,) = PROMPTS[:1]
    (made,) = joined(engine.continued([prompt], sampling=GREEDY, max_tokens=5))
    text = np.array([*prompt, *made], np.int32)
    other = np.where(np.arange(len(text)) == len(text) - 1, (text + 1) % 100, text)
    passages = [Passage(x.astype(np.int32), first=len(prompt)) for x in (text, other)]
    assert [given.is_likeliest for given in scores(engine, passages)] == [True, False]


@pytest.mark.parametrize("length", [4, 7, 64])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 9, 30])
def test_windows_judge_every_token_once_and_after_what_stands_before_it(num_tokens, length):
    text, judged = list(range(1, num_tokens + 1)), []
    for passage in windows(text, before=0, length=length):
        assert len(passage.tokens) <= length
        tokens = passage.tokens.tolist()
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert passage.first >= min(length // 2, tokens[passage.first])
        judged += tokens[passage.first :]
    assert judged == text
