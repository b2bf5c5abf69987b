"""What a server says while it starts, to a terminal and to the log."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvboost_hf import DraftTreeConfig, lookup_assistant
from kvboost_hf.assets import load_embedded
from tests.heads import make_pair
from tests.internals.engine import EngineSettings
from tests.internals.server import (
    Chosen,
    InTiers,
    JsonLines,
    ModelEngine,
    ServerSettings,
    Startup,
    TextLines,
    WarmRequest,
    _kind_of_drafts,
    _warm,
    serve,
    start_engine,
    write_log,
)

pytestmark = pytest.mark.daily

TEXT = "The lamp is red. It stands in the hall. " * 20


@contextmanager
def started(kept: EngineSettings, **settings: Any) -> Iterator[tuple[ModelEngine, ServerSettings]]:
    """The embedded model behind an engine."""
    model, tokenizer = load_embedded()
    found = ServerSettings(model_name="reader", **settings)
    engine = start_engine(model, tokenizer, found, kept)
    try:
        yield engine, found
    finally:
        engine.close()
        engine.store.close()


def chosen(engine: ModelEngine, settings: ServerSettings, kept: EngineSettings) -> Chosen:
    """What a server with this engine says of itself."""
    return Chosen.of(
        engine,
        settings,
        kept,
        attention_reason="so",
        in_tiers=InTiers.of(engine.model, engine.store, None, [b""]),
        drafts=None,
    )


def test_what_was_chosen(tmp_path: Path) -> None:
    kept = EngineSettings(chunk_size=16, disk_cache_dir=tmp_path, max_cache_bytes="1GiB")
    with started(kept, max_live_tokens=5000) as (engine, settings):
        first = chosen(engine, settings, kept)
        _warm(engine, engine.tokenizer.encode(TEXT), [b""])
        engine.store.flush()
        again = chosen(engine, settings, kept)
        held = engine.store.stats()["tiers"]["disk"]["chunks"]
    assert (first.model, first.model_class, first.dtype, first.device) == (
        "reader",
        "LlamaForCausalLM",
        "float32",
        "cpu",
    )
    assert (first.max_live_tokens, first.store_bytes, first.codec) == (5000, 2**30, "raw")
    assert (first.tier_chunks, first.found_tokens) == (0, 0)
    assert again.found_chunks == again.tier_chunks == held > 0
    assert again.found_tokens > 100
    assert first.fingerprint == again.fingerprint is not None
    page = again.page("http://127.0.0.1:1")
    for line in (
        "serves reader",
        "LlamaForCausalLM, 976K parameters, float32, on cpu",
        "1.0 GiB of host memory",
        f"{held} of {held} chunks are found",
        "5,000 tokens of K/V",
        str(tmp_path),
        "none: everybody who reaches the address may ask",
        "curl http://127.0.0.1:1/v1/chat/completions -H 'Content-Type",
    ):
        assert line in page


def test_each_line_of_the_page_follows_from_what_was_chosen() -> None:
    kept = EngineSettings(chunk_size=16)
    with started(kept, max_live_tokens=5000) as (engine, settings):
        usual = chosen(engine, settings, kept)
    disk = {"disk": {"location": "/kv", "bytes": 1536}}
    cases: list[tuple[dict[str, Any], str, bool]] = [
        ({"max_model_len": 4999}, "as many as memory has room for", False),
        ({"max_model_len": 5000}, "of a prompt and its answer, as many as memory has room for", True),
        ({}, "wait; memory is not planned", False),
        ({"max_live_tokens": None}, "wait; memory is not planned", True),
        ({"live_bytes": 3 * 2**20}, "5,000 tokens of K/V (3 MiB) in all", True),
        ({"live_bytes": None}, "5,000 tokens of K/V in all", True),
        ({"codec": "raw", "store_tokens": 7000}, "of host memory, for 7,000 tokens; gone after a restart", True),
        ({"codec": "raw", "store_tokens": None}, "of host memory, codec raw; gone", True),
        ({"codec": "int8", "store_tokens": 7000}, "of host memory, codec int8; gone", True),
        ({}, "in tiers ", False),
        ({"tiers": disk}, "disk       /kv (1.5 KiB held)", True),
        ({"tiers": disk}, "gone after a restart", False),
        ({"tiers": disk, "tier_chunks": 9999}, "0 of 9,999 chunks are found, 0 tokens\n", True),
        ({"tiers": disk, "tier_chunks": 10000}, "0 of the first 10,000 chunks are found", True),
        ({"tiers": disk, "fingerprint": "abc"}, "0 tokens, by the fingerprint abc\n", True),
        ({"parameters": 999}, ", 999 parameters", True),
        ({"parameters": 1000}, ", 1K parameters", True),
        ({"parameters": 2 * 10**9}, ", 2B parameters", True),
        ({"store_bytes": 1023}, "1023 B of host memory", True),
        ({"store_bytes": 1024}, "1 KiB of host memory", True),
        ({"store_bytes": 2**30}, "1.0 GiB of host memory", True),
        ({"chats": False}, "/v1/completions", True),
        ({"chats": True}, "/v1/chat/completions", True),
        ({"drafts": "chain"}, "drafts     chain", True),
    ]
    for changes, says, is_said in cases:
        page = Chosen(**{**vars(usual), **changes}).page("http://a:1")
        assert (says in page) == is_said, (changes, says, page)


class Served(Startup):
    """Once the server listens, a client asks, and the server is told to end."""

    def __init__(self, ends: str) -> None:
        super().__init__(terminal=False)
        self.number, self.statuses = signal.Signals[ends], list[int]()

    def ended(self, chosen: Chosen, urls: Any) -> None:
        """Called by the server, which answers once this has returned."""
        super().ended(chosen, urls)
        self.drafts = chosen.drafts
        threading.Thread(target=self._ask, args=(urls[0],)).start()

    def _ask(self, url: str) -> None:
        try:
            ask = {"model": "reader", "prompt": TEXT, "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/completions", json=ask, headers={"Authorization": "Bearer key"})
            self.statuses.append(answer.status_code)
            self.cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        finally:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def signals() -> Iterator[None]:
    """Signals are handled as before the test, a terminal's end as it is by default."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no terminals that end")
@pytest.mark.parametrize("ends", ["SIGINT", "SIGHUP"])
def test_it_serves_until_a_signal(ends: str, tmp_path: Path, caplog: Any, signals: None) -> None:
    """The end of a terminal is answered as SIGTERM. Only the second case has what is traced, warmed and warned of."""
    tracers: Any = pytest.importorskip("opentelemetry.trace").NoOpTracerProvider()
    ended = list[bool]()
    tracers.shutdown = lambda: ended.append(True)
    (model, tokenizer), whole = load_embedded(), ends == "SIGHUP"
    kept, startup = EngineSettings(chunk_size=16, disk_cache_dir=tmp_path), Served(ends)
    if whole:
        with started(kept) as (engine, _):
            _warm(engine, tokenizer.encode(TEXT), [b"others"])
        tokenizer.chat_template = "Chat: {% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    settings = ServerSettings(model_name="reader", port=0, api_keys=("key",))
    chat = WarmRequest.model_validate({"messages": [{"role": "user", "content": TEXT}]})
    with caplog.at_level(logging.INFO, "kvboost_hf.server"), pytest.raises(SystemExit):
        serve(
            model,
            tokenizer,
            settings,
            kept,
            draft=lookup_assistant(model),
            warm=[TEXT] if whole else (),
            warm_chats=[chat] if whole else (),
            startup=startup,
            tracer_provider=tracers if whole else None,
        )
    assert (startup.statuses, startup.drafts) == ([200], "text that repeats")
    assert (startup.cached > 100) == whole
    assert ended == [True] * whole
    said = [record.getMessage() for record in caplog.records if record.name == "kvboost_hf.server"]
    lines = (
        "warming 444 tokens",
        "The tiers hold ",
        "Requests with tools are ",
        "warm start 1 of 2: no chat begins with",
    )
    for what in lines:
        assert sum(line.startswith(what) for line in said) == whole, (what, said)


def test_which_drafts_there_are(tmp_path: Path) -> None:
    model, _ = load_embedded()
    assert _kind_of_drafts(None, None) is None
    assert _kind_of_drafts(lookup_assistant(model), None) == "text that repeats"
    assert _kind_of_drafts(model, None) == "auto"
    assert _kind_of_drafts(model, DraftTreeConfig(policy="chain")) == "chain"
    heads = make_pair("blocks", tmp_path).heads
    assert _kind_of_drafts(heads, None) == type(heads).__name__


def test_k_v_of_another_salt_is_held_and_not_found(tmp_path: Path) -> None:
    kept = EngineSettings(chunk_size=16, disk_cache_dir=tmp_path)
    with started(kept) as (engine, settings):
        _warm(engine, engine.tokenizer.encode(TEXT), [b"another"])
        engine.store.flush()
        found = chosen(engine, settings, kept)
    assert found.tier_chunks > found.found_chunks == 0


def test_keys_are_counted_and_not_shown() -> None:
    kept = EngineSettings(recompute_strategy="query")
    with started(kept, api_keys=("secret-a", "secret-b")) as (engine, settings):
        found = chosen(engine, settings, kept)
    page = found.page("https://127.0.0.1:1")
    assert found.api_keys == 2
    assert "secret" not in page + str(found)
    assert 'Bearer $KEY"' in page
    assert "query: K/V moves" in page


@pytest.mark.parametrize(
    ("url", "says"),
    [("http://0.0.0.0:80", "http://127.0.0.1:80/v1"), ("https://[::]:80", "https://127.0.0.1:80/v1")],
)
def test_an_address_that_nobody_can_call_is_replaced(
    url: str, says: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    kept = EngineSettings()
    with started(kept) as (engine, settings), caplog.at_level(logging.INFO, "kvboost_hf.server"):
        Startup(terminal=True).ended(chosen(engine, settings, kept), [url])
    assert f"curl {says}" in capsys.readouterr().err


def test_stages_on_a_terminal(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvboost_hf.server"):
        with Startup(terminal=True).stage("loading it"):
            pass
        told = capsys.readouterr()
        assert told.err.startswith("Loading it …\n  took 0.")
        assert not told.out
        with Startup(terminal=True).progress(100) as advance:
            advance(40)
        assert "0.00/100 [" in capsys.readouterr().err
        assert not caplog.records
    with caplog.at_level(logging.WARNING, "kvboost_hf.server"), Startup(terminal=True).stage("loading it"):
        pass
    assert not capsys.readouterr().err


def test_stages_in_the_log(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvboost_hf.server"), Startup(terminal=False).stage("loading it"):
        pass
    assert caplog.records[0].__dict__["fields"]["stage"] == "loading it"
    assert not capsys.readouterr().err


def test_a_long_stage_is_logged_meanwhile(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_hf.outputs._FIRST_LINE_S", 0.002)
    monkeypatch.setattr("kvboost_hf.outputs._LINE_EVERY_S", 0.002)
    startup = Startup(terminal=False)
    with caplog.at_level(logging.INFO, "kvboost_hf.server"):
        with startup.stage("warming"), startup.progress(100) as advance:
            advance(30)
            advance(10)
            deadline = time.monotonic() + 20
            while not any(message.startswith("warming tokens: 40 of 100 (") for message in caplog.messages):
                assert time.monotonic() < deadline
                time.sleep(0.005)
        assert caplog.messages[-1].startswith("warming took")
    with caplog.at_level(logging.WARNING, "kvboost_hf.server"):
        caplog.clear()
        with startup.stage("warming"):
            time.sleep(0.02)
    assert not caplog.records


def test_warming_shows_all_tokens() -> None:
    shown: list[int] = []
    with started(EngineSettings(chunk_size=16), prefill_chunk_size=16) as (engine, _):
        ids = engine.tokenizer.encode(TEXT)
        _warm(engine, ids, [b"a", b"b"], shown.append)
    assert sum(shown) == 2 * len(ids)


def test_lines_for_a_person_obey_no_client() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "request %s", ("\x1b[2J",), None)
    record.__dict__["fields"] = {"path": "/a\x1b[2J", "status": 200}
    line = TextLines().format(record)
    assert line.isprintable()
    assert line.count("\\x1b[2J") == 2
    assert "status=200" in line


@pytest.mark.parametrize(("level", "uvicorn"), [("debug", logging.DEBUG), ("info", logging.WARNING)])
def test_who_writes_to_the_log(level: str, uvicorn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of JSON where no person reads them; what uvicorn says only if all is wanted."""
    root, error = logging.getLogger(), logging.getLogger("uvicorn.error")
    before = root.handlers[:], root.level, error.level
    monkeypatch.setattr("kvboost_hf.server.startup.transformers_logging.disable_progress_bar", lambda: None)
    try:
        root.handlers = []
        write_log(level)
        assert (root.level, error.level) == (getattr(logging, level.upper()), uvicorn)
        assert [type(handler.formatter) for handler in root.handlers] == [JsonLines]
    finally:
        root.handlers, root.level = before[:2]
        error.setLevel(before[2])
