"""Text comes out piece by piece, and a stop, or half a character, never does."""

import json
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.inference import sampling
from jaxscale.inference.sampling import Sampling
from jaxscale.inference.serve import open_server
from jaxscale.inference.text import Continuations, Text

TOKENIZER = ByteTokenizer()


class Echo:
    """In place of an engine: says these bytes after every prompt, some at a time."""

    def __init__(self, said, step):
        self.ids, self.step, self.asked = list(said.encode()), step, []

    def continued(self, prompts, *, sampling, max_tokens, stop_ids):
        sampling.validate()
        self.asked.append((prompts, sampling, max_tokens))
        if not max_tokens > 0:
            raise ValueError(f"max_tokens={max_tokens}: set it to 1 or more")
        ids = self.ids[:max_tokens]
        for begin in range(0, len(ids), self.step):
            yield [np.array(ids[begin : begin + self.step], np.int32) for _ in prompts]


def echo(said, step) -> Any:
    return Echo(said, step)


def said(text, *, step=1, stop=(), max_tokens=1000):
    pieces = Continuations(
        echo(text, step),
        TOKENIZER,
        ["a", "b"],
        sampling=Sampling(),
        max_tokens=max_tokens,
        stop=stop,
    )
    return [list(column) for column in zip(*pieces, strict=True)]


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_pieces_make_the_text_and_none_is_half_a_character(step):
    text = "ein Gruß, 你好 🙂."
    for pieces in said(text, step=step):
        assert "".join(pieces) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_what_stays_half_a_character_is_given_at_the_end():
    (pieces, _) = said("é", max_tokens=1)
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one. two. three", ["two"], "one. "),
        ("one. two. three", ["three", "two"], "one. "),
        ("aab aaab", ["aaa"], "aab "),
        ("nothing of it ST", ["STOP"], "nothing of it ST"),
        ("first", ["f"], ""),
        ("as it is", [""], "as it is"),
    ],
)
def test_a_stop_ends_the_text_and_never_shows(text, stop, expected, step):
    for pieces in said(text, step=step, stop=stop):
        assert "".join(pieces) == expected
        given = ""
        for piece in pieces:
            given += piece
            assert expected.startswith(given)


def test_text_is_given_as_soon_as_no_stop_can_take_it_back():
    text = Text(TOKENIZER.decode, stop=["xyz"])
    assert text.add(list(b"ab x")) == "ab "
    assert text.add(list(b"yq")) == "xyq"


# Drawing.


def test_top_k_leaves_the_k_likeliest():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 50)), jnp.float32)
    for k in (1, 7, 50):
        left = np.isfinite(sampling.among_likeliest(logits, k))
        for row, kept in zip(np.asarray(logits), left, strict=True):
            assert set(np.flatnonzero(kept)) == set(np.argsort(row)[-k:])


@pytest.mark.parametrize("mass", [0.01, 0.5, 0.9, 0.999999, 1.0])
def test_top_p_leaves_the_fewest_that_hold_the_mass(mass):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 50)) * 3, jnp.float32)
    left = np.isfinite(sampling.among_mass(logits, mass))
    for row, kept in zip(np.asarray(jax.nn.softmax(logits)), left, strict=True):
        order = np.argsort(row)[::-1]
        num = int(np.searchsorted(np.cumsum(row[order], dtype=np.float64), mass * (1 - 1e-6))) + 1
        assert abs(kept.sum() - min(num, 50)) <= (mass > 0.999)
        assert set(np.flatnonzero(kept)) == set(order[: kept.sum()])


def test_what_is_drawn_is_drawn_as_often_as_its_probability_says():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (4000, 4))
    drawn = sampling.draw(logits, Sampling(temperature=1.0, top_p=0.9), key=jax.random.key(0))
    counts = np.bincount(np.asarray(drawn), minlength=4) / 4000
    np.testing.assert_allclose(counts, np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.03)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 10**23),
    ],
)
def test_a_setting_that_cannot_be_is_told_with_its_value(setting, value):
    with pytest.raises(ValueError, match=f"{setting}=.*: set it"):
        Sampling(**{setting: value}).validate()


# Serving.


@pytest.fixture
def server():
    engine = echo("Hello. World", 2)
    with open_server(engine, TOKENIZER, name="echo", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield SimpleNamespace(address=server.address, engine=engine)
        server.shutdown()


def post(server, value, *, path="/v1/completions"):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    request = urllib.request.Request(server.address + path, data=data)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read().decode()


def test_a_completion_is_as_openai_has_it(server):
    answer = json.loads(post(server, {"prompt": ["a", "b"], "max_tokens": 100, "stop": "."}))
    assert answer["object"] == "text_completion" and answer["model"] == "echo"
    assert [choice["text"] for choice in answer["choices"]] == ["Hello", "Hello"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    prompts, drawn, max_tokens = server.engine.asked[0]
    assert [TOKENIZER.decode(prompt) for prompt in prompts] == ["a", "b"]
    assert (drawn.temperature, max_tokens) == (1.0, 100)


def test_a_stream_comes_piece_by_piece(server):
    body = post(server, {"prompt": "a", "max_tokens": 100, "stream": True})
    assert '"finish_reason": "stop"' in body  # shorter than max_tokens
    events = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert events[-1] == "[DONE]" and len(events) > 4
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == "Hello. World"


def test_the_model_is_listed(server):
    with urllib.request.urlopen(server.address + "/v1/models", timeout=600) as answer:
        assert json.load(answer)["data"][0]["id"] == "echo"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"{", "Expecting"),
        (b"", "1 to"),
        (b"[]", "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "max_tokens": "x"}, "max_tokens='x'"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1"),
        ({"prompt": "a", "temperature": "warm"}, "warm"),
        ({"prompt": "a", "stop": [1]}, "stop"),
        ({"prompt": ["a", "b"], "stream": True}, "stream"),
    ],
)
def test_a_mistake_in_a_request_is_told_and_the_server_goes_on(server, value, message):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, value)
    assert error.value.code == 400
    assert message in json.load(error.value)["error"]["message"]
    (choice,) = json.loads(post(server, {"prompt": "a", "max_tokens": 3}))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hel", "length")


def test_another_path_is_told(server):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, {"prompt": "a"}, path="/v1/chat/completions")
    assert error.value.code == 404
    error.value.close()


def test_a_port_that_is_taken_is_told():
    with open_server(echo("", 1), TOKENIZER, name="x", port=0) as server:
        port = server.server_address[1]
        with pytest.raises(ValueError, match=f"--serve={port}: .*; choose another port"):
            open_server(echo("", 1), TOKENIZER, name="x", port=port)
