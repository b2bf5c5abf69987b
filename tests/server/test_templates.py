"""Chats of all APIs with templates that refuse roles, or leave messages out: they are merged, and named."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from kvboost_hf.assets import load_embedded
from tests.internals.server import Abilities, Rendering, _Chat, abilities_of, adapted, make_app
from tests.server.conftest import SETTINGS, Listening, listening
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

_BOS = "{{ bos_token }}"
TEMPLATES = {
    "mistral": _BOS + "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{%- set ns = namespace(index=0) %}"
    "{%- for m in rest %}{%- if not (m.role == 'tool' or m.tool_calls is defined) %}"
    "{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('After the optional system message, "
    "conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{%- for m in rest %}{%- if m.role == 'user' %}[INST]{%- if loop.first and system is defined %}{{ system }}\n\n"
    "{%- endif %}{{ m.content }}[/INST]"
    "{%- elif m.tool_calls is defined %}[TOOL_CALLS][{%- for c in m.tool_calls %}{%- if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{{ c.function | tojson }}{{ c.id }}{%- endfor %}]"
    "{%- elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{%- endif %}{%- endfor %}",
    "gemma": _BOS
    + "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "llama2": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set s = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set s = false %}{% endif %}{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and s %}{% set c = '<<SYS>>' + s + '<</SYS>>' + m['content'] %}{% else %}"
    "{% set c = m['content'] %}{% endif %}{% if m['role'] == 'user' %}[INST] {{ c }} [/INST]{% else %} {{ c }} "
    "{{ eos_token }}{% endif %}{% endfor %}",
    "first": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "drops": "{% if messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "texts": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c['function']['name'] + '\n' + c['function']['arguments'] + '</tool_call>' }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


@pytest.fixture(scope="module", params=TEMPLATES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, FakeEngine, Any, Listening]]:
    """A server of a model with one of the templates."""
    tokenizer: Any = load_embedded()[1]
    tokenizer.chat_template = TEMPLATES[request.param]
    engine = FakeEngine("Yes.")
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        yield request.param, engine, tokenizer, at


SYSTEM, LATE = {"role": "system", "content": "Be short."}, {"role": "developer", "content": "The lamp is new."}
USER, MORE = {"role": "user", "content": "Is the lamp on?"}, {"role": "user", "content": "And the fan?"}
SAID, AGAIN = {"role": "assistant", "content": "It is on."}, {"role": "assistant", "content": "The fan, too."}


def _call(id: str) -> list[Any]:
    function = {"name": "look", "arguments": json.dumps({"at": "lamp"})}
    made = {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}
    return [made, {"role": "tool", "tool_call_id": id, "content": "lamp: glows"}]


CHATS: dict[str, list[Any]] = {
    "plain": [USER],
    "system": [SYSTEM, USER, SAID, MORE],
    "two heads": [SYSTEM, LATE, USER],
    "late": [SYSTEM, USER, SAID, LATE, MORE],
    "late without a head": [USER, SAID, LATE, MORE],
    "late at the end": [SYSTEM, USER, LATE],
    "late behind an answer": [SYSTEM, USER, SAID, LATE],
    "late behind the user": [SYSTEM, USER, LATE, SAID, MORE],
    "two users": [SYSTEM, USER, MORE],
    "two users later": [USER, SAID, USER, MORE, AGAIN, USER],
    "two answers": [USER, SAID, AGAIN, MORE],
    "answer first": [SAID, USER],
    "answer behind the system": [SYSTEM, SAID, USER],
    "system alone": [SYSTEM],
    "call": [SYSTEM, USER, *_call("abcdefghi")],
    "call and user": [USER, *_call("abcdefghi"), MORE, SAID, USER],
    "call and late": [USER, *_call("abcdefghi"), LATE, SAID, USER],
    "long id": [USER, *_call("toolu_01A09q90qw90lq917835lq9"), SAID, USER],
    "two results": [USER, *_call("abcdefghi"), *_call("bbcdefghi"), SAID, MORE],
}


@pytest.mark.parametrize("name", CHATS)
def test_no_chat_is_refused_and_nothing_is_lost(served: Any, name: str) -> None:
    template, engine, tokenizer, at = served
    body = {"model": "reader", "messages": CHATS[name]}
    response = at.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    text = tokenizer.decode(engine.job.ids)
    told = [message["content"] for message in CHATS[name] if message["content"]]
    assert [part for part in told if text.count(part) < 1] == []
    places = [text.index(part) for part in dict.fromkeys(told)]
    assert places == sorted(places)  # in their order
    if any("tool_calls" in message for message in CHATS[name]) and template != "drops":
        assert "look" in text
        assert "lamp" in text.partition("glows")[0].rpartition("look")[2]
    shown = [{**message, "role": message["role"].replace("developer", "system")} for message in CHATS[name]]
    for message in shown:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            arguments = {"arguments": json.loads(call["function"]["arguments"])}
            message["tool_calls"] = [call | {"function": call["function"] | arguments}]
    try:
        plain = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    except Exception:
        assert "x-kvboost-changed" in response.headers
        return
    taken_for_an_answer = (template, name) == ("llama2", "late at the end")  # by its place
    if all(part in plain for part in told) and not taken_for_an_answer:
        assert "x-kvboost-changed" not in response.headers
        assert list(engine.job.ids) == tokenizer.encode(plain, add_special_tokens=False)
    else:
        assert response.headers["x-kvboost-changed"]


@pytest.mark.parametrize("name", CHATS)
def test_prompts_go_on_as_they_began(served: Any, name: str) -> None:
    """Each turn's prompt begins with the one before, up to what closes its last message."""
    _, engine, tokenizer, at = served
    chat, before = CHATS[name], ""
    for turn in (chat, [*chat, AGAIN, MORE], [*chat, AGAIN, MORE, SAID, LATE, USER]):
        assert at.http.post("/v1/chat/completions", json={"model": "reader", "messages": turn}).status_code == 200
        text = tokenizer.decode(engine.job.ids)
        opening = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
        opening = opening.rpartition(USER["content"])[2]  # what closes the user's message, and begins an answer
        head = before.removesuffix(opening)
        if turn is not chat and chat[-1]["role"] not in ("assistant", "system"):
            assert text.startswith(head)
        elif before:
            shown = [part["content"] for part in chat[:-1] if part["content"]]
            assert all(part in text for part in shown)
        before = text


def _bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    late = {"role": "system", "content": LATE["content"]}
    texts = [USER, SAID, late, MORE]
    yield "/v1/chat/completions", {"messages": [SYSTEM, *texts]}
    yield "/v1/responses", {"instructions": SYSTEM["content"], "input": texts}
    yield "/v1/messages", {"system": SYSTEM["content"], "messages": texts, "max_tokens": 5}
    yield "/api/chat", {"messages": [SYSTEM, *texts], "stream": False}


@pytest.mark.parametrize(("route", "body"), list(_bodies()))
def test_all_apis(served: Any, route: str, body: dict[str, Any]) -> None:
    _, engine, tokenizer, at = served
    response = at.http.post(route, json={"model": "reader"} | body)
    assert response.status_code == 200, response.text
    text = tokenizer.decode(engine.job.ids)
    places = [text.index(part["content"]) for part in (SYSTEM, USER, SAID, LATE, MORE)]
    assert places == sorted(places)


_LOOKED: dict[str, Any] = {"id": "toolu_1", "name": "look", "input": {"at": "lamp"}}
_RESULT: dict[str, Any] = {"tool_use_id": "toolu_1", "content": "It glows."}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER, *_call("toolu_1"), *_call("toolu_2")]}),
        (
            "/v1/messages",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", **_LOOKED}]},
                    {"role": "user", "content": [{"type": "tool_result", **_RESULT}]},
                ],
                "max_tokens": 5,
            },
        ),
        (
            "/v1/responses",
            {
                "input": [
                    USER,
                    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": "It glows."},
                ]
            },
        ),
    ],
)
def test_results_have_the_name_of_their_tool(route: str, body: dict[str, Any]) -> None:
    """Some templates write it, such as FunctionGemma's, while clients send the id of the call alone."""
    tokenizer: Any = load_embedded()[1]
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}response:{{ m.name or 'unknown' }}{{ m.content }}"
        "{% else %}{{ m.content }}{{ m.tool_calls }}{% endif %}\n{% endfor %}"
    )
    engine = FakeEngine("Yes.")
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        response = at.http.post(route, json={"model": "reader"} | body)
    assert response.status_code == 200, response.text
    text = tokenizer.decode(engine.job.ids)
    assert "response:look" in text
    assert "unknown" not in text
    assert "x-kvboost-changed" not in response.headers


@pytest.mark.parametrize("refuses", [False, True])
def test_templates_of_one_call_in_a_message(refuses: bool) -> None:
    """The template of gpt-oss writes the first of several calls, and that of Llama 3.1 refuses several."""
    tokenizer: Any = load_embedded()[1]
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.tool_calls %}"
        + ("{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}" * refuses)
        + "{{ m.content }}call {{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments.at }}"
        "{% else %}{{ m.role }} {{ m.content }}{% endif %};{% endfor %}"
    )
    engine = FakeEngine("Yes.")
    [lamp, glows], [fan, turns] = _call("call_lamp_1"), _call("call_fan_2")
    fan["tool_calls"][0]["function"]["arguments"] = json.dumps({"at": "fan"})
    both = {**lamp, "content": "Both. ", "tool_calls": [*lamp["tool_calls"], *fan["tool_calls"]]}
    chat = [USER, both, {**turns, "content": "It turns."}, glows, MORE]
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        response = at.http.post("/v1/chat/completions", json={"messages": chat})
    assert response.status_code == 200, response.text
    assert response.headers["x-kvboost-changed"] == "calls-parted"
    assert tokenizer.decode(engine.job.ids).split(";")[1:5] == [
        "Both. call look lamp",
        "tool lamp: glows",
        "call look fan",
        "tool It turns.",
    ]


def test_arguments_of_any_length_are_told_apart() -> None:
    """What a template does with messages is asked for each set of arguments that clients send."""
    tokenizer: Any = load_embedded()[1]
    tokenizer.chat_template = "{% for m in messages %}{% if m.role != 'system' or whole %}{{ m.content }}\n" + (
        "{% endif %}{% endfor %}"
    )
    engine = FakeEngine("Yes.")
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        for whole in (True, False, True):
            told = {"about": "x" * 2000, "whole": whole}
            body = {"model": "reader", "messages": [SYSTEM, USER], "chat_template_kwargs": told}
            assert at.http.post("/v1/chat/completions", json=body).status_code == 200
            text = tokenizer.decode(engine.job.ids)
            assert SYSTEM["content"] in text
            assert USER["content"] in text


@pytest.mark.parametrize("function", ["tool", "tool.function"])
def test_tools_are_written_as_the_template_takes_them(function: str) -> None:
    """The template of Apertus takes functions alone, and refuses OpenAI's objects around them."""
    tokenizer: Any = load_embedded()[1]
    tokenizer.chat_template = (
        f"{{% for tool in tools or [] %}}{{% set f = {function} %}}{{{{ '// ' + f.description + ' type ' + f.name }}}}"
        "{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        "{{ '<|tools_prefix|>[{\"' + f.name + '\": ' + f.arguments }}{% endfor %}{% endfor %}"
    )
    engine = FakeEngine('<|tools_prefix|>[{"look": {"at": "the lamp"}}]')
    look = {"name": "look", "description": "Looks around.", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1", "content": "Ah."},
    ]
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        for messages in ([USER], said):
            body = {"messages": messages, "tools": [{"type": "function", "function": look}]}
            response = at.http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            text = tokenizer.decode(engine.job.ids)
            assert "// Looks around. type look" in text
            assert text.count('<|tools_prefix|>[{"look": {}') == len(messages) // 3
            [found] = response.json()["choices"][0]["message"]["tool_calls"]
            assert found["function"] == {"name": "look", "arguments": '{"at": "the lamp"}'}


def test_what_templates_do() -> None:
    tokenizer: Any = load_embedded()[1]

    def of(template: str) -> Abilities:
        def render(messages: Any) -> str | None:
            try:
                return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
            except Exception:
                return None

        return abilities_of(render)

    assert of(TEMPLATES["mistral"]).long_ids == "refused"
    assert of(TEMPLATES["mistral"]).tool == of(TEMPLATES["mistral"]).system == "taken"
    assert (of(TEMPLATES["gemma"]).system, of(TEMPLATES["gemma"]).tool) == ("refused", "refused")
    assert (of(TEMPLATES["drops"]).late_system, of(TEMPLATES["drops"]).tool) == ("dropped", "dropped")
    assert (of(TEMPLATES["texts"]).calls, of(TEMPLATES["texts"]).text_calls) == ("refused", "taken")
    assert of(TEMPLATES["first"]).late_system == "refused"
    twice = "(messages | map(attribute='role') | join).count('system') > 1"
    only_one = f"{{{{ messages }}}}{{% if {twice} %}}{{{{ raise_exception() }}}}{{% endif %}}"
    assert (of(only_one).system, of(only_one).late_system) == ("taken", "refused")


def test_what_is_taken_stays_as_it_is() -> None:
    every: Any = {name: "taken" for name in Abilities.__slots__}
    taken = Abilities(**every)
    for chat in CHATS.values():
        plain = [{**message, "content": message["content"] or ""} for message in chat]
        assert adapted(plain, taken) == (plain, [])


@pytest.mark.parametrize("ability", ["taken", "dropped", "refused"])
@pytest.mark.parametrize("dropped_only", [False, True])
def test_a_chat_in_which_user_and_assistant_take_turns_is_as_any_template_takes_it(
    ability: Any, dropped_only: bool
) -> None:
    """So the server does not adapt it; any other may be changed."""
    abilities = Abilities(**dict.fromkeys(Abilities.__slots__, ability))
    turns = [{"role": role, "content": role} for role in ("user", "assistant") * 3]
    for count in range(1, 7):
        chat = turns[:count]
        assert _Chat(chat, [], Rendering()).alternates
        assert adapted(chat, abilities, dropped_only=dropped_only) == (chat, [])
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
    others: list[list[dict[str, Any]]] = [
        [turns[0], turns[0]],
        turns[1:],
        [turns[0], turns[1], turns[1]],
        [{"role": "system", "content": ""}, *turns],
        [turns[0], {"role": "assistant", "content": "", "tool_calls": [call]}],
        [turns[0], turns[1], {"role": "tool", "content": "", "tool_call_id": "a"}],
    ]
    for chat in others:
        assert not _Chat(chat, [], Rendering()).alternates
        if ability == "refused" and not dropped_only:
            assert adapted(chat, abilities)[1]


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def _calls(content: str, *ids: str, arguments: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"a": "é"} if arguments is None else arguments}
    return _said("assistant", content, tool_calls=[{"id": id, "function": function} for id in ids], **more)


S, S2, U, U2, A, A2 = (
    _said(role, content)
    for role, content in (
        *(("system", "Be short."), ("system", "Be kind.")),
        *(("user", "Hello."), ("user", "Who?"), ("assistant", "Hi."), ("assistant", "Me.")),
    )
)
CALL, ONE = _calls("", "abc123xyz"), _said("tool", "1", tool_call_id="abc123xyz")
TWO, NAMELESS = _said("tool", "2", tool_call_id="bbc123xyz", name="look"), _said("tool", "3")
BOTH = _calls("So:", "abc123xyz", "bbc123xyz", reasoning_content="Hm.")
FIRST, SECOND = _calls("So:", "abc123xyz", reasoning_content="Hm."), _calls("", "bbc123xyz")
AS_TEXT = 'Call of look: {"a": "é"}'
LONG = ("call_1", "abc-12345", "äbc123xyz", "abc123xyz0", "")
# What a template lacks, a chat, the chat that it takes, and the changes.
ADAPTED: list[tuple[str, list[Any], list[Any], list[str]]] = [
    ("system", [S, U], [_said("user", "Be short."), U], ["system-as-user"]),
    ("system", [S, S2, U], [_said("user", "Be short.\n\nBe kind."), U], ["systems-merged", "system-as-user"]),
    ("system", [U, A, S2], [U, A, _said("user", "Be kind.")], ["system-as-user"]),
    ("lone_system", [S], [_said("user", "Be short.")], ["system-as-user"]),
    ("lone_system", [S, U], [S, U], []),
    ("users", [U, U2, A, U], [_said("user", "Hello.\n\nWho?"), A, U], ["users-merged"]),
    ("assistants", [U, A, A2], [U, _said("assistant", "Hi.\n\nMe.")], ["assistants-merged"]),
    (
        "assistants",
        [U, CALL, BOTH],
        [U, _calls("So:", "abc123xyz", "abc123xyz", "bbc123xyz", reasoning_content="Hm.")],
        ["assistants-merged"],
    ),
    (
        "assistants",
        [U, _said("assistant", "", reasoning_content="Oh."), BOTH],
        [U, BOTH | {"reasoning_content": "Oh.\n\nHm."}],
        ["assistants-merged"],
    ),
    ("first_assistant", [A, U], [_said("user", "(The assistant begins.)"), A, U], ["user-added"]),
    ("first_assistant", [S, A, U], [S, _said("user", "(The assistant begins.)"), A, U], ["user-added"]),
    ("first_assistant", [S], [S], []),
    (
        "tool",
        [U, CALL, ONE],
        [U, _said("assistant", AS_TEXT), _said("user", "Result:\n1")],
        ["calls-as-text", "result-as-user"],
    ),
    (
        "tool",
        [U, BOTH, TWO, A],
        [
            U,
            _said("assistant", f"So:\n{AS_TEXT}\n{AS_TEXT}", reasoning_content="Hm."),
            _said("user", "Result of look:\n2"),
            A,
        ],
        ["calls-as-text", "result-as-user"],
    ),
    ("user_after_tool", [U, CALL, ONE, U2], [U, CALL, ONE | {"content": "1\n\nWho?"}], ["user-into-result"]),
    ("user_after_tool", [U, CALL, ONE, A], [U, CALL, ONE, A], []),
    ("many_calls", [U, CALL, ONE], [U, CALL, ONE], []),
    ("many_calls", [U, BOTH, TWO, ONE, A], [U, FIRST, ONE, SECOND, TWO, A], ["calls-parted"]),
    ("many_calls", [U, BOTH, NAMELESS, TWO, ONE], [U, FIRST, NAMELESS, SECOND, TWO, ONE], ["calls-parted"]),
    ("many_calls", [U, BOTH, TWO], [U, FIRST, SECOND, TWO], ["calls-parted"]),
    ("many_calls", [U, BOTH], [U, FIRST, SECOND], ["calls-parted"]),
]
# The same where a template must refuse a chat before something is changed.
REFUSED: list[tuple[str, list[Any], list[Any], list[str]]] = [
    (
        "calls",
        [U, BOTH, ONE],
        [U, _calls("So:", "abc123xyz", "bbc123xyz", arguments='{"a": "é"}', reasoning_content="Hm."), ONE],
        ["arguments-as-text"],
    ),
    (
        "calls",
        [U, _calls("", "abc123xyz", arguments="{}")],
        [U, _calls("", "abc123xyz", arguments="{}")],
        ["arguments-as-text"],
    ),
    ("calls", [U, A], [U, A], []),
    (
        "reasoned_calls",
        [U, BOTH],
        [U, BOTH | {"content": "", "reasoning_content": "Hm.\n\nSo:"}],
        ["text-into-reasoning"],
    ),
    ("reasoned_calls", [U, CALL | {"reasoning_content": "Hm."}], [U, CALL | {"reasoning_content": "Hm."}], []),
    ("reasoned_calls", [U, CALL | {"content": "So:"}], [U, CALL | {"content": "So:"}], []),
    (
        "reasoned_calls",
        [U, CALL, ONE, A | {"reasoning_content": "Hm."}],
        [U, CALL, ONE, A | {"reasoning_content": "Hm."}],
        [],
    ),
]


@pytest.mark.parametrize(("lacks", "chat", "wanted", "changes"), [*ADAPTED, *REFUSED])
def test_each_thing_that_a_template_lacks(lacks: str, chat: Any, wanted: Any, changes: list[str]) -> None:
    """By itself; a chat that a template takes stays as it is, and one that it drops something of is no refused one."""
    every: Any = dict.fromkeys(Abilities.__slots__, "taken")
    for ability in ("taken", "dropped", "refused"):
        for dropped_only in (False, True):
            if ability == "dropped":
                is_lacking = (lacks, chat, wanted, changes) in ADAPTED
            else:
                is_lacking = ability == "refused" and not dropped_only
            found = adapted(chat, Abilities(**{**every, lacks: ability}), dropped_only=dropped_only)
            assert found == ((wanted, changes) if is_lacking else (chat, [])), (ability, dropped_only)


@pytest.mark.parametrize("ability", ["dropped", "refused"])
@pytest.mark.parametrize("dropped_only", [False, True])
def test_messages_of_the_system_that_are_no_first_ones(ability: Any, dropped_only: bool) -> None:
    every: Any = dict.fromkeys(Abilities.__slots__, "taken")
    late = Abilities(**{**every, "late_system": ability})
    for chat, wanted, changes in (
        ([S, U], [S, U], []),
        ([S, U, S2], [S, U, _said("user", "Be kind.")], ["system-as-user"]),
        ([S, S2, U], [_said("system", "Be short.\n\nBe kind."), U], ["systems-merged"]),
    ):
        assert adapted(chat, late, dropped_only=dropped_only) == (wanted, changes)


def test_calls_that_a_template_leaves_out_are_told() -> None:
    """It writes their results, as that of LFM 2.5."""
    told = abilities_of(lambda messages: "".join(message["content"] for message in messages))
    assert (told.named_calls, told.tool, told.many_calls) == ("dropped", "taken", "taken")
    for dropped_only in (False, True):
        assert adapted([U, CALL, ONE], told, dropped_only=dropped_only) == ([U, CALL, ONE], ["calls-left-out"])
        assert adapted([U, A, U], told, dropped_only=dropped_only) == ([U, A, U], [])


def test_calls_that_a_template_leaves_out_are_written_as_the_model_does() -> None:
    """With special tokens of the model's own, and none in the arguments, which come from clients."""
    tokenizer: Any = load_embedded()[1]
    tokenizer.add_tokens([AddedToken(f"<|tool_call_{mark}|>", special=True) for mark in ("start", "end")])
    tokenizer.chat_template = (
        "{% if tools %}{{ 'List of tools: [' }}{{ tools }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    )
    engine = FakeEngine("Yes.")
    made, result = _call("call_1")
    made["tool_calls"][0]["function"]["arguments"] = json.dumps({"at": 'a "<|tool_call_end|>"', "deep": [True, None]})
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        response = at.http.post("/v1/chat/completions", json={"messages": [USER, {**made, "content": "So."}, result]})
    assert response.status_code == 200, response.text
    assert response.headers["x-kvboost-changed"] == "calls-written"
    written = (
        'So.<|tool_call_start|>[look(at="a \\"<|tool_call_end|>\\"", deep=[True, None])]<|tool_call_end|><|im_end|>'
    )
    assert written in tokenizer.decode(engine.job.ids)
    ids = list(engine.job.ids)
    assert [ids.count(tokenizer.convert_tokens_to_ids(f"<|tool_call_{mark}|>")) for mark in ("start", "end")] == [1, 1]


def test_ids_that_a_template_may_refuse() -> None:
    every: Any = dict.fromkeys(Abilities.__slots__, "taken")
    for id in LONG:
        short = hashlib.sha256(id.encode()).hexdigest()[:9]
        result = [_said("tool", "1", tool_call_id=id)] if id else [_said("tool", "1")]
        made = [_said("tool", "1", tool_call_id=short)] if id else result
        for ability in ("dropped", "refused"):
            told = Abilities(**{**every, "long_ids": ability})
            assert adapted([U, _calls("", id), *result], told) == ([U, _calls("", short), *made], ["ids-shortened"])
            assert adapted([U, CALL, ONE, A], told) == ([U, CALL, ONE, A], [])
            assert adapted([U, _calls("", id)], told, dropped_only=True) == ([U, _calls("", id)], [])


@pytest.mark.parametrize(("text_calls", "tool"), [("refused", "taken"), ("dropped", "taken"), ("taken", "refused")])
def test_arguments_stay_objects_where_texts_are_no_help(text_calls: Any, tool: Any) -> None:
    every: Any = dict.fromkeys(Abilities.__slots__, "taken")
    told = Abilities(**{**every, "calls": "refused", "text_calls": text_calls, "tool": tool})
    assert "arguments-as-text" not in adapted([U, CALL, ONE], told)[1]
