"""Every API that answers with text keeps one contract: those of `APIS`, which has every route that is posted to."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.internals.server import make_app
from tests.server.conftest import SETTINGS, Listening, Serve
from tests.server.fake_engine import FakeEngine, require_cancelled
from tests.server.test_lengths import APIS, body_of
from tests.server.wire import Wire, post_json, until

pytestmark = pytest.mark.daily

# Those that are posted to and answer with something else.
COUNTS = {"/v1/messages/count_tokens", "/v1/responses/input_tokens"}
OTHERS = COUNTS | {"/v1/embeddings", "/v1/warm", "/api/embed", "/api/embeddings", "/api/show"}
MORE: dict[str, dict[str, Any]] = {"/v1/chat/completions": {"n": 2}, "/v1/completions": {"n": 2}}
SAYS = "Anna plays the piano."
KINDS = [None, "", "text/plain", "application/x-www-form-urlencoded", "text/json", "application/JSON; charset=UTF-8"]
JSON = {"content-type": "application/json"}


def _text(route: str, told: Any) -> str:
    """The text of a whole answer."""
    match route:
        case "/v1/chat/completions":
            return str(told["choices"][0]["message"]["content"])
        case "/v1/completions":
            return str(told["choices"][0]["text"])
        case "/v1/responses":
            return str(told["output"][0]["content"][0]["text"])
        case "/v1/messages":
            return str(told["content"][0]["text"])
        case "/api/chat":
            return str(told["message"]["content"])
        case _:
            return str(told["response"])


def _pieces(route: str, lines: list[Any]) -> Iterator[str]:
    """The texts of a streamed answer."""
    for told in lines:
        match route:
            case "/v1/chat/completions":
                yield from (choice["delta"].get("content") or "" for choice in told["choices"])
            case "/v1/completions":
                yield from (choice["text"] for choice in told["choices"])
            case "/v1/responses":
                yield told["delta"] if told["type"] == "response.output_text.delta" else ""
            case "/v1/messages":
                yield told["delta"]["text"] if told["type"] == "content_block_delta" else ""
            case _:
                yield _text(route, told)


def _streamed(route: str, text: str) -> str:
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return "".join(_pieces(route, [json.loads(line) for line in lines if line.startswith("{")]))


def _counts(route: str, told: Any) -> tuple[int, int]:
    """Tokens of the prompt, and of the answer."""
    if route.startswith("/api"):
        return told["prompt_eval_count"], told["eval_count"]
    usage = told["usage"]
    if route == "/v1/messages":  # whose input is what was not cached
        usage = usage | {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    names = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    one, other = (usage[f"{name}_tokens"] for name in names)
    return one, other


def test_all_apis_are_tried(tokenizer: Any) -> None:
    """A new route is in `APIS`, or is said to answer with something else."""
    paths = make_app(FakeEngine(), tokenizer, SETTINGS).openapi()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == {*APIS, *OTHERS}


class ApiContract:
    """Tests of one route."""

    route: str

    def ask(self, at: Listening, **told: Any) -> Any:
        """An answer that is no error."""
        answer = at.http.post(self.route, json=body_of(self.route, 30, **told))
        assert answer.status_code == 200, answer.text
        return answer

    def test_streams_what_it_says_at_once(self, at: Listening, engine: FakeEngine) -> None:
        assert _text(self.route, self.ask(at).json()) == SAYS
        assert _streamed(self.route, self.ask(at, stream=True).text) == SAYS

    def test_counts_tokens(self, at: Listening, engine: FakeEngine) -> None:
        told = self.ask(at).json()
        assert _counts(self.route, told) == (len(engine.job.ids), len(engine.says))

    @pytest.mark.parametrize("kind", KINDS)
    def test_any_content_type(self, at: Listening, engine: FakeEngine, kind: str | None) -> None:
        headers = {} if kind is None else {"content-type": kind}
        answer = at.http.post(self.route, content=json.dumps(body_of(self.route)), headers=headers)
        assert answer.status_code == 200, answer.text

    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
    def test_encodings_of_text(self, at: Listening, engine: FakeEngine, encoding: str) -> None:
        self.ask(at)
        asked = engine.job.ids
        body = json.dumps(body_of(self.route, 30), ensure_ascii=False).encode(encoding)
        assert at.http.post(self.route, content=body, headers=JSON).status_code == 200
        assert engine.job.ids == asked

    def test_closing_a_stream_ends_all_jobs(self, serve: Serve, endless: FakeEngine) -> None:
        body = body_of(self.route, 30, stream=True, **MORE.get(self.route, {}))
        with serve(endless).http.stream("POST", self.route, json=body) as answer:
            pieces = answer.iter_raw()  # which closes the stream where nobody holds it
            next(pieces)
            until(lambda: len(endless.tickets) == body.get("n", 1), "it did not arrive")
            assert not any(ticket.cancelled.is_set() for ticket in endless.tickets)
        require_cancelled(endless, body.get("n", 1))

    def test_going_away_while_waiting_ends_all_jobs(self, serve: Serve, endless: FakeEngine) -> None:
        at, body = serve(endless), body_of(self.route, 30, **MORE.get(self.route, {}))
        with Wire(httpx.URL(at.url).port).open(post_json(body, self.route)):
            until(lambda: len(endless.tickets) == body.get("n", 1), "it did not arrive")
        require_cancelled(endless, body.get("n", 1))
        assert 'kvboost_finished_total{reason="cancelled"}' in at.http.get("/metrics").text

    def test_a_failure_is_no_answer(self, at: Listening, engine: FakeEngine) -> None:
        engine.failure = "RuntimeError: broken"
        answer = at.http.post(self.route, json=body_of(self.route, 30))
        assert answer.status_code == 500
        assert "error" in answer.json()


class Broken:
    """A server whose answers are changed."""

    def __init__(self, at: Listening, change: Callable[[httpx.Response], httpx.Response]) -> None:
        self.http, self._at, self._change = self, at, change

    def post(self, path: str, **told: Any) -> httpx.Response:
        return self._change(self._at.http.post(path, **told))


def _without_its_end(answer: httpx.Response) -> httpx.Response:
    return httpx.Response(200, text=answer.text.replace("piano", "pia"), request=answer.request)


def _with_more_tokens(answer: httpx.Response) -> httpx.Response:
    return httpx.Response(200, text=re.sub(r"(_tokens|_count)\":", r"\g<0>1", answer.text))


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("promise", "change"),
    [
        ("streams_what_it_says_at_once", _without_its_end),
        ("counts_tokens", _with_more_tokens),
        ("any_content_type", lambda answer: httpx.Response(415)),
        ("encodings_of_text", lambda answer: httpx.Response(400)),
        ("a_failure_is_no_answer", lambda answer: httpx.Response(200, json={"error": ""})),
    ],
)
def test_a_broken_promise_is_noticed(
    at: Listening, engine: FakeEngine, path: str, promise: str, change: Callable[[httpx.Response], httpx.Response]
) -> None:
    contract, more = ApiContract(), {"any_content_type": ["text/plain"], "encodings_of_text": ["utf-16"]}
    contract.route = path
    with pytest.raises(AssertionError):
        getattr(contract, f"test_{promise}")(Broken(at, change), engine, *more.get(promise, []))


for _path in APIS:  # a class of each, for every promise is tried of every API each day
    _class = f"Test{_path.title().replace('/', '')}"
    globals()[_class] = type(_class, (ApiContract,), {"route": _path})
