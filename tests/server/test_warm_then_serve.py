"""`kvboost-hf warm`, and then a server that has the same flags: it finds what was warmed, or says why not."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server_process import serving
from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker
from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from tests.forged import Forged, change_all
from tests.internals.cache import ChatTemplate, ComputePace, fingerprint, history
from tests.internals.cli import _chats, add_secrets, command_line, engine_settings, main, server_settings
from tests.internals.engine import EngineSettings
from tests.internals.server import (
    Finished,
    InTiers,
    Job,
    ModelEngine,
    SamplingOptions,
    ServerSettings,
    make_app,
    prompt_salt,
    start_engine,
    unfound,
)
from tests.server.conftest import SETTINGS, listening
from tests.server.fake_engine import FakeEngine
from tests.server.test_worker import Told

TEXT = "Anna lives in Oslo. She plays the piano. The lamp is red. It costs ten coins. " * 12


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model for which any loading pays."""
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)
    for name in ("KVBOOST_HF_API_KEY", "KVBOOST_HF_OPERATOR_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "handbook.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


@contextmanager
def served(flags: list[str]) -> Iterator[tuple[ModelEngine, ServerSettings, EngineSettings]]:
    """What a server with these flags runs on."""
    options: argparse.Namespace = command_line().parse_args(["serve", "--device", "cpu", "--dtype", "float32", *flags])
    add_secrets(options, os.environ)
    kept, settings = engine_settings(options), server_settings(options, "reader", None)
    model, tokenizer = load_embedded()
    engine = start_engine(model.float(), tokenizer, settings, kept, attn_implementation=options.attn_implementation)
    try:
        yield engine, settings, kept
    finally:
        engine.close()
        engine.store.close()


def start(flags: list[str]) -> tuple[Finished, str | None]:
    """A server with these flags is asked: how that ended, and what it says of what it has found."""
    with served(flags) as (engine, settings, kept):
        keys = settings.api_keys or (None,)
        said = unfound(engine.model, engine.store, kept.live_config, [prompt_salt(settings.salt, key) for key in keys])
        told = Told()
        salt = prompt_salt(settings.salt, keys[0])
        ids = engine.tokenizer(TEXT + "Who?")["input_ids"]
        engine.submit(Job(ids=ids, options=SamplingOptions(max_tokens=1), salt=salt), told)
        return told.end, said


def without_made_with(data: bytes) -> bytes:
    """A blob as earlier releases have written it."""
    blob = Forged(data)
    del blob.entry["made_with"]
    return blob.joined()


def warm(file: str, flags: list[str]) -> None:
    assert main(["warm", file, "--device", "cpu", "--dtype", "float32", *flags]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--attn-implementation sdpa",
        "--codec turboquant:3.5 --salt me",
        "--kv-cache-bits 8 --api-key one --api-key two",
        "--live-quant 4 --chunk-size 64 --chunk-boundary-window 0",
        "--api-key one --salt me",
    ],
)
def test_what_is_warmed_is_found(flags: str, file: str, tmp_path: Path) -> None:
    given = [*flags.split(), "--disk-cache-dir", str(tmp_path / "tier")]
    warm(file, given)
    end, said = start(given)
    assert end.error is None
    assert end.tiers["disk"] > 0.9 * end.prompt_tokens
    assert said is None


def test_a_model_is_found_under_another_path(file: str, tmp_path: Path) -> None:
    tier = ["--disk-cache-dir", str(tmp_path / "tier")]
    warm(file, ["--model", os.path.relpath(EMBEDDED_MODEL_DIR), *tier])
    end, said = start(tier)
    assert end.tiers["disk"] > 0.9 * end.prompt_tokens
    assert said is None


@pytest.mark.parametrize("earlier", [False, True], ids=["told", "guessed"])
@pytest.mark.parametrize(
    ("warmed", "served", "says"),
    [
        ("--attn-implementation sdpa", "", ["`--attn-implementation sdpa`. Serve", "implementation kvboost_fa2`."]),
        ("", "--attn-implementation sdpa --codec int8", ["kvboost_fa2 --codec raw`. Serve", "sdpa --codec int8`."]),
        ("--live-quant 4", "", ["`--live-quant turboquant`. Serve", "with no --live-quant"]),
        ("", "--api-key one", ["with no --api-key or --salt. Serve", "with the --api-key"]),
        ("--api-key one", "", ["a `cache_salt`", "an API key or a `--salt` that it does not have"]),
        ("--chunk-size 64 --chunk-boundary-window 0", "", ["cut after 64 tokens", "--chunk-boundary-window"]),
        ("--dtype float16", "", ["another `--dtype`"]),
    ],
)
def test_what_cannot_be_found_is_told(
    warmed: str, served: str, says: list[str], earlier: bool, file: str, tmp_path: Path
) -> None:
    """Chunks that an earlier release has stored do not tell what they were made with."""
    tier = ["--disk-cache-dir", str(tmp_path / "tier")]
    warm(file, [*warmed.split(), *tier])
    if earlier:
        change_all(tmp_path / "tier", without_made_with)
    end, said = start([*served.split(), *tier])
    assert end.cached_tokens < 0.5 * end.prompt_tokens
    assert said is not None
    assert all(part in said for part in says), said


def test_other_versions_are_told(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = ["--disk-cache-dir", str(tmp_path / "tier")]
    with monkeypatch.context() as patch:
        patch.setattr(history, "versions", lambda: "torch 1.0\n`rm`, transformers 2.0")
        patch.setattr(fingerprint, "library_versions", lambda: ("1.0", "2.0"))
        warm(file, tier)
    _, said = start(tier)
    assert said is not None
    assert "they were stored with torch 1.0??rm?, transformers 2.0; this server has torch " in said


def test_what_several_have_stored_is_told_apart(file: str, tmp_path: Path) -> None:
    tier = ["--disk-cache-dir", str(tmp_path / "tier")]
    Path(file).write_text("Of all lamps, and of those who live here.\n\n" + TEXT, encoding="utf-8")
    for flags in ("--chunk-size 64", "--salt a --chunk-size 64", "--codec int8"):
        warm(file, [*flags.split(), *tier])
    _, said = start(tier)
    assert said is not None
    chunks = {where: int(count) for count, where in re.findall(r"(\d+) (chunks of this model|of them were)", said)}
    assert 0 < chunks["of them were"] < chunks["chunks of this model"]
    with served(tier) as (engine, settings, _):
        held = InTiers.of(engine.model, engine.store, None, [prompt_salt(settings.salt, None)])
    assert held is not None
    assert held.found
    assert chunks["chunks of this model"] == len(held.own) - len(held.found)
    assert "with `--codec int8`. Serve" in said
    assert re.search(r"of this model that were cut after \d+ tokens", said)  # their first chunks end at the same place


def test_a_system_message_is_found_by_chats(file: str, tmp_path: Path) -> None:
    flags = ["--disk-cache-dir", str(tmp_path / "tier")]
    warm(file, ["--system", *flags])
    with served(flags) as (engine, settings, _), listening(make_app(engine, engine.tokenizer, settings)) as at:
        chat = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Where does Anna live?"}]
        answer = at.openai.chat.completions.create(model="reader", messages=chat, max_tokens=1)  # type: ignore[arg-type]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= len(engine.tokenizer.encode(TEXT))
    assert main(["warm", file, "--system", "--documents", *flags]) == 2


def test_messages_and_tools_are_found_by_chats(tmp_path: Path, tokenizer: Any) -> None:
    """Whichever way keys are ordered: what a file has is read as a request is."""
    flags, chat = ["--disk-cache-dir", str(tmp_path / "tier")], tmp_path / "chat.json"
    tools = [{"function": {"parameters": {"type": "object"}, "name": "look"}, "type": "function"}]
    messages = [{"role": "developer", "content": [{"type": "text", "text": TEXT}]}]
    chat.write_text(json.dumps({"messages": messages, "tools": tools}))
    warm(str(chat), ["--chat", *flags])
    ask = [*messages, {"role": "user", "content": "Where does Anna live?"}]
    with served(flags) as (engine, settings, _), listening(make_app(engine, engine.tokenizer, settings)) as at:
        body = {"messages": ask, "max_tokens": 1}
        usage = at.http.post("/v1/chat/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= len(engine.tokenizer.encode(TEXT))
    # The embedded model's template has no place for tools; with one, both ends write them alike.
    [arguments] = _chats(argparse.Namespace(system=False, chat=True, files=[chat]), [])
    start = ChatTemplate(tokenizer, tools=arguments["tools"]).start(arguments["text_or_ids"]).ids.tolist()
    fake = FakeEngine("Anna.")
    with listening(make_app(fake, tokenizer, SETTINGS)) as at:
        at.http.post("/v1/chat/completions", json=body | {"tools": tools})
        asked = fake.job.ids
        warmed = at.http.post("/v1/warm", json={"messages": messages, "tools": tools}).json()
    assert asked[: len(start)] == start == fake.job.ids
    assert len(start) > len(tokenizer.encode(TEXT)) + len(tokenizer.encode(json.dumps(tools)))
    assert (warmed["start_reason"], warmed["prompt_tokens"]) == (None, len(start))


@pytest.mark.daily
@pytest.mark.parametrize("given", ["[]", "{", '{"texts": ["a"]}', '[{"role": "chief", "content": "a"}]', '"a"'])
def test_a_file_without_messages_is_refused(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (chat := tmp_path / "chat.json").write_text(given)
    for command in (["warm", str(chat), "--chat", "--tiers", f"disk:{tmp_path}"], ["serve", "--warm-chat", str(chat)]):
        assert main(command) == 2
        assert f"{chat} must be JSON with the first messages of chats" in capsys.readouterr().err


def test_a_text_that_no_chat_finds_is_told(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warm(file, ["--disk-cache-dir", str(tmp_path / "tier")])
    assert "With `--system`, a file is the system message of chats" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["", "--attn-implementation sdpa --chunk-boundary-window 0"])
def test_a_program_finds_it_with_the_same_attention_and_cuts(flags: str, file: str, tmp_path: Path) -> None:
    """By default a program has other ones than a server: the second flags are for it."""
    tiers = [f"disk:{tmp_path / 'tier'}"]
    warm(file, [*flags.split(), "--tiers", *tiers])
    model, tokenizer = load_embedded()
    if not flags:
        model.set_attn_implementation("kvboost_fa2")
    chunker = None if flags else ContentChunker.for_tokenizer(tokenizer)
    with ChunkStore(model, chunker=chunker, tiers=tiers) as store:
        cache = ChunkReuseCache(model, store)
        model.generate(**tokenizer(TEXT + "Who?", return_tensors="pt"), cache=cache, max_new_tokens=1)
        assert cache.report.reuse_ratio > 0.9
    model.set_attn_implementation("sdpa")


def test_the_two_commands_have_the_same_flags_and_defaults() -> None:
    parser = command_line()
    warming, serving = (vars(parser.parse_args(given)) for given in (["warm", "x", "--tiers", "disk:x"], ["serve"]))
    alike = {name for name in warming if name in serving} - {"run", "parser", "tiers"}
    assert {"attn_implementation", "codec", "live_quant", "salt", "api_key", "chunk_size", "disk_cache_dir"} <= alike
    assert {name: warming[name] for name in alike} == {name: serving[name] for name in alike}


STARTED = (
    "from tests.internals.cache import ComputePace; ComputePace.seconds_per_token = lambda self, model: 1.0; "
    "from kvboost_hf.cli import serve; raise SystemExit(serve())"
)


@pytest.mark.slow
@pytest.mark.parametrize("handed_over", [True, False])
def test_a_server_that_is_started_again_has_what_it_held(tmp_path: Path, handed_over: bool) -> None:
    """As `systemctl restart` does it; any loading pays, however small the model is."""
    tiers = ["--tiers", f"handover:{tmp_path / 'kv'}:1GB"] if handed_over else []
    body = {"model": "reader", "prompt": "Anna lives in Oslo. She plays the piano. " * 8, "max_tokens": 1}
    found: list[int] = []
    command = [sys.executable, "-c", STARTED, "--chunk-size", "16", "--model-name", "reader", *tiers]
    for _ in range(2):
        with serving(command, environment={"TMPDIR": str(tmp_path)}) as at:
            for _ in range(2):
                told = httpx.post(f"http://127.0.0.1:{at.port}/v1/completions", json=body, timeout=60)
                found.append(told.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found[0] == 0
    assert found[1] > 60
    assert found[2] == (found[1] if handed_over else 0)
