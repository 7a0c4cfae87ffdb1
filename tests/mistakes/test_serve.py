"""Requests to `generate.py --serve` that cannot be answered: 400, with the key and the fix."""

import contextlib
import http.client
import json
import threading

import pytest

from jaxscale.config import Dtype
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.inference.engine import Engine
from jaxscale.inference.serve import open_server
from jaxscale.inference.weights import open_weights

WHOLE, NUMBER, TEXTS = "write a whole number", "write a number", "write a string, or a list of"
PROMPT = 'write {"prompt": "..."}'
# Bodies as they are sent -> what the answer says.
BODIES = {
    "": "a request has 1 to 10000000 bytes, and this one 0",
    "{": "the request is not JSON",
    "\udcff": "the request is not JSON",
    "[" * 100_000: "the request is not JSON",
    "[]": PROMPT,
    "{}": PROMPT,
    '{"messages": []}': PROMPT,
    '{"prompt": null}': f"prompt: {TEXTS}",
    '{"prompt": 3}': f"prompt: {TEXTS}",
    '{"prompt": []}': f"prompt: {TEXTS}",
    '{"prompt": [1, 2]}': f"prompt: {TEXTS}",
    '{"prompt": ""}': "prompt 1 holds no token; write something",
    '{"prompt": ["a", ""]}': "prompt 2 holds no token",
    '{"prompt": ["a", "b"], "stream": true}': "stream: of one prompt only",
}
# What stands beside a prompt -> what the answer says.
KEYS = {
    '"max_tokens": "x"': f"max_tokens='x': {WHOLE}",
    '"max_tokens": 2.5': f"max_tokens=2.5: {WHOLE}",
    '"max_tokens": true': f"max_tokens=True: {WHOLE}",
    '"max_tokens": 0': "max_tokens=0: set it to 1 or more",
    '"max_tokens": -1': "max_tokens=-1: set it to 1 or more",
    '"max_tokens": 5000': "max_tokens=5000 more it is longer than the 4096",
    '"max_tokens": 99999999999': "max_tokens=99999999999: set it to 1073741824 or less",
    '"temperature": "hot"': f"temperature='hot': {NUMBER}",
    '"temperature": "0.5"': f"temperature='0.5': {NUMBER}",
    '"temperature": [1]': f"temperature=[1]: {NUMBER}",
    '"temperature": true': f"temperature=True: {NUMBER}",
    '"temperature": -1': "temperature=-1.0: set it to 0 or more",
    '"temperature": 1e400': "temperature=inf: set it to 0 or more",
    '"top_p": "x"': f"top_p='x': {NUMBER}",
    '"top_p": 0': "top_p=0.0: set it above 0",
    '"top_p": 2': "top_p=2.0: set it above 0 and up to 1",
    '"top_k": "x"': f"top_k='x': {WHOLE}",
    '"top_k": -1': "top_k=-1: set it to 1 or more",
    '"seed": 1.5': f"seed=1.5: {WHOLE}",
    '"seed": -1': "seed=-1: set it between 0 and",
    '"stop": 3': f"stop: {TEXTS}",
    '"stop": [3]': f"stop: {TEXTS}",
    '"stop": {}': f"stop: {TEXTS}",
    '"n": 3': "n=3: this server has 1 alone; leave it out",
    '"best_of": 2': "best_of=2: this server has 1 alone",
    '"echo": true': "echo=True: this server has False alone",
    '"logprobs": 5': "logprobs=5: this server has None alone",
    '"suffix": "x"': "suffix='x': this server has None alone",
}
TABLES = (BODIES, KEYS)


@pytest.fixture(scope="module")
def server(hf):
    engine = Engine(open_weights(workdir=None, hf=str(hf)), dtype=Dtype.FLOAT32)
    with open_server(engine, ByteTokenizer(), name="hf", port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def answer(server, body, *, path="/v1/completions", **headers):
    """The HTTP status, and the message."""
    host, port = server.server_address
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=60)) as connection:
        connection.request("POST", path, body.encode(errors="surrogateescape"), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())["error"]["message"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:40])
def test_a_request_that_is_none_is_refused(server, body):
    status, message = answer(server, body)
    assert status == 400 and BODIES[body] in message, message


@pytest.mark.parametrize("key", KEYS)
def test_a_request_with_a_value_that_cannot_be_is_refused_with_its_key(server, key):
    status, message = answer(server, f'{{"prompt": "a", {key}}}')
    assert status == 400 and KEYS[key] in message, message


def test_a_request_elsewhere_or_of_no_length_is_refused(server):
    status, message = answer(server, "{}", path="/v1/chat/completions")
    assert status == 404 and "/v1/chat/completions is not here; there is" in message
    status, message = answer(server, "{}", **{"Content-Length": "long"})
    assert status == 400 and "and this one long" in message
