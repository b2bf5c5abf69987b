"""`transformers serve`, in this process, over a model that it is given."""

import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.libraries.prompts import PAGED, QUESTIONS, Message, talk
from tests.libraries.scenario import Answers, Session, scenario

_NAME = "smollm2"


@scenario("transformers", "transformers serve, /v1/chat/completions")
def served(session: Session) -> Answers:
    session.attach(session.model)
    with _server(session) as url:
        return talk(QUESTIONS[:4], lambda messages: _asked(url, messages))


@scenario("transformers", "transformers serve, /v1/chat/completions as a stream")
def served_as_stream(session: Session) -> Answers:
    session.attach(session.model)
    with _server(session) as url:
        return talk(QUESTIONS[:4], lambda messages: _streamed(url, messages))


@scenario("transformers", "transformers serve --continuous-batching", known=PAGED)
def served_in_batches(session: Session) -> Answers:
    session.attach(session.model)
    with _server(session, continuous_batching=True, cb_use_cuda_graph=False) as url:
        return talk(QUESTIONS[:2], lambda messages: _asked(url, messages))


@contextmanager
def _server(session: Session, **options: Any) -> Iterator[str]:
    from transformers.cli.serve import Serve
    from transformers.cli.serving.model_manager import TimedModel

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    serve = Serve(port=port, device="cpu", non_blocking=True, log_level="error", **options)
    try:
        models = serve._model_manager.loaded_models
        models[f"{_NAME}@main"] = TimedModel(session.model, 3600, processor=session.tokenizer)
        while not serve.server.started:
            time.sleep(0.05)
        yield f"http://localhost:{port}/v1/chat/completions"
    finally:
        serve.kill_server()


def _request(url: str, messages: list[Message], **options: Any) -> Any:
    body = {"model": _NAME, "messages": messages, "max_tokens": 12, "temperature": 0.0, **options}
    data = json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=120)


def _asked(url: str, messages: list[Message]) -> str:
    with _request(url, messages) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def _streamed(url: str, messages: list[Message]) -> str:
    text = ""
    with _request(url, messages, stream=True) as response:
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                text += choices[0].get("delta", {}).get("content") or ""
    return text
