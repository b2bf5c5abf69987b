"""Edits of chats: a request with edits and new messages alone has the prompt, and the answer, of the whole chat."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
import torch

from kvboost_hf import ChunkStore, ReusePolicy, lookup_assistant
from kvboost_hf.assets import load_embedded
from tests.architectures.models import _small, classes_of
from tests.internals.server import ApiError, ChatRequest, Histories, ModelEngine, make_app
from tests.server.conftest import SETTINGS, Listening, Serve, listening
from tests.server.fake_engine import FakeEngine

ROUTE = "/v1/chat/completions"
NAMES = ("Anna", "Tom", "Ruth", "Maria", "Peter", "Paul")
NOTES = [f"{name} lives in Rome. {name} likes soup. {name} plays the piano and the flute. " * 4 for name in NAMES]
STUB = "[result dropped: it was answered from]"


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def called(number: int) -> list[dict[str, Any]]:
    """A call of a tool, and its result."""
    function = {"name": "read", "arguments": f'{{"note": {number}}}'}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return [
        said("assistant", "I read.", tool_calls=[call]),
        said("tool", NOTES[number], tool_call_id=f"call_{number}"),
    ]


CHAT = [
    said("system", "You read notes."),
    said("user", "Read them."),
    *called(0),
    *called(1),
    said("assistant", "Yes."),
]
NEW = [said("user", "Where does Tom live?")]
SUMMARY = said("user", "The first note is about Anna.")


def told(http: httpx.Client, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "prompt_cache_key": "agent", **more}
    answer = http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    return {**answer.json(), "headers": answer.headers}


def refused(http: httpx.Client, messages: Sequence[Any], **more: Any) -> tuple[int, str, str]:
    body = {"messages": messages, "max_tokens": 2, "prompt_cache_key": "agent", **more}
    answer = http.post(ROUTE, json=body)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def stubbed(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": STUB}


EDITS: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "drop": ([{"drop": 1}], [*CHAT[:1], *CHAT[2:], *NEW]),
    "drop a call and its result": ([{"drop": [2, 4]}], [*CHAT[:2], *CHAT[4:], *NEW]),
    "replace a result's text": (
        [{"replace": "call_0", "with": STUB}],
        [*CHAT[:3], stubbed(CHAT[3]), *CHAT[4:], *NEW],
    ),
    "summarize": ([{"replace": [2, 6], "with": [SUMMARY]}], [*CHAT[:2], SUMMARY, *CHAT[6:], *NEW]),
    "insert": ([{"replace": [1, 1], "with": [SUMMARY]}], [*CHAT[:1], SUMMARY, *CHAT[1:], *NEW]),
    "insert at the end": ([{"replace": [8, 8], "with": [SUMMARY]}], [*CHAT, *NEW, SUMMARY]),
    "move": ([{"move": [2, 4], "before": 6}], [*CHAT[:2], *CHAT[4:6], *CHAT[2:4], *CHAT[6:], *NEW]),
    "move to the end": ([{"move": 1, "before": 8}], [*CHAT[:1], *CHAT[2:], *NEW, CHAT[1]]),
    "move before a result": (
        [{"move": "call_1", "before": "call_0"}],
        [*CHAT[:3], CHAT[5], *CHAT[3:5], CHAT[6], *NEW],
    ),
    "all at once": (
        [{"move": [4, 6], "before": 2}, {"drop": 6}, {"replace": "call_0", "with": STUB}, {"drop": 0}],
        [CHAT[1], *CHAT[4:6], CHAT[2], stubbed(CHAT[3]), *NEW],
    ),
    "none": ([], [*CHAT, *NEW]),
}


@pytest.mark.daily
@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("kept", [False, True])
def test_the_prompt_is_that_of_the_edited_chat(at: Listening, engine: FakeEngine, kind: str, kept: bool) -> None:
    """Whether the chat is sent with the edits, or was kept by an earlier request."""
    edits, expected = EDITS[kind]
    told(at.http, expected)
    if kept:
        first = told(at.http, CHAT, history=True)
        found = told(at.http, NEW, history=first["history"], edits=edits)
        assert found["history"] != first["history"]
    else:
        found = told(at.http, [*CHAT, *NEW], edits=edits)
        assert "history" not in found
    assert list(engine.job.ids) == list(engine.tickets[0].job.ids)
    assert ("edits-applied" in found["headers"].get("x-kvboost-changed", "")) is bool(edits)
    if edits:
        told(at.http, [*CHAT, *NEW])  # the edits matter
        assert list(engine.job.ids) != list(engine.tickets[0].job.ids)


def test_a_name_stands_for_the_same_messages_for_ever(at: Listening, engine: FakeEngine) -> None:
    """A request that comes again is no second edit, and two may go on from one chat."""
    name = told(at.http, CHAT, history=True)["history"]
    for _ in range(2):
        told(at.http, NEW, history=name, edits=[{"drop": 1}])
    assert list(engine.tickets[-1].job.ids) == list(engine.tickets[-2].job.ids)
    told(at.http, NEW, history=name)
    told(at.http, [*CHAT, *NEW])
    assert list(engine.tickets[-1].job.ids) == list(engine.tickets[-2].job.ids)


def test_a_request_that_fails_keeps_nothing_and_changes_nothing(at: Listening, engine: FakeEngine) -> None:
    name = told(at.http, CHAT, history=True)["history"]
    engine.error = ValueError("the model is away")
    assert at.http.post(ROUTE, json={"messages": NEW, "history": name, "prompt_cache_key": "agent"}).status_code == 500
    engine.error = None
    told(at.http, NEW, history=name, edits=[{"drop": 0}])
    told(at.http, [*CHAT[1:], *NEW])
    assert list(engine.tickets[-1].job.ids) == list(engine.tickets[-2].job.ids)


def test_a_front_of_a_cluster_learns_nothing_of_text_that_the_prompt_does_not_begin_with(
    engine: FakeEngine, tokenizer: Any
) -> None:
    inner = make_app(engine, tokenizer, SETTINGS)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await inner({**scope, "text_keys": [b"key"]}, receive, send)

    with listening(app) as at:
        told(at.http, CHAT)
        assert list(engine.job.text_keys) == [b"key"]
        name = told(at.http, CHAT, history=True)["history"]
        told(at.http, NEW, history=name)
        assert not engine.job.text_keys
        told(at.http, [*CHAT, *NEW], edits=[{"drop": 0}])
        assert not engine.job.text_keys


def test_the_openai_sdk_and_a_stream(at: Listening, engine: FakeEngine) -> None:
    """The rule of the page on agents: old results of tools are dropped, and new messages sent alone."""
    client, kept = at.openai, {"prompt_cache_key": "agent", "history": True}
    whole: Any = CHAT
    answer: Any = client.chat.completions.create(model="reader", messages=whole, extra_body=kept)
    kept |= {"history": answer.history, "edits": [{"replace": "call_0", "with": STUB}]}
    new: Any = [said("assistant", answer.choices[0].message.content), *NEW]
    chunks: Any = list(client.chat.completions.create(model="reader", messages=new, extra_body=kept, stream=True))
    assert len({chunk.history for chunk in chunks}) == 1
    told(at.http, [*CHAT[:3], stubbed(CHAT[3]), *CHAT[4:], *new])
    assert list(engine.tickets[-1].job.ids) == list(engine.tickets[-2].job.ids)
    kept |= {"history": chunks[0].history, "edits": []}
    client.chat.completions.create(model="reader", messages=new, extra_body=kept)
    told(at.http, [*CHAT[:3], stubbed(CHAT[3]), *CHAT[4:], *new, *new])
    assert list(engine.tickets[-1].job.ids) == list(engine.tickets[-2].job.ids)
    with pytest.raises(openai.NotFoundError, match="Send all messages"):
        client.chat.completions.create(model="reader", messages=new, extra_body=kept | {"history": "unknown"})


def test_another_answer_needs_no_messages(at: Listening, engine: FakeEngine) -> None:
    """To the same chat, or to an edited one."""
    name = told(at.http, CHAT, history=True)["history"]
    again = told(at.http, [], history=name)["history"]
    assert list(engine.tickets[-1].job.ids) == list(engine.tickets[-2].job.ids)
    told(at.http, [], history=again, edits=[{"replace": "call_0", "with": STUB}])
    told(at.http, [*CHAT[:3], stubbed(CHAT[3]), *CHAT[4:]])
    assert list(engine.tickets[-1].job.ids) == list(engine.tickets[-2].job.ids)
    for more in ({}, {"history": True}, {"edits": [{"replace": [0, 0], "with": [CHAT[0]]}]}):
        status, _, text = refused(at.http, [], **more)
        assert status == 400
        assert "must have one message at least where history names none, got an empty list" in text


REFUSED: dict[str, tuple[list[Any], str]] = {
    "number": ([{"drop": 8}], "edits.0.drop must be a number from 0 to 7, got 8: the chat has 8 messages"),
    "place": ([{"move": 0, "before": 9}], "edits.0.before must be a number from 0 to 8, got 9"),
    "call": (
        [{"replace": "call_7", "with": "a"}],
        "must be the tool_call_id of one message, got 'call_7', which 0",
    ),
    "span": ([{"drop": [3, 9]}], r"must be [start, stop] with start < stop and stop <= 8"),
    "empty span": ([{"drop": [3, 3]}], "start < stop"),
    "backwards": ([{"replace": [4, 3], "with": "a"}], "start <= stop"),
    "overlap": ([{"drop": [1, 4]}, {"replace": 3, "with": "a"}], "must not overlap, got (1, 4) and (3, 4)"),
    "place that goes": ([{"drop": [1, 4]}, {"move": 6, "before": 2}], "cannot be put in front of message 2"),
    "into itself": ([{"move": [1, 4], "before": 2}], "cannot be put in front of message 2"),
    "text for several": ([{"replace": [1, 3], "with": "a"}], "may be a text for one message, got a text for 2"),
    "text for none": ([{"replace": [1, 1], "with": "a"}], "may be a text for one message, got a text for 0"),
    "all": ([{"drop": [0, 8]}], "must leave a message at least"),
    "two changes": ([{"drop": 0, "move": 1, "before": 3}], "one of drop, replace and move, got drop and move"),
    "no change": ([{}], "one of drop, replace and move, got none"),
    "nothing to put": ([{"replace": 0}], "with goes with replace"),
    "no place": ([{"move": 0}], "before goes with move"),
    "what goes with another": ([{"drop": 0, "with": "a"}], "with goes with replace"),
    "negative": ([{"drop": -1}], "greater than or equal to 0"),
    "no number": ([{"drop": 1.5}], "edits.0.drop"),
    "too many": ([{"drop": 0}] * 1001, "at most 1000"),
}


@pytest.mark.daily
@pytest.mark.parametrize("kind", REFUSED)
def test_edits_that_cannot_be_made_are_refused(at: Listening, kind: str) -> None:
    edits, message = REFUSED[kind]
    name = told(at.http, CHAT, history=True)["history"]
    for given in ({"messages": [*CHAT, *NEW]}, {"messages": NEW, "history": name}):
        status, param, text = refused(at.http, edits=edits, **given)
        assert status == 400
        assert param.startswith("edits")
        assert message in text


def test_a_call_id_that_two_results_have_is_refused(at: Listening) -> None:
    twice = [*CHAT, *called(0), *NEW]
    assert "which 2 have. Give the message's number" in refused(at.http, twice, edits=[{"drop": "call_0"}])[2]


def test_edits_and_a_message_to_continue(at: Listening, engine: FakeEngine) -> None:
    more = {"continue_final_message": True, "add_generation_prompt": False}
    told(at.http, CHAT, **more)
    told(at.http, [*CHAT, *NEW], edits=[{"drop": 7}], **more)
    assert list(engine.tickets[-1].job.ids) == list(engine.tickets[-2].job.ids)
    status, _, text = refused(at.http, CHAT, edits=[{"drop": 6}], **more)
    assert status == 400
    assert "continue_final_message needs a last message of the assistant" in text


# Who may go on from a chat, and for how long


def test_history_needs_the_name_of_a_session(at: Listening) -> None:
    status, _, text = refused(at.http, CHAT, history=True, prompt_cache_key=None)
    assert status == 400
    assert "history needs prompt_cache_key" in text


def test_only_who_has_sent_a_chat_goes_on_from_it(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, api_keys=("one", "two"))
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"messages": CHAT, "history": True, "prompt_cache_key": "agent", "max_tokens": 2}
    name = at.http.post(ROUTE, json=body, headers=one).json()["history"]
    body |= {"messages": NEW, "history": name}
    assert at.http.post(ROUTE, json=body, headers=one).status_code == 200
    strange = [
        at.http.post(ROUTE, json=body, headers=two),
        at.http.post(ROUTE, json=body | {"cache_salt": "b"}, headers=one),
        at.http.post(ROUTE, json=body | {"prompt_cache_key": "other"}, headers=one),
    ]
    unknown = at.http.post(ROUTE, json=body | {"history": "f" * 32}, headers=two)
    for answer in strange:
        assert answer.status_code == unknown.status_code == 404
        assert answer.json()["error"]["code"] == "history_not_found"
        assert answer.text.replace(name, "") == unknown.text.replace("f" * 32, "")


def test_a_deleted_session_has_no_messages(reading: Listening) -> None:
    http = httpx.Client(base_url=reading.url, timeout=20, headers={"authorization": "Bearer key"})
    with http:
        name = told(http, CHAT, history=True, prompt_cache_key="deleted")["history"]
        other = told(http, CHAT, history=True, prompt_cache_key="stays")["history"]
        assert http.delete("/v1/kv/sessions/deleted").status_code == 200
        assert refused(http, NEW, history=name, prompt_cache_key="deleted")[0] == 404
        told(http, NEW, history=other, prompt_cache_key="stays")


def test_a_process_that_has_begun_anew_asks_for_the_whole_chat(serve: Serve, engine: FakeEngine) -> None:
    name = told(serve(engine).http, CHAT, history=True)["history"]
    status, param, text = refused(serve(engine).http, NEW, history=name, edits=[{"drop": 0}])
    assert (status, param) == (404, "history")
    assert "Send all messages, and 'history': true." in text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(messages: Sequence[Any], history: bool | str = True, key: str = "agent") -> ChatRequest:
    return ChatRequest.model_validate({"messages": messages, "history": history, "prompt_cache_key": key})


def has(histories: Histories, name: str | None, client: bytes = b"one") -> bool:
    try:
        return len(histories.whole(asked(NEW, name or ""), client, b"salt").messages) > len(NEW)
    except ApiError:
        return False


def test_messages_are_kept_for_an_hour_after_their_last_use() -> None:
    clock = Clock()
    histories = Histories(clock=clock)
    used, left = (histories.keep(asked(CHAT), b"one", b"salt") for _ in range(2))
    clock.now = 3000
    assert has(histories, used)
    clock.now = 6000
    assert has(histories, used)
    assert not has(histories, left)
    clock.now = 9601
    assert not has(histories, used)


def test_a_client_that_keeps_much_takes_nothing_from_others() -> None:
    size = sum(len(message.model_dump_json()) + 1024 for message in asked(CHAT).messages)
    histories = Histories(max_bytes=4 * size)
    own = histories.keep(asked(CHAT), b"two", b"salt")
    names = [histories.keep(asked(CHAT), b"one", b"salt") for _ in range(9)]
    assert [has(histories, name) for name in names] == [False] * 6 + [True] * 3
    assert has(histories, own, b"two")
    assert histories.keep(asked(CHAT * 5), b"one", b"salt") is None
    assert has(histories, names[-1])


# With a model


def engine_of(model: Any, tokenizer: Any, **more: Any) -> ModelEngine:
    return ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=16), **more)


def with_states() -> Any:
    """A random model whose K/V cannot be moved, with the vocabulary of the embedded one."""
    config_class, model_class = classes_of("falcon_h1")
    config = _small(config_class)
    config.vocab_size = load_embedded()[0].config.vocab_size
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class(config).eval()


@pytest.fixture
def pair(
    tokenizer: Any, request: pytest.FixtureRequest, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Listening, Listening]]:
    """Two servers with the same model, and stores of their own; calls of the history are not written."""
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template.replace("<tool_call>", ""))
    more: dict[str, Any] = getattr(request, "param", {})
    model = with_states() if "states" in more else load_embedded()[0]
    given = {name: value for name, value in more.items() if name != "states"}
    if given.get("draft") == "lookup":
        given["draft"] = lookup_assistant(model)
    engines = [engine_of(model, tokenizer, **given) for _ in range(2)]
    yield serve(engines[0]), serve(engines[1])
    for engine in engines:
        engine.close()


def agent(http: httpx.Client, repair: str, edited: bool) -> list[tuple[str, dict[str, Any]]]:
    """Three turns of an agent that reads notes, and drops old ones; answers, and what was reused."""
    chat = [
        said("system", "You read notes."),
        said("user", "Read them."),
        *(one for number in range(4) for one in called(number)),
    ]
    first = told(http, chat, repair=repair, history=True if edited else None)
    turns = [first]
    for turn in range(2):
        text = turns[-1]["choices"][0]["message"]["content"]
        new = [said("assistant", text), *called(turn + 4), said("user", f"Where does {NAMES[turn + 3]} live?")]
        if edited:
            edits = [{"replace": f"call_{turn}", "with": STUB}]
            turns.append(told(http, new, repair=repair, history=turns[-1]["history"], edits=edits))
        else:
            chat = [
                stubbed(message) if message.get("tool_call_id") == f"call_{turn}" else message
                for message in chat + new
            ]
            turns.append(told(http, chat, repair=repair))
    return [(turn["choices"][0]["message"]["content"], turn["usage"]) for turn in turns]


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row at a time": {"max_batch_size": 1},
    "drafts": {"draft": "lookup"},
    "states": {"states": True},
    "repairs later": {"policy": ReusePolicy(mode="blend", progressive=True)},
}


def counts(usage: dict[str, Any]) -> tuple[int, ...]:
    details = usage["prompt_tokens_details"]
    return usage["prompt_tokens"], *(details[f"{name}_tokens"] for name in ("cached", "moved", "computed"))


@pytest.mark.parametrize("pair", MODELS.values(), ids=MODELS, indirect=True)
@pytest.mark.parametrize("repair", ["exact", "selective"])
def test_answers_and_work_are_those_of_whole_prompts(
    pair: tuple[Listening, Listening], repair: str, request: pytest.FixtureRequest
) -> None:
    moves = repair != "exact" and "states" not in request.node.name
    edited, whole = (agent(at.http, repair, sends) for at, sends in zip(pair, (True, False), strict=True))
    assert [answer for answer, _ in edited] == [answer for answer, _ in whole]
    for turn, (_, usage) in enumerate(edited):
        prompt, cached, moved, computed = counts(usage)
        assert (prompt, cached, moved, computed) == counts(whole[turn][1])
        assert (moved > 0) is (moves and turn > 0)
        reason = usage["prompt_tokens_details"].get("moved_reason", "")
        assert ("only keys and values can be moved" in reason) is (repair != "exact" and not moves)
        if turn and moves:
            assert cached > 0.6 * prompt
            assert computed < 0.6 * prompt or "later" in request.node.name  # where all is repaired
        elif turn:
            assert computed > 0.6 * prompt  # all that is behind the edit


def test_a_prompt_behind_an_edit_uses_nothing_that_is_not_exact(pair: tuple[Listening, Listening]) -> None:
    name = told(pair[0].http, CHAT, history=True)["history"]
    found = told(pair[0].http, NEW, history=name, edits=EDITS["summarize"][0], repair="exact")
    whole = told(pair[1].http, EDITS["summarize"][1])
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert found["choices"] == whole["choices"]


def test_edited_chats_of_many_at_once(pair: tuple[Listening, Listening]) -> None:
    """Sessions that go on from one chat with other edits each, in one batch, are as whole prompts."""
    name = told(pair[0].http, CHAT, history=True)["history"]
    kinds = [kind for kind in EDITS if kind not in ("insert at the end", "move to the end")]
    found: dict[str, dict[str, Any]] = {}

    def ask(kind: str) -> None:
        with httpx.Client(base_url=pair[0].url, timeout=60) as http:
            found[kind] = told(http, NEW, history=name, edits=EDITS[kind][0], repair="exact")

    threads = [threading.Thread(target=ask, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind in kinds:
        assert found[kind]["choices"] == told(pair[1].http, EDITS[kind][1], repair="exact")["choices"], kind
