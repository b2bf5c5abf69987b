"""Prompts that are cut, filled in, or without what the tokenizer puts around them."""

import json
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from kvboost_hf.assets import load_embedded
from tests.internals.server import Job, Listener, TooLongError, make_app
from tests.server.conftest import SETTINGS, Listening, Serve, listening
from tests.server.fake_engine import FakeEngine, FakeTicket

pytestmark = pytest.mark.daily

SENTENCES = "Anna plays the piano. " * 40
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SENTENCES}]}
TEXT: dict[str, Any] = {"prompt": SENTENCES}
WHOLE = {"input": TEXT["prompt"]}


class _Small(FakeEngine):
    """Has room for a prompt of 100 tokens."""

    def submit(self, job: Job, listener: Listener) -> FakeTicket:
        if len(job.ids) > 100:
            raise TooLongError("too long", 100)
        return super().submit(job, listener)


@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize(
    ("route", "body", "change"),
    [
        ("chat/completions", CHAT, {"truncate_prompt_tokens": -1}),
        ("completions", TEXT, {"truncate_prompt_tokens": -1}),
        ("completions", {"prompt": [*range(40, 440)]}, {"truncate_prompt_tokens": -1}),
        ("responses", WHOLE, {"truncation": "auto"}),
    ],
)
def test_a_request_may_leave_out_the_beginning(
    serve: Serve, engine: FakeEngine, route: str, body: Any, change: Any, times: int
) -> None:
    """Of what the engine has no room for, and of what is too long to be tokenized."""
    small = _Small("Anna.")
    small.max_model_len = 120
    cut, whole = serve(small, max_model_len=120), serve(engine)
    body = json.loads(json.dumps(body).replace(SENTENCES, SENTENCES * times))
    assert cut.http.post(f"/v1/{route}", json=body).status_code == 400
    told = cut.http.post(f"/v1/{route}", json=body | change)
    assert told.status_code == 200, told.text
    assert whole.http.post(f"/v1/{route}", json=body).status_code == 200
    assert list(small.job.ids) == list(engine.job.ids)[-100:]


def test_so_many_tokens_at_most(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    response = at.http.post("/v1/completions", json=TEXT | {"truncate_prompt_tokens": 7})
    assert response.headers["x-kvboost-changed"] == "prompt-cut"
    assert list(engine.job.ids) == tokenizer.encode(TEXT["prompt"])[-7:]
    response = at.http.post("/v1/completions", json=TEXT | {"truncate_prompt_tokens": len(TEXT["prompt"])})
    assert "x-kvboost-changed" not in response.headers
    at.http.post("/v1/chat/completions", json=CHAT | {"truncate_prompt_tokens": 7})
    assert len(engine.job.ids) == 7


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_what_was_not_cut_off(at: Listening, engine: FakeEngine, tokenizer: Any, stream: bool) -> None:
    engine.says = ("Anna.",)
    ids = tokenizer.encode(TEXT["prompt"])
    for prompt, most in ((TEXT["prompt"], 7), (ids, 7), (TEXT["prompt"], len(ids)), (TEXT["prompt"], -1)):
        asked = {"prompt": prompt, "echo": True, "truncate_prompt_tokens": most, "stream": stream}
        text = "".join(choice.text for choice in _choices(at, asked))
        assert text == (tokenizer.decode(ids[-7:]) if most == 7 else TEXT["prompt"]) + "Anna."


def _choices(at: Listening, asked: dict[str, Any]) -> list[Any]:
    told: Any = at.openai.completions.create(model="reader", extra_body=asked, prompt="", stream=asked["stream"])
    return [chunk.choices[0] for chunk in (told if asked["stream"] else [told])]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", TEXT | {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("completions", TEXT | {"suffix": "."}, "suffix"),
        ("completions", {"prompt": [5], "suffix": "."}, None),
        ("responses", WHOLE | {"truncation": "middle"}, "truncation"),
    ],
)
def test_what_is_refused(at: Listening, route: str, body: Any, param: str | None) -> None:
    response = at.http.post(f"/v1/{route}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("marks", "filled"),
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            "<|fim_prefix|>def {x}<|fim_suffix|> end<|fim_middle|>",
        ),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>def {x}<fim_suffix> end<fim_middle>"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "▁<PRE>def {x}▁<SUF> end▁<MID>"),
        (("[SUFFIX]", "[PREFIX]"), "[SUFFIX] end[PREFIX]def {x}"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
            "<｜fim▁begin｜>def {x}<｜fim▁hole｜> end<｜fim▁end｜>",  # noqa: RUF001
        ),
    ],
)
def test_the_middle_of_a_text(engine: FakeEngine, marks: tuple[str, ...], filled: str) -> None:
    tokenizer = load_embedded()[1]
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        body = {"prompt": "def {x}", "suffix": " end", "echo": True}
        told = at.http.post("/v1/completions", json=body).json()
    assert tokenizer.decode([*engine.job.ids]) == filled
    assert sum(token in tokenizer.convert_tokens_to_ids(list(marks)) for token in engine.job.ids) == len(marks)
    assert told["choices"][0]["text"].startswith("def {x}Anna")


def test_a_text_without_special_tokens(engine: FakeEngine) -> None:
    tokenizer = load_embedded()[1]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        for change, first in (
            ({}, True),
            ({"add_special_tokens": True}, True),
            ({"add_special_tokens": False}, False),
        ):
            at.http.post("/v1/completions", json={"prompt": "Anna"} | change)
            assert (engine.job.ids[0] == 0) == first
