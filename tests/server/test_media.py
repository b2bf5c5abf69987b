"""Images and other media in messages of all APIs, with a model of text: a text stands for each, and sessions go on."""

import base64
from typing import Any

import pytest

from tests.internals.server import images_left_out, text_of_media
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(4992)).decode()
URL = f"data:image/png;base64,{PNG}"
PART = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
LEFT = "[An image was left out here: image/png, 5 kB. This model reads text only.]"


def _chat(*content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content), **more}]}


def _of_tool(content: Any) -> list[Any]:
    function = {"name": "look", "arguments": "{}"}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    return [{"role": "user", "content": "Look."}, call, {"role": "tool", "tool_call_id": "a", "content": content}]


def _use(content: Any) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    messages = [("user", "Look."), ("assistant", [use]), ("user", [result, {"type": "text", "text": "Well?"}])]
    return {"max_tokens": 5, "messages": [{"role": role, "content": content} for role, content in messages]}


def _output(content: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    return {"input": [{"role": "user", "content": "Look."}, call, {**call, "type": "function_call_output"}]} | {
        "input": [call, {"type": "function_call_output", "call_id": "a", "output": content}]
    }


TEXT, CHAT, RESPONSES, MESSAGES = (
    {"type": "text", "text": "See:"},
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
BODIES: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, _chat(TEXT, PART), LEFT, "messages.content.image_url"),
    (CHAT, _chat(PART, role="system"), LEFT, "messages.content.image_url"),
    (CHAT, {"messages": _of_tool([PART])}, LEFT, "messages.content.image_url"),
    (
        CHAT,
        {"messages": _of_tool([TEXT, {"type": "image", "image": PNG, "mediaType": "image/png"}])},
        LEFT,
        "content.image",
    ),
    (CHAT, {"messages": _of_tool([{"type": "image", "data": PNG, "mimeType": "image/png"}])}, LEFT, "content.image"),
    (
        CHAT,
        _chat({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}),
        "[An image was left out here: https://a.example/b.png. This",
        "image_url",
    ),
    (
        CHAT,
        _chat({"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}),
        "An audio was left out here: wav, 5 kB",
        "input_audio",
    ),
    (
        CHAT,
        _chat({"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PNG}"}}),
        "[A file was left out here: a.pdf, application/pdf, 5 kB.",
        "file",
    ),
    (
        CHAT,
        _chat({"type": "video_url", "video_url": {"url": "https://a.example/v"}}),
        "A video was left out here",
        "video_url",
    ),
    (CHAT, _chat({"type": "hologram", "x": 1}), "[A hologram was left out here. This", "hologram"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
        LEFT,
        "input_image",
    ),
    (RESPONSES, _output([{"type": "input_image", "image_url": URL, "detail": "auto"}]), LEFT, "input_image"),
    (RESPONSES, _output([{"type": "input_file", "filename": "a.pdf", "file_data": PNG}]), "a.pdf, 5 kB", "input_file"),
    (RESPONSES, _output([{"type": "input_file", "file_id": "file-1"}]), "file-1", "input_file"),
    (MESSAGES, _chat(BLOCK) | {"max_tokens": 5}, LEFT, "messages.content.image"),
    (MESSAGES, _use([BLOCK]), LEFT, "messages.content.image"),
    (MESSAGES, _use([TEXT, {**BLOCK, "cache_control": {"type": "ephemeral"}}]), LEFT, "messages.content.image"),
    (MESSAGES, {**_chat(TEXT), "max_tokens": 5, "system": [BLOCK]}, LEFT, "image"),
    (
        MESSAGES,
        _use([{"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}]),
        "left out here: https://a.example/b.png",
        "image",
    ),
    (
        MESSAGES,
        _chat(
            {
                "type": "document",
                "title": "Plan",
                "source": {"type": "base64", "media_type": "application/pdf", "data": PNG},
            }
        )
        | {"max_tokens": 5},
        "[A document was left out here: Plan, application/pdf, 5 kB.",
        "document",
    ),
    (
        MESSAGES,
        _use([{"type": "tool_reference", "tool_name": "Write"}]),
        "[A tool reference was left out here: Write.",
        "tool_reference",
    ),
    (
        "/api/chat",
        {"stream": False, "messages": [{"role": "user", "content": "See:", "images": [PNG]}]},
        "An image was left out here: 5 kB",
        "messages.images",
    ),
    (
        "/api/chat",
        {"stream": False, "messages": [{"role": "tool", "content": "", "images": [PNG, PNG]}]},
        "An image was left out here: 5 kB",
        "messages.images",
    ),
    (
        "/api/generate",
        {"stream": False, "prompt": "See:", "images": [PNG]},
        "An image was left out here: 5 kB",
        "images",
    ),
]


@pytest.mark.parametrize(
    ("route", "body", "text", "named"), BODIES, ids=[f"{route}-{n}" for n, (route, *_) in enumerate(BODIES)]
)
def test_a_text_stands_for_media(
    at: Listening, engine: FakeEngine, tokenizer: Any, serve: Serve, route: str, body: Any, text: str, named: str
) -> None:
    for _ in range(2):  # the same each time: prompts that go on begin as before
        response = at.http.post(route, json={"model": "reader"} | body)
        assert response.status_code == 200, response.text
        assert response.headers["x-kvboost-ignored"].endswith(named)
        assert text in tokenizer.decode(engine.job.ids)
        assert PNG[:40] not in tokenizer.decode(engine.job.ids)
    assert engine.tickets[-1].job.ids == engine.tickets[-2].job.ids


@pytest.mark.parametrize(("route", "body", "text", "named"), BODIES[::4], ids=[route for route, *_ in BODIES[::4]])
def test_strict_servers_refuse_media(
    serve: Serve, engine: FakeEngine, route: str, body: Any, text: str, named: str
) -> None:
    response = serve(engine, strict_requests=True).http.post(route, json={"model": "reader"} | body)
    assert response.status_code == 400
    assert "is not supported" in response.text
    assert not engine.tickets


KEPT: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        MESSAGES,
        _chat(
            {
                "type": "document",
                "title": "Plan",
                "source": {"type": "text", "media_type": "text/plain", "data": "Build."},
            }
        )
        | {"max_tokens": 5},
        ["Plan", "Build."],
    ),
    (
        MESSAGES,
        _use([{"type": "search_result", "source": "https://a.example", "title": "Lamps", "content": [TEXT]}]),
        ["Lamps", "https://a.example", "See:"],
    ),
    (
        MESSAGES,
        _chat({"type": "document", "source": {"type": "content", "content": [TEXT, BLOCK]}}) | {"max_tokens": 5},
        ["See:", LEFT],
    ),
    (
        CHAT,
        _chat({"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,QnVpbGQu"}}),
        ["a.txt", "Build."],
    ),
    (CHAT, _chat({"type": "file", "file": {"file_data": "data:text/plain,Build."}}), ["Build."]),
    (CHAT, _chat({"type": "file", "file": {"file_data": "data:application/json;base64,QnVpbGQu"}}), ["Build."]),
    (
        CHAT,
        {"messages": _of_tool([{"type": "resource", "resource": {"uri": "file:///a", "text": "Build."}}])},
        ["Build."],
    ),
]


@pytest.mark.parametrize(("route", "body", "texts"), KEPT)
def test_texts_of_documents_are_kept(
    at: Listening, engine: FakeEngine, tokenizer: Any, route: str, body: Any, texts: list[str]
) -> None:
    response = at.http.post(route, json={"model": "reader"} | body)
    assert response.status_code == 200, response.text
    text = tokenizer.decode(engine.job.ids)
    assert [each for each in texts if each not in text] == []
    assert ("x-kvboost-ignored" in response.headers) == (LEFT in texts)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": "x"},
        {"type": "image", "source": 5},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,!!"}},
        {"type": "document", "source": {"type": "text", "data": 5}},
        {"type": "document", "content": [[5], None, {"type": "document", "content": [{"type": "a"}]}]},
        {"type": "a\n\u00e9" * 100},
    ],
    ids=str,
)
def test_parts_in_odd_forms(at: Listening, part: Any) -> None:
    assert at.http.post(CHAT, json={"model": "reader"} | _chat(part)).status_code == 200
    response = at.http.post(MESSAGES, json={"model": "reader", "max_tokens": 5} | _use([part]))
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"data": base64.b64encode(bytes(999)).decode()}, "An image was left out here: 999 bytes."),
        ({"data": base64.b64encode(bytes(1000)).decode()}, "An image was left out here: 1 kB."),
        ({"data": base64.b64encode(bytes(999_000)).decode()}, "An image was left out here: 999 kB."),
        ({"data": base64.b64encode(bytes(10**6)).decode()}, "An image was left out here: 1.0 MB."),
        ({"type": "File", "file": {"file_data": "data:application/pdf;base64,QnVpbGQu"}}, "A File was left out"),
        ({"type": "file", "file": {"file_data": "data:text/plain;base64,QnVpbGQu!"}}, "A file was left out"),
        ({"type": "Image", "url": "https://a.example"}, "An Image was left out here: https://a.example."),
        ({"url": "data:image/png;base64,AAAA", "media_type": "image/gif"}, "left out here: image/gif, 3 bytes."),
        ({"data": "data:image/png;base64,AAAA"}, "left out here: image/png, 3 bytes."),
        ({"data": "AAAA", "format": "wav"}, "left out here: wav, 3 bytes."),
        ({"data": "AAAA", "media_type": "audio/wav", "format": "wav"}, "left out here: audio/wav, 3 bytes."),
    ],
)
def test_what_is_said_of_media(part: dict[str, Any], told: str) -> None:
    assert told in text_of_media({"type": "image"} | part, "messages.content")


def test_no_images_are_left_out_where_there_are_none() -> None:
    nothing: list[Any] = [None, [], ""]
    assert [images_left_out(given, "images") for given in nothing] == [[], [], []]
    assert [len(images_left_out(given, "images")) for given in ("AAAA", ["AAAA", "AAAA"], 5)] == [1, 2, 1]
    assert "3 bytes" in images_left_out("AAAA", "images")[0]


def test_a_session_with_an_image_goes_on(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    body = _use([BLOCK])
    before = ""
    for _ in range(3):
        response = at.http.post(MESSAGES, json={"model": "reader"} | body)
        assert response.status_code == 200
        text = tokenizer.decode(engine.job.ids)
        assert text.startswith(before)
        before = text.removesuffix("<|im_start|>assistant\n")
        body["messages"] += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And now?"}]
