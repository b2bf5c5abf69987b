"""Apps on real ports, and the clients that people use."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.server import Engine, JsonLines, ModelEngine, ServerSettings, TextLines, make_app
from tests.server.browser import CHROMIUM, DRIVER, Browser
from tests.server.fake_engine import FakeEngine, FakeTicket

SETTINGS = ServerSettings(model_name="reader", timeout_s=20)


class Listening:
    """A server under way.

    Attributes:
        url: Where.
        server: Uvicorn's.
    """

    def __init__(self, url: str, server: uvicorn.Server) -> None:
        self.url, self.server = url, server
        self.http = httpx.Client(base_url=url, timeout=20)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


@contextmanager
def listening(app: Any, drain_s: int = 5) -> Iterator[Listening]:
    """An app behind a port of this machine, until the context ends."""
    # With the protocol, or asyncio would leave Nagle's algorithm on, and each answer would take 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as port:
        port.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_config=None, log_level="critical", timeout_graceful_shutdown=drain_s)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [port]}, daemon=True)
        thread.start()
        found = Listening(f"http://127.0.0.1:{port.getsockname()[1]}", server)
        while not server.started:
            assert thread.is_alive()
        try:
            with found.http, found.openai:
                yield found
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The embedded model's, with a chat template that knows tools."""
    found = load_embedded()[1]
    tools = "<|im_start|>tools\n{{ tools | tojson }} <tool_call>{name, arguments}</tool_call><|im_end|>\n"
    found.chat_template = "{% if tools %}" + tools + "{% endif %}" + found.chat_template
    return found


@pytest.fixture(scope="session")
def _served(tokenizer: Any) -> Iterator[tuple[FakeEngine, Listening]]:
    engine = FakeEngine()
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        yield engine, at


@pytest.fixture
def engine(_served: tuple[FakeEngine, Listening]) -> FakeEngine:
    """Says a sentence, and has nothing to remember."""
    vars(_served[0]).update(vars(FakeEngine("Anna ", "plays ", "the ", "piano.")))
    return _served[0]


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Takes away the handler of the log that the command has set, which writes to the test's standard error."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in list(root.handlers):
        if isinstance(handler.formatter, JsonLines | TextLines):
            root.removeHandler(handler)
            root.setLevel(level)


Serve = Callable[..., Listening]


@pytest.fixture
def serve(tokenizer: Any) -> Iterator[Serve]:
    """Serves an engine; keywords change the settings."""
    with ExitStack() as stack:

        def start(engine: Engine, **changes: Any) -> Listening:
            return stack.enter_context(listening(make_app(engine, tokenizer, replace(SETTINGS, **changes))))

        yield start


@pytest.fixture
def endless() -> FakeEngine:
    """Says one piece, and then nothing until it is cancelled."""
    engine = FakeEngine("a", "b")

    def wait(ticket: FakeTicket, piece: int) -> None:
        if piece:
            assert ticket.cancelled.wait(20)

    engine.before = wait
    return engine


@pytest.fixture
def at(_served: tuple[FakeEngine, Listening], engine: FakeEngine) -> Listening:
    """The engine of the fixture, behind a server that all tests share."""
    return _served[1]


@pytest.fixture(scope="session")
def reading(tokenizer: Any) -> Iterator[Listening]:
    """The embedded model behind a server with the key "key", which all tests share."""
    model = load_embedded()[0]
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=16))
    settings = replace(SETTINGS, api_keys=("key",), default_max_tokens=200)
    with listening(make_app(engine, tokenizer, settings)) as at:
        yield at
    engine.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One that all tests of a file share."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("there is no chromium, or no chromedriver")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, reading: Listening) -> Browser:
    """The page of the embedded model, with the right key."""
    browser.open(reading.url)
    browser.shows("#model", "an API key is needed")
    browser.type("key", "key\n")
    browser.shows("#model", "reader")
    return browser


@pytest.fixture
def fake_page(browser: Browser, at: Listening) -> Browser:
    """The page of the engine of the fixture."""
    browser.open(at.url)
    browser.shows("#model", "reader")
    return browser
