"""/v1/completions on loopback, as OpenAI's API has it: to try a checkpoint.

One request at a time, without batching across requests; for more, export the model and use vLLM.
"""

import itertools
import json
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jaxscale.data.tokenizer import Tokenizer
from jaxscale.inference.engine import Engine
from jaxscale.inference.sampling import Sampling
from jaxscale.inference.text import Continuations

HOST = "127.0.0.1"
# What a request may say, and what is meant if it does not; "stream_options" and such are ignored.
DEFAULTS: dict[str, Any] = dict(
    max_tokens=16, temperature=1.0, top_p=1.0, top_k=0, seed=0, stop=[], stream=False
)
# What changes an answer and is not here: said, rather than left out in silence.
ONLY: dict[str, Any] = dict(n=1, best_of=1, echo=False, logprobs=None, suffix=None)
MOST_BYTES = 10_000_000


class Server(ThreadingHTTPServer):
    """Answers POST /v1/completions and GET /v1/models."""

    daemon_threads = True

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, name: str, port: int):
        """port: 0 takes a free one. Raises OSError for one that is taken."""
        super().__init__((HOST, port), Handler)
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.one_at_a_time = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}"


def open_server(engine: Engine, tokenizer: Tokenizer, *, name: str, port: int) -> Server:
    """Raises ValueError for a port that cannot be had; `serve_forever` answers."""
    try:
        return Server(engine, tokenizer, name=name, port=port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--serve={port}: {error}; choose another port") from None


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            model = {"id": self.server.name, "object": "model", "owned_by": "jaxscale"}
            self._answer(200, {"object": "list", "data": [model]})
        else:
            self._refuse(404, f"{self.path} is not here; there are /v1/models, /v1/completions")

    def do_POST(self) -> None:
        if self.path != "/v1/completions":
            self._refuse(404, f"{self.path} is not here; there is /v1/completions")
            return
        try:
            request = self._read()
            with self.server.one_at_a_time:
                self._complete(request)
        except ValueError as error:
            self._refuse(400, str(error))
        except ConnectionError:  # nobody listens any more
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the user's."""

    def _read(self) -> dict[str, Any]:
        """The request, checked. Raises ValueError."""
        length = self.headers.get("Content-Length") or "0"
        if not (length.isdecimal() and 0 < int(length) <= MOST_BYTES):
            raise ValueError(f"a request has 1 to {MOST_BYTES} bytes, and this one {length}")
        try:
            sent = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the request is not JSON: {error}") from None
        if not isinstance(sent, dict) or "prompt" not in sent:
            raise ValueError('write {"prompt": "..."}')
        for key, only in ONLY.items():
            if (value := sent.get(key)) not in (None, only):
                raise ValueError(f"{key}={value!r}: this server has {only!r} alone; leave it out")
        given = {key: sent[key] for key in DEFAULTS if sent.get(key) is not None}
        request = DEFAULTS | given
        prompts = sent["prompt"] if isinstance(sent["prompt"], list) else [sent["prompt"]]
        if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("prompt: write a string, or a list of strings")
        stop = [request["stop"]] if isinstance(request["stop"], str) else request["stop"]
        if not (isinstance(stop, list) and all(isinstance(words, str) for words in stop)):
            raise ValueError("stop: write a string, or a list of strings")
        for key in ("max_tokens", "top_k", "seed"):
            if type(request[key]) is not int:
                raise ValueError(f"{key}={request[key]!r}: write a whole number")
        for key in ("temperature", "top_p"):
            if type(request[key]) not in (int, float):
                raise ValueError(f"{key}={request[key]!r}: write a number")
        if request["stream"] and len(prompts) > 1:
            raise ValueError("stream: of one prompt only")
        return request | {"prompts": prompts, "stop": stop}

    def _complete(self, request: dict[str, Any]) -> None:
        sampling = Sampling(
            temperature=float(request["temperature"]),
            top_k=request["top_k"],
            top_p=float(request["top_p"]),
            seed=request["seed"],
        )
        texts = Continuations(
            self.server.engine,
            self.server.tokenizer,
            request["prompts"],
            sampling=sampling,
            max_tokens=request["max_tokens"],
            stop=request["stop"],
        )
        # The first piece is made before anything is answered: what is refused is refused by then.
        pieces = iter(texts)
        pieces = itertools.chain([next(pieces)], pieces)
        if request["stream"]:
            self._stream(pieces, texts)
            return
        whole = ["".join(column) for column in zip(*pieces, strict=True)]
        choices = [
            _choice(text, index=i, reason=reason)
            for i, (text, reason) in enumerate(zip(whole, texts.reasons, strict=True))
        ]
        self._answer(200, self._completion(choices))

    def _stream(self, pieces: Iterator[list[str]], texts: Continuations) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for piece in pieces:
            if piece[0]:
                self._send_event(self._completion([_choice(piece[0], index=0, reason=None)]))
        self._send_event(self._completion([_choice("", index=0, reason=texts.reasons[0])]))
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _completion(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.server.name,
            "choices": choices,
        }

    def _answer(self, code: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, code: int, message: str) -> None:
        self._answer(code, {"error": {"message": message, "type": "invalid_request_error"}})


def _choice(text: str, *, index: int, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": reason}
