"""Who is let in: by which name, with which key, over TLS; and what the log says of it."""

import argparse
import asyncio
import json
import logging
import socket
import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.internals.cli import add_options, add_secrets, main, model_name, server_settings
from tests.internals.server import FrontServer, Hosts, JsonLines, TlsFiles, make_app, read_keys, require_free
from tests.server.browser import CHROMIUM, DRIVER, Browser
from tests.server.conftest import SETTINGS, Serve
from tests.server.fake_engine import FakeEngine
from tests.server.wire import WAIT_S, in_a_thread, running, until
from tests.servers import free_port

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "Who?"}]
FIGURES = ("/v1/stats", "/metrics")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Names


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        (None, True),
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.:80", True),
        ("a.localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("127.8.8.8", True),
        ("[::1]:8000", True),
        ("10.1.2.3:8000", True),
        ("[::ffff:10.1.2.3]", True),
        ("10.1.2.4", False),
        ("[fe80::1]", False),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example:8000", False),
        ("user@localhost", False),
        ("localhost/", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_names_of_this_machine(host: str | None, taken: bool) -> None:
    assert Hosts(()).takes(host, "10.1.2.3") is taken
    assert Hosts(("*",)).takes(host, None)


def test_a_name_that_the_server_of_the_app_has_for_itself() -> None:
    assert Hosts(()).takes("testserver", "testserver")
    assert not Hosts(()).takes("evil.example", "testserver")


def test_names_that_the_operator_allows() -> None:
    hosts = Hosts(("Model.example.org", "*.inner"))
    for host in ("model.example.org:8000", "model.example.org.", "a.inner", "a.b.inner:1", "localhost"):
        assert hosts.takes(host, None), host
    for host in ("other.example.org", "inner", "a.inner.evil", "10.1.2.3"):
        assert not hosts.takes(host, None), host


def test_a_page_that_has_given_the_server_a_name_reads_nothing(serve: Serve, engine: FakeEngine) -> None:
    evil = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
    at = serve(engine)
    for path in ("/", "/docs", "/v1/models", "/v1/stats", "/openapi.json"):
        refused = at.http.get(path, headers=evil)
        assert (refused.status_code, refused.json()["error"]["code"]) == (421, "host_not_allowed"), path
        assert "--allowed-host" in refused.json()["error"]["message"]
    asked = at.http.post("/v1/chat/completions", headers=evil, json={"model": "reader", "messages": ASK})
    assert asked.status_code == 421
    assert not engine.tickets
    assert at.http.get("/health", headers=evil).status_code == 200  # tells nothing, and probes use any name
    assert serve(engine, allowed_hosts=("evil.example",)).http.get("/v1/models", headers=evil).status_code == 200
    with_keys = serve(engine, api_keys=("key",))
    assert with_keys.http.get("/v1/models", headers=evil | bearer("key")).status_code == 200
    narrow = serve(engine, api_keys=("key",), allowed_hosts=("model.example",))
    assert narrow.http.get("/v1/models", headers=evil | bearer("key")).status_code == 421


@pytest.mark.parametrize(
    "name", ["https://a.example", "a.example:8000", "2001:db8::1", "b\u00fccher.example", "a*", ""]
)
def test_names_that_no_request_has_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="`allowed_hosts` must be names without scheme and port"):
        replace(SETTINGS, allowed_hosts=("a.example", "*.b.example", "[2001:db8::1]", name))


# Keys


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\n  first \nsecond\n")
    file.chmod(0o600)
    assert read_keys(file) == ("first", "second")
    file.chmod(0o640)  # as containers have them
    assert read_keys(file) == ("first", "second")
    file.write_text("first\nsecond\n", encoding="utf-8-sig")  # as editors on Windows write it
    assert read_keys(file) == ("first", "second")
    for mode in (0o644, 0o604, 0o660, 0o602):
        file.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600"):
            read_keys(file)
    file.write_text("# none\n")
    file.chmod(0o600)
    with pytest.raises(ValueError, match="must hold a key"):
        read_keys(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "missing")


def test_keys_of_flags_files_and_the_environment(tmp_path: Path) -> None:
    for name in ("keys", "operators"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o600)
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(
        ["--api-key", "a", "--api-key-file", f"{tmp_path}/keys", "--operator-key-file", f"{tmp_path}/operators"]
    )
    add_secrets(options, {"KVBOOST_HF_API_KEY": "b\n", "KVBOOST_HF_OPERATOR_KEY": "c", "OTHER": "d"})
    settings = server_settings(options, "reader", None)
    assert settings.api_keys == ("a", "keys", "b")
    assert settings.operator_keys == ("operators", "c")
    for name, empty in (("API", " "), ("API", ""), ("OPERATOR", "")):  # a secret that is lost opens nothing
        options = parser.parse_args([])
        add_secrets(options, {f"KVBOOST_HF_{name}_KEY": empty})
        with pytest.raises(ValueError, match=f"`{name.lower()}_keys` must be .* not empty"):
            server_settings(options, "reader", None)
    for wrong in (" a", "a\nb", "a\0"):
        with pytest.raises(ValueError, match="printable ASCII characters, not empty, and without space around them"):
            replace(settings, api_keys=(wrong,))


def test_the_figures_of_all_are_for_the_operator(serve: Serve, engine: FakeEngine) -> None:
    alone, several = serve(engine, api_keys=("a", "a")), serve(engine, api_keys=("a", "b"))
    operated = serve(engine, api_keys=("a",), operator_keys=("operator",))
    keyless = serve(engine, operator_keys=("operator",))
    for path in FIGURES:
        assert alone.http.get(path, headers=bearer("a")).status_code == 200
        for at, headers in ((several, bearer("a")), (operated, bearer("a")), (keyless, {}), (keyless, bearer("x"))):
            refused = at.http.get(path, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
            assert "--operator-key-file" in refused.json()["error"]["message"]
        for at in (operated, keyless):
            assert at.http.get(path, headers=bearer("operator")).status_code == 200
        for way in (f"{path}?a", f"{path}/", path.upper(), path.replace("s", "%73")):
            assert several.http.get(way, headers=bearer("a")).status_code != 200


def test_the_operators_key_opens_everything_with_prompts_of_its_own(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, api_keys=("a",), operator_keys=("operator",))
    salts = set()
    for key in ("a", "operator"):
        at.openai.with_options(api_key=key).chat.completions.create(model="reader", messages=ASK)
        salts.add(engine.job.salt)
    assert len(salts) == 2
    assert b"" not in salts


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium, or no chromedriver")
def test_pages_in_a_browser(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    at = serve(engine, api_keys=("a", "b"))
    with Browser(tmp_path) as browser:
        browser.open(at.url)
        browser.type("key", "a\n")
        browser.shows("#model", "reader")
        browser.shows("#closed", "operator")
        browser.open(f"{at.url}/docs")
        browser.shows("#about", "No API key")
        browser.logged()
        browser.type("key", "b\n")
        browser.shows("#routes", "POST /v1/chat/completions")
        browser.shows("#objects", "ChatRequest")
        browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
        browser.shows("#ChatRequest", "temperature")
        width = browser.run("return document.documentElement.scrollWidth")
        browser.screenshot(tmp_path / "docs.png")
        assert width <= 1200
        assert browser.logged() == []


def test_the_page_of_routes_is_open_and_loads_nothing_else(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, api_keys=("key",))
    page, front = at.http.get("/docs"), at.http.get("/")
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == front.headers["content-security-policy"]
    assert "http" not in page.text.replace("http-equiv", "")
    assert at.http.get("/openapi.json").status_code == 401


def test_head_is_get_without_a_body(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, api_keys=("key",))
    for path in ("/", "/docs", "/health", "/ready", "/v1/models", "/v1/models/reader", *FIGURES, "/openapi.json"):
        head, get = (at.http.request(method, path, headers=bearer("key")) for method in ("HEAD", "GET"))
        assert head.status_code == get.status_code == 200, path
        assert head.content == b""
        assert head.headers["content-type"] == get.headers["content-type"]
    assert at.http.head("/v1/models").status_code == 401
    assert at.http.head("/v1/chat/completions", headers=bearer("key")).status_code == 405


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A self-signed one for localhost."""
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    more = ["-passout", "pass:word", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run([*command.split(), *more], cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl command")
    return TlsFiles(certfile=folder / "cert.pem", keyfile=folder / "key.pem", password="word")


def test_https(engine: FakeEngine, tokenizer: Any, certificate: TlsFiles) -> None:
    with running(engine, tokenizer, tls=certificate, header_timeout_s=1.0, max_connections=40) as at:
        trusting = ssl.create_default_context(cafile=certificate.certfile)
        silent = [at.open(b"\x16") for _ in range(100)]  # more than there may be: they go no further than this
        with httpx.Client(base_url=f"https://127.0.0.1:{at.port}", verify=trusting, timeout=WAIT_S) as client:
            assert client.get("/health").json() == {"status": "ok"}
            body = {"model": "reader", "messages": ASK}
            found = client.post("/v1/chat/completions", json=body).json()
            assert found["choices"][0]["message"]["content"] == "Anna plays the piano."
            with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
            large = client.post("/v1/chat/completions", content=bytes(20_000_000))
            assert large.status_code == 413
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://127.0.0.1:{at.port}/health")
        with at.open(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as plain:
            assert b"200" not in plain.recv(1000)
        server: Any = at.server
        until(lambda: not len(server.connections_of), "the silent ones were never dropped")
        for one in silent:
            one.close()


def test_clients_with_certificates(engine: FakeEngine, tokenizer: Any, certificate: TlsFiles) -> None:
    both = TlsFiles(
        certfile=certificate.certfile, keyfile=certificate.keyfile, password="word", ca_certs=certificate.certfile
    )
    with running(engine, tokenizer, tls=both) as at:
        url, trusting = f"https://localhost:{at.port}/health", ssl.create_default_context(cafile=both.certfile)
        with pytest.raises((httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.ConnectError)):
            httpx.get(url, verify=trusting)
        assert both.keyfile is not None
        trusting.load_cert_chain(both.certfile, both.keyfile, "word")
        assert httpx.get(url, verify=trusting).status_code == 200


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--ssl-keyfile {0}", "--ssl-certfile"),
        ("--ssl-certfile /nowhere/a.pem", "there is none at /nowhere/a.pem"),
        ("--ssl-certfile {0} --ssl-keyfile /nowhere/b.pem", "there is none at /nowhere/b.pem"),
        ("--ssl-certfile {0} --ssl-keyfile {1}", "password"),
        ("--ssl-certfile {1}", "certificate"),
        ("--api-key-file /nowhere/keys", "/nowhere/keys"),
        ("--max-connections 1", "max_connections"),
        ("--host 203.0.113.1", "address of this machine that is free, got 203.0.113.1 and 8000"),
    ],
)
def test_bad_flags_are_refused_before_the_model_is_loaded(
    certificate: TlsFiles, flags: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost_hf.cli.serving.load_model", lambda *_: pytest.fail("it was loaded"))
    assert main(["serve", *flags.format(certificate.certfile, certificate.keyfile).split()]) == 2
    assert says in capsys.readouterr().err


# What is told


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return dict(vars(record).get("fields", {}))


def test_a_model_is_not_called_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reader").mkdir()
    monkeypatch.chdir(tmp_path)
    for given in (str(tmp_path / "reader"), "reader", "./reader/", "reader/../reader"):
        assert model_name(given) == "reader"
    assert model_name("Qwen/Qwen2.5-3B-Instruct") == "Qwen/Qwen2.5-3B-Instruct"
    assert model_name(None) == "reader"


def test_what_is_polled_is_not_logged(serve: Serve, engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    at = serve(engine)
    with caplog.at_level(logging.INFO, "kvboost_hf.server.requests"):
        for path in ("/health", "/ready", *FIGURES, "/v1/models"):
            at.http.get(path)
        at.http.post("/health")
        until(lambda: "/health" in str([_fields(record) for record in caplog.records]), "nothing was logged")
    lines = [fields for record in caplog.records if (fields := _fields(record))]
    assert [(line["method"], line["path"]) for line in lines] == [("GET", "/v1/models"), ("POST", "/health")]


def test_no_character_of_a_client_reaches_a_terminal(
    serve: Serve, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    at = serve(engine)  # alone: a line of another test may come late
    path = "/a\x1b[2J\x9b2J\u202egnp.exe\u2028\r\n" + "b" * 5000
    with caplog.at_level(logging.INFO):
        at.http.get(path.replace("\x1b", "%1b").replace("\r\n", "%0d%0a"))
        until(lambda: any(map(_fields, caplog.records)), "nothing was logged")
        try:
            raise ValueError("\x9b2J\u202e")
        except ValueError:
            logging.getLogger("some.library").exception("\u202e")
    lines = [JsonLines().format(record) for record in caplog.records if record.name != "httpx"]
    assert len(lines) == 2
    for line in lines:
        assert line.isascii()
        assert line.isprintable()
        assert len(line) < 2000
    assert json.loads(lines[0])["path"].startswith("/a\x1b[2J\x9b2J\u202e")


def test_the_address_that_a_request_comes_to_is_one_of_the_server(engine: FakeEngine, tokenizer: Any) -> None:
    transport = httpx.ASGITransport(make_app(engine, tokenizer, SETTINGS))

    async def ask(host: str) -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://10.1.2.3") as client:
            return (await client.get("/v1/models", headers={"Host": host})).status_code

    assert [asyncio.run(ask(host)) for host in ("10.1.2.3", "10.1.2.4")] == [200, 421]


@pytest.mark.parametrize(
    ("host", "also"),
    [
        pytest.param(
            "::",
            ("127.0.0.1", "[::1]", "localhost"),
            marks=pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6"),
        ),
        ("two.test", ("127.0.0.1", "127.0.0.2")),
    ],
)
def test_all_addresses_of_a_host_are_listened_at(
    host: str, also: Sequence[str], engine: FakeEngine, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`::` has those of both families. An address that the machine lacks is left out beside others, and not alone."""
    found = socket.getaddrinfo

    def look_up(name: Any, port: Any, *how: Any, **named: Any) -> Any:
        names = {"two.test": ["192.0.2.1", *also], "gone.test": ["192.0.2.1"]}.get(name, [name])
        return [each for name in names for each in found(name, port, *how, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    told: list[str] = []
    settings = replace(SETTINGS, host=host, port=free_port())
    server = FrontServer(make_app(engine, tokenizer, settings), engine, settings, told.extend)
    with in_a_thread(server) as wire:
        for address in also:
            assert httpx.get(f"http://{address}:{wire.port}/v1/models").status_code == 200
        for one in server.servers:  # or Nagle's algorithm holds answers back
            assert one.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with pytest.raises(ValueError, match=f"is free, got {host} and {wire.port}"):
            require_free(host, wire.port)
    assert told == [f"http://{name}:{wire.port}" for name in (["[::]"] if host == "::" else also)]
    require_free(host, wire.port)
    with socket.create_server((also[-1].strip("[]"), 0)) as taken, pytest.raises(ValueError, match="is free, got"):
        require_free(host, taken.getsockname()[1])
    with pytest.raises(ValueError, match=r"is free, got gone\.test"):
        require_free("gone.test", wire.port)
