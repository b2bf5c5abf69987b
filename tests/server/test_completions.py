"""Plain completions by the openai SDK."""

from typing import Any

import pytest

from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily


def test_a_text_goes_on(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    answer = at.openai.completions.create(model="reader", prompt="What does", temperature=0)
    assert answer.choices[0].text == "Anna plays the piano."
    assert list(engine.job.ids) == tokenizer.encode("What does")
    assert (engine.job.options.max_tokens, engine.job.options.temperature) == (2**31 - len(engine.job.ids), 0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == len(engine.job.ids) + 4


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_answers_come_in_order(at: Listening, engine: FakeEngine, stream: bool) -> None:
    prompts = [[5, 6], [7]]
    told: Any = at.openai.completions.create(model="reader", prompt=prompts, n=2, seed=1, stream=stream, echo=True)
    said = dict.fromkeys(range(4), "")
    for chunk in told if stream else [told]:
        for choice in chunk.choices:
            said[choice.index] += choice.text
    echoes = [at.http.post("/v1/completions", json=_echo(prompt)).json()["choices"][0]["text"] for prompt in prompts]
    assert [said[n] for n in range(4)] == [echoes[n // 2] for n in range(4)]
    jobs = [ticket.job for ticket in engine.tickets[:4]]
    assert [list(job.ids) for job in jobs] == [[5, 6], [5, 6], [7], [7]]
    assert [job.options.seed for job in jobs] == [1, 2, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_decoded_once(at: Listening, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    decoded = []
    decode = tokenizer.decode

    def counting(ids: Any, **how: Any) -> Any:
        decoded.append(list(ids))
        return decode(ids, **how)

    monkeypatch.setattr(tokenizer, "decode", counting)
    asked = {"prompt": [[5, 6, 7], [8, 9]], "echo": True, "n": 4, "logprobs": 1, "stream": stream}
    assert at.http.post("/v1/completions", json=asked).status_code == 200
    assert [ids for ids in decoded if len(ids) > 1] == [[5, 6, 7], [8, 9]]


def _echo(prompt: list[int]) -> dict[str, Any]:
    return {"model": "reader", "prompt": prompt, "echo": True}


def test_an_echo_is_the_text_as_it_was_sent(at: Listening) -> None:
    answer = at.openai.completions.create(model="reader", prompt=["  Tom ", "é"], echo=True)
    assert [choice.text for choice in answer.choices] == ["  Tom Anna plays the piano.", "éAnna plays the piano."]


def test_a_stream(at: Listening) -> None:
    stream = at.openai.completions.create(
        model="reader", prompt="a", stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Anna plays the piano."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


def test_a_stream_has_no_chunks_that_say_nothing(at: Listening, engine: FakeEngine) -> None:
    engine.says = ("Anna", "", " plays", "", ".")
    chunks = list(at.openai.completions.create(model="reader", prompt="a", stream=True))
    assert [chunk.choices[0].text for chunk in chunks if not chunk.choices[0].finish_reason] == ["Anna", " plays", "."]


def test_logprobs(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    told = at.openai.completions.create(model="reader", prompt="a", logprobs=2).choices[0].logprobs
    assert told is not None
    tokens = [tokenizer.decode([token]) for token in (40, 41, 42, 43)]
    assert told.tokens == tokens
    assert told.token_logprobs == [-0.25] * 4
    assert told.top_logprobs == [{tokenizer.decode([0]): -0.5, tokenizer.decode([1]): -1.5}] * 4
    assert told.text_offset == [0, *(len("".join(tokens[:n])) for n in (1, 2, 3))]
    assert engine.job.options.logprobs == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": ""}, "token"),
        ({"prompt": []}, "empty list"),
        ({"prompt": [[]]}, "token"),
        ({"prompt": [10**9]}, "from 0 to"),
        ({"prompt": [-1]}, "from 0 to"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 17}, "16"),
        ({"best_of": 0}, "greater than or equal to 1"),
        ({"best_of": 2, "n": 3}, "best_of must be n, 3, or more, got 2"),
        ({"best_of": 17}, "16 answers, got 17"),
        ({"best_of": 2, "stream": True}, "in a stream"),
        ({"max_tokens": 0}, "without echo"),
        ({"max_tokens": -2, "echo": True}, "greater than or equal to 0"),
        ({"echo": True, "logprobs": 20, "prompt": [5] * 30_000}, "log probabilities"),
    ],
)
def test_what_is_not_served_is_named(at: Listening, engine: FakeEngine, change: dict[str, Any], says: str) -> None:
    response = at.http.post("/v1/completions", json={"model": "reader", "prompt": "a"} | change)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    assert not engine.tickets


def test_answers_to_choose_from_have_chances(at: Listening, engine: FakeEngine) -> None:
    for told, logprobs in (({}, None), ({"best_of": 3}, 0), ({"best_of": 3, "logprobs": 2}, 2), ({"n": 3}, None)):
        assert at.http.post("/v1/completions", json={"prompt": "a", **told}).status_code == 200
        assert engine.job.options.logprobs == logprobs


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_the_field_with_too_many_answers_is_named(at: Listening, field: str) -> None:
    response = at.http.post("/v1/completions", json={"model": "reader", "prompt": "a", field: 17})
    assert response.json()["error"]["param"] == field
