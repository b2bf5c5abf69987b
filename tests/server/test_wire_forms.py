"""Forms of requests that clients send by mistake or by habit: paths, methods, content types and encodings."""

import asyncio
import gzip
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from tests.internals.server import Grammars, Unpacked, regex
from tests.server.conftest import SETTINGS, Listening, Serve
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

CHAT = {"model": "reader", "messages": [{"role": "user", "content": "Wo ist Änne?"}]}
RAW = json.dumps(CHAT, ensure_ascii=False)
PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def packed(text: str | bytes, wbits: int) -> bytes:
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(text.encode() if isinstance(text, str) else text) + packer.flush()


# Content types


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"]
)
@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/warm", "/api/chat"])
def test_pages_of_others_must_say_json(serve: Serve, engine: FakeEngine, kind: str | None, path: str) -> None:
    """A browser asks before it sends JSON, and sends these without asking."""
    at = serve(engine)
    headers = {"origin": "https://a.example"} | ({} if kind is None else {"content-type": kind})
    answer = at.http.post(path, content=RAW.encode(), headers=headers)
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.text
    assert not engine.tickets


def test_requests_that_browsers_ask_about_need_no_type(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, cors_origins=("https://a.example",))
    for method in ("GET", "DELETE"):
        answer = at.http.request(method, "/v1/kv/sessions/a", headers={"origin": "https://a.example"})
        assert answer.status_code == 404
    assert at.http.get("/v1/models", headers={"content-encoding": "br"}).status_code == 200


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_what_is_no_json_names_the_header(at: Listening, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    message = at.http.post(PATH, content=b"model=reader", headers=headers).json()["error"]["message"]
    assert "must be JSON" in message
    assert "Content-Type" in message
    assert "Content-Type: application/json" in message
    assert "Content-Type" not in at.http.post(PATH, content=b"model", headers=JSON).json()["error"]["message"]


@pytest.mark.parametrize("headers", [{}, JSON])
def test_an_empty_body_is_named(at: Listening, headers: dict[str, str]) -> None:
    answer = at.http.post(PATH, content=b"", headers=headers)
    assert answer.status_code == 400
    assert "empty" in answer.json()["error"]["message"]


# Encodings


@pytest.mark.parametrize("encoding", ["latin-1", "utf-7"])
def test_other_encodings_are_named(at: Listening, encoding: str) -> None:
    answer = at.http.post(PATH, content=RAW.encode(encoding), headers=JSON)
    if answer.status_code != 200:  # UTF-7 is JSON, of other texts
        assert "UTF-8" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("gzip", gzip.compress(RAW.encode(), mtime=0)),
        ("x-gzip", gzip.compress(RAW.encode(), mtime=0)),
        ("GZIP", gzip.compress(RAW[:20].encode(), mtime=0) + gzip.compress(RAW[20:].encode(), mtime=0)),
        ("deflate", packed(RAW, 15)),
        ("identity", RAW.encode()),
        ("", RAW.encode()),
    ],
)
def test_packed_bodies(at: Listening, engine: FakeEngine, tokenizer: Any, name: str, body: bytes) -> None:
    for sent in (body, iter([body[:5], body[5:30], body[30:]])):
        answer = at.http.post(PATH, content=sent, headers=JSON | {"content-encoding": name})
        assert answer.status_code == 200, answer.text
        assert "Änne" in tokenizer.decode(engine.job.ids)


@pytest.mark.parametrize(
    ("name", "body", "status", "says"),
    [
        ("br", RAW.encode(), 415, "gzip, x-gzip, deflate"),
        ("zstd", RAW.encode(), 415, "got 'zstd'"),
        ("gzip, gzip", RAW.encode(), 415, "as it is"),
        ("gzip", RAW.encode(), 400, "must be packed as gzip"),
        ("gzip", gzip.compress(RAW.encode(), mtime=0)[:-9], 400, "ends too early"),
        ("gzip", b"", 400, "ends too early"),
        ("", gzip.compress(RAW.encode(), mtime=0), 400, "Content-Encoding: gzip"),
    ],
)
def test_bodies_that_are_not_packed_so(at: Listening, name: str, body: bytes, status: int, says: str) -> None:
    answer = at.http.post(PATH, content=body, headers=JSON | ({"content-encoding": name} if name else {}))
    if not body:
        assert answer.status_code == 400
        return
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]


def _apart(parts: list[bytes]) -> Iterator[bytes]:
    """Parts of a body that do not come together."""
    for part in parts:
        yield part
        time.sleep(0.1)


@pytest.mark.parametrize("times", [1, 20])
def test_a_bomb_is_too_large(serve: Serve, engine: FakeEngine, times: int) -> None:
    """It is not unpacked further than the limit, in one part or in many."""
    at = serve(engine, max_body_bytes=100_000)
    bomb = gzip.compress(b" " * (20_000_000 // times)) * times
    assert len(bomb) < 100_000
    answer = at.http.post(PATH, content=bomb, headers=JSON | {"content-encoding": "gzip"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    parts = gzip.compress(b" " * 100_001) + bomb  # the first is just as much as is unpacked
    assert len(asyncio.run(Unpacked("gzip").read(parts, 100_000, last=True))) == 100_001
    parts = gzip.compress(b" " * 30_000) * 9
    assert len(asyncio.run(Unpacked("gzip").read(parts, 100_000, last=True))) == 100_001
    with pytest.raises(HTTPException, match="ends too early"):  # all that may be unpacked is there
        asyncio.run(Unpacked("gzip").read(gzip.compress(b" " * 100_000)[:-4], 100_000, last=True))
    for nbytes, status in ((100_000, 200), (100_001, 413)):
        two = [gzip.compress(RAW.encode().ljust(60_000)), gzip.compress(b" " * (nbytes - 60_000))]
        for sent in (b"".join(two), _apart(two)):
            answer = at.http.post(PATH, content=sent, headers=JSON | {"content-encoding": "gzip"})
            assert answer.status_code == status


# Paths and methods


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/chat/completions",
        "/v1/v1/chat/completions",
        "/api/v1/chat/completions",
    ],
)
def test_paths_that_mean_a_route(at: Listening, path: str) -> None:
    answer = at.http.post(at.url + path, json=CHAT, follow_redirects=False)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/",
        "//v1/models",
        "/models",
        "/v1/models/reader/",
        "//v1/models/reader",
        "/models/reader",
        "/health/",
        "http://localhost/v1/models?all=1",
        "HTTPS://localhost:8000/v1/models",
        "http://localhost?all=1",
        "http://localhost",
    ],
)
def test_paths_that_are_read(at: Listening, path: str) -> None:
    assert read(at, path, "localhost") == 200


def read(at: Listening, target: str, host: str) -> int:
    """The status of a request with this target and this header `Host`."""
    sent: dict[str, Any] = {"headers": {"Host": host}, "extensions": {"target": target.encode()}}
    return at.http.get(at.url, follow_redirects=False, **sent).status_code


def test_the_host_of_a_whole_url_counts(at: Listening) -> None:
    """And not the header's, as RFC 9112 asks for."""
    assert read(at, "http://localhost/v1/models", "evil.example") == 200
    for host in ("evil.example", "user@localhost", ""):
        assert read(at, f"http://{host}/v1/models", "localhost") == 421, host
    sent: dict[str, Any] = {
        "headers": {"X-Request-Id": "mine"},
        "extensions": {"target": b"http://localhost/v1/models"},
    }
    told = at.http.get(at.url, **sent)
    assert (told.json()["object"], told.headers["x-request-id"]) == ("list", "mine")


def test_other_apis_behind_a_wrong_base(at: Listening) -> None:
    message = {"model": "reader", "max_tokens": 4, "messages": CHAT["messages"]}
    assert at.http.post("/v1/v1/messages", json=message).json()["type"] == "message"
    assert at.http.post("/v1/api/chat", json=CHAT | {"stream": False}).json()["done"]
    wrong = at.http.post("/v1/v1/messages", json=message | {"model": "writer"}).json()
    assert wrong["type"] == "error"  # in the form of the API that is meant


def test_a_path_does_not_pass_the_key(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, api_keys=("key",))
    for path in ("/models", "//v1/models", "/v1/models/", "//health/../v1/models", "/health/v1/models"):
        assert at.http.get(at.url + path).status_code in (401, 404), path
    assert at.http.post(at.url + "/chat/completions", json=CHAT).status_code == 401


@pytest.mark.parametrize("path", ["/messages/batches", "/v1/v1/messages/a"])
def test_wrong_paths_of_anthropics_api_have_its_form(at: Listening, path: str) -> None:
    answer = at.http.get(path)
    assert (answer.status_code, answer.json()["type"]) == (404, "error")
    assert answer.json()["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize("path", ["/api", "/v1/api/a"])
def test_wrong_paths_of_ollamas_api_have_its_form(at: Listening, path: str) -> None:
    answer = at.http.get(path)
    assert answer.status_code == 404
    assert path.split("/")[-1] in answer.json()["error"]


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/chat", "/v2/models", "/v1/engines"])
def test_unknown_paths_have_a_hint(at: Listening, path: str) -> None:
    error = at.http.get(path).json()["error"]
    assert error["code"] == "not_found"
    assert "/v1 as base URL" in error["message"]


@pytest.mark.parametrize(
    "path", ["/v1/responses/resp_1", "/v1/conversations/conv_1", "/v1/chat/completions/chatcmpl-1"]
)
@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_what_is_stored_elsewhere_is_named(at: Listening, method: str, path: str) -> None:
    answer = at.http.request(method, path)
    assert (answer.status_code, "are not stored" in answer.json()["error"]["message"]) == (404, True), answer.text


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", PATH, "POST"),
        ("PUT", PATH, "POST"),
        ("HEAD", PATH, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/reader", "GET, HEAD"),
        ("POST", "/v1/kv/sessions/a", "DELETE, GET, HEAD, PATCH"),
        ("PUT", "/api/chat", "POST"),
    ],
)
def test_methods_that_are_not_served_name_the_others(at: Listening, method: str, path: str, allowed: str) -> None:
    answer = at.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        assert allowed in answer.text


def test_options(at: Listening) -> None:
    answer = at.http.options(PATH)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, "POST", b"")
    assert at.http.options("/v1/nothing").status_code == 404


# Pages of other origins

PAGE = "https://page.example"


def asked(**more: str) -> dict[str, str]:
    told = {"origin": PAGE, "access-control-request-method": "POST"}
    return told | {"access-control-request-headers": "authorization, content-type, x-stainless-os"} | more


@pytest.mark.parametrize("origins", [("*",), (PAGE,), (f"{PAGE}/",), (PAGE.upper(),)])
def test_a_page_of_the_internet_may_ask_for_a_private_network(
    serve: Serve, engine: FakeEngine, origins: tuple[str, ...]
) -> None:
    at = serve(engine, cors_origins=origins)
    private = {"access-control-request-private-network": "true"}
    answer = at.http.options(PATH, headers=asked() | private)
    assert answer.status_code == 200, answer.text
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["access-control-allow-origin"] in ("*", PAGE)
    assert "access-control-allow-private-network" not in at.http.options(PATH, headers=asked()).headers
    sent = at.http.post(PATH, json=CHAT, headers={"origin": PAGE})
    assert "X-KVBoost-Length" in sent.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["page.example", f"{PAGE}/chat", "https://*.example", "https://", ""])
def test_origins_that_no_page_has_are_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=rf"`cors_origins` must be origins .*, got {re.escape(repr(origin))}"):
        replace(SETTINGS, cors_origins=("app://localhost", "null", origin))


def test_other_pages_may_not(serve: Serve, engine: FakeEngine) -> None:
    private = {"access-control-request-private-network": "true"}
    other = serve(engine, cors_origins=("https://other.example",)).http.options(PATH, headers=asked() | private)
    assert other.status_code == 400
    assert "access-control-allow-private-network" not in other.headers
    none = serve(engine).http.options(PATH, headers=asked() | private)
    assert "access-control-allow-origin" not in none.headers
    assert "access-control-allow-private-network" not in none.headers


# Patterns


@pytest.fixture(scope="module")
def matches(tokenizer: Any) -> Iterator[Callable[[str, str], bool]]:
    """Whether an answer that must match a pattern may be a text."""
    grammars = Grammars(tokenizer, 1472)

    def found(pattern: str, text: str) -> bool:
        constraint = grammars.constraint(regex(pattern), is_json=False)
        for token in tokenizer.encode(text, add_special_tokens=False):
            if constraint.finished or not constraint.allowed()[token]:
                return False
            constraint.advance(token)
        return constraint.finished or bool(constraint.allowed()[tokenizer.eos_token_id])

    yield found
    grammars.close()


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\d{4}", ["1987"], ["\u0661\u0669\u0668\u0667", "\uff11\uff19\uff18\uff17", "198a"]),
        (r"[\d.]+", ["3.14"], ["\u0663.\u0661"]),
        (r"[a-c\d]x", ["bx", "7x"], ["\u0967x", "dx"]),
        (r"\w+", ["Anna_2"], ["\u00e9t\u00e9", "\u0663"]),
        (r"[\w-]+", ["a-b"], ["\u00e9-b"]),
        (r"a\sb", ["a b", "a\tb"], ["a\u00a0b", "a\u2003b"]),
        (r"[^\d]", ["a", "\u00e9"], ["1", "\u0663"]),
        (r"\D\S\W", ["ab-"], ["1b-", "a -", "abc", "\u0663b-"]),
        (r"[^\D]+", ["19"], ["a", "\u0663"]),
        (r"[^\W\d]+", ["ab"], ["a1", "\u00e9"]),
        (r"\\d", ["\\d"], ["1"]),
        (r"[]\d]+", ["]1"], ["\u0663"]),
        (r"[[:alpha:]\d]+", ["a1"], ["\u0663"]),
        (r"a\[\d\]", ["a[1]"], ["a[\u0663]"]),
    ],
)
def test_classes_of_patterns_are_those_of_ascii(
    matches: Callable[[str, str], bool], pattern: str, right: list[str], wrong: list[str]
) -> None:
    """And what a class leaves out stays left out in all scripts."""
    assert [text for text in right if not matches(pattern, text)] == []
    assert [text for text in wrong if matches(pattern, text)] == []
    assert matches(r"\p{Nd}", "\u0663")  # who asks for them gets them


def test_guided_regex_is_such_a_pattern(at: Listening, engine: FakeEngine) -> None:
    for field in ({"guided_regex": r"\d{4}"}, {"regex": r"\d{4}"}, {"structured_outputs": {"regex": r"\d{4}"}}):
        assert at.http.post(PATH, json=CHAT | field).status_code == 200
        constraint = engine.job.options.constraint
        assert constraint is not None
        assert int(constraint.allowed().sum()) <= 40  # tokens of digits alone
