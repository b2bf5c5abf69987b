"""What is warmed for chats is what they begin with, whatever the chat template does; and who cannot be is told so."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, KVBoost, ReusePolicy
from kvboost_hf.assets import load_embedded
from tests.internals.cache import ChatTemplate

pytestmark = pytest.mark.daily

TEXT = "You read documents and answer questions about them. " * 4
SYSTEM, USER = {"role": "system", "content": TEXT.strip()}, {"role": "user", "content": TEXT.strip()}
ANSWER = {"role": "assistant", "content": "Anna lives in Oslo."}
CALLS = [{"id": "a23456789", "type": "function", "function": {"name": "look", "arguments": {"at": "Oslo"}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "a23456789", "name": "look", "content": "Anna lives in Oslo. " * 4}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]

_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As those of Gemma, of the first Mistrals, of Llama 3.1, and of Qwen 3.
_STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
_SYSTEM_LAST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}{% if not turns %}"
    "{{ raise_exception('a user must speak') }}{% endif %}<|im_start|>"
    "{% for m in turns %}{% if m.role == 'user' %}{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | "
    "tojson }}{% endif %}[INST] {% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
_DATED = "<|im_start|>date\nToday is {{ strftime_now('%d %b %Y, %H:%M') }}.<|im_end|>\n" + _TURNS
_THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
    "loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n"
    "</think>{% endif %}{% endif %}"
)
TEMPLATES = {
    "chatml": _TURNS,
    "default system": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    + _TURNS,
    "tools": "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + _TURNS,
    "documents": "{% for d in documents or () %}<|im_start|>{{ d.text }}<|im_end|>{% endfor %}" + _TURNS,
    "switched": "{% if quick %}<|im_start|>Be quick.<|im_end|>{% endif %}" + _TURNS,
    "strict": _STRICT,
    "system last": _SYSTEM_LAST,
    "dated": _DATED,
    "thinking": _THINKING,
    "bare": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "parts": _TURNS.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"),
}


@pytest.fixture(scope="module")
def reader() -> tuple[PreTrainedModel, Any]:
    return load_embedded()


@pytest.fixture
def tokenizer(reader: tuple[PreTrainedModel, Any]) -> Any:
    """The embedded model's, for a template of one's own."""
    template = reader[1].chat_template
    yield reader[1]
    reader[1].chat_template = template


def reused(
    model: PreTrainedModel, tokenizer: Any, store: ChunkStore, chat: list[Any], **given: Any
) -> tuple[int, int]:
    """How many tokens of a chat come from the store, and how many it has."""
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt", **given
    )
    cache = ChunkReuseCache(model, store)
    model.generate(**inputs, cache=cache, max_new_tokens=1)
    return cache.report.reused_tokens, cache.report.prompt_tokens


def parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@pytest.mark.parametrize(
    ("name", "messages", "goes_on", "given"),
    [
        ("chatml", [SYSTEM], [USER], {}),
        ("chatml", [SYSTEM, USER], " Who?", {}),
        ("chatml", [SYSTEM, USER, ANSWER], [USER], {}),
        ("chatml", [SYSTEM, USER, CALL], [RESULT], {}),
        ("chatml", [SYSTEM, USER, CALL, RESULT], [], {}),
        ("chatml", [USER, ANSWER, SYSTEM], [USER], {}),
        ("default system", [USER], "\n\nWho?", {}),
        ("tools", [SYSTEM], [USER], {"tools": TOOLS}),
        ("documents", [SYSTEM], [USER], {"documents": [{"title": "a", "text": TEXT}]}),
        ("switched", [SYSTEM], [USER], {"quick": True}),
        ("strict", [USER], " Who?", {}),
        ("strict", [USER, ANSWER], [USER], {}),
        ("system last", [SYSTEM], [USER], {"tools": TOOLS}),
        ("system last", [SYSTEM, USER, ANSWER], [USER], {}),
        ("thinking", [SYSTEM, USER, {**ANSWER, "reasoning_content": TEXT}], [USER], {"enable_thinking": False}),
        ("bare", [SYSTEM], [USER], {}),
        ("parts", [parts(SYSTEM)], [parts(USER)], {}),
        ("parts", [parts(SYSTEM), parts(USER)], " Who?", {}),
    ],
)
def test_chats_begin_with_what_was_warmed(
    reader: tuple[PreTrainedModel, Any],
    tokenizer: Any,
    name: str,
    messages: list[Any],
    goes_on: list[Any] | str,
    given: dict[str, Any],
) -> None:
    """All but the tail of a chunk, which is too short to be stored, is found; and a chat has little more before it."""
    tokenizer.chat_template = TEMPLATES[name]
    store, arguments = ChunkStore(reader[0], chunk_size=16), dict(given)
    tools = arguments.pop("tools", None)
    report = store.warm(messages, tokenizer=tokenizer, tools=tools, chat_template_kwargs=arguments)
    assert report.start_reason is None
    if isinstance(goes_on, str):
        last = messages[-1]["content"]
        content = last + goes_on if isinstance(last, str) else [{"type": "text", "text": last[0]["text"] + goes_on}]
        chat = [*messages[:-1], {**messages[-1], "content": content}]
    else:
        chat = [*messages, *goes_on]
    found, prompt = reused(reader[0], tokenizer, store, chat, **given)
    assert report.prompt_tokens - 8 < found <= report.prompt_tokens
    added = goes_on if isinstance(goes_on, str) else "".join(str(message["content"]) for message in goes_on)
    assert found >= prompt - len(tokenizer.encode(added)) - 16  # the rest: what the template writes around it


def test_results_of_calls_may_stand_where_no_message_of_the_user_can(tokenizer: Any) -> None:
    """As in templates that write them into the turn of the assistant, which a message of the user ends."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %} {{ m.name }}, {{ m.tool_call_id }}: {% else %}"
        "{{ '<|im_end|>\n' if loop.index0 }}<|im_start|>{{ m.role }}\n{% endif %}{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    template = ChatTemplate(tokenizer)
    for dropped in ("", "id"):  # some chats have no ids
        calls = [{name: value for name, value in call.items() if name != dropped} for call in CALLS]
        called: list[Any] = [SYSTEM, USER, {**CALL, "tool_calls": calls}]
        start = template.start(called).ids
        chat = template.encode([*called, {**RESULT, "tool_call_id": calls[0].get("id", "")}])
        assert start.tolist() == chat[: len(start)].tolist()
        assert len(start) > len(template.encode([SYSTEM, USER]))


@pytest.mark.parametrize("name", ["chatml", "parts"])
def test_the_last_text_of_the_user_may_go_on(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    template, form = ChatTemplate(tokenizer), parts if name == "parts" else dict[str, Any]
    start = template.start([form(SYSTEM), form(USER)]).ids
    chat = template.encode([form(SYSTEM), form({**USER, "content": USER["content"] + " Who?"})])
    assert start.tolist() == chat[: len(start)].tolist()
    assert len(start) > len(template.encode([form(SYSTEM)]))


def test_a_message_of_the_user_without_text_is_whole(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["parts"]
    template, chat = ChatTemplate(tokenizer), [parts(SYSTEM), {"role": "user", "content": []}]
    assert template.start(chat).ids.tolist() == template.encode(chat, False).tolist()


def test_a_date_is_told(reader: tuple[PreTrainedModel, Any], tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["dated"]
    report = (store := ChunkStore(reader[0], chunk_size=16)).warm([SYSTEM], tokenizer=tokenizer)
    head = len(tokenizer.encode("<|im_start|>date\nToday is "))
    assert f"writes the date behind the first {head} tokens" in str(report)
    assert reused(reader[0], tokenizer, store, [SYSTEM, USER])[0] >= report.prompt_tokens - 8  # today


def test_what_all_chats_share_may_be_too_short(reader: tuple[PreTrainedModel, Any], tokenizer: Any) -> None:
    store = ChunkStore(reader[0], chunk_size=16)
    tokenizer.chat_template = "<|im_start|>{{ messages[-1].content }}<|im_end|>" + _TURNS
    report = store.warm([SYSTEM], tokenizer=tokenizer)
    assert report.start_reason == "a start of 1 tokens is too short to be stored, which takes 8 or more"
    tokenizer.chat_template = "{{ messages[-1].content }}" + _TURNS
    with pytest.raises(ValueError, match="no first token in common"):
        store.warm([SYSTEM], tokenizer=tokenizer)


class TestTexts:
    """A text is warmed as it is, and the report says if no chat can begin with it."""

    @pytest.mark.parametrize("name", ["chatml", "default system", "tools", "strict", "system last", "dated"])
    def test_a_text_that_no_chat_begins_with(
        self, reader: tuple[PreTrainedModel, Any], tokenizer: Any, name: str
    ) -> None:
        tokenizer.chat_template = TEMPLATES[name]
        store = ChunkStore(reader[0], chunk_size=16)
        report = store.warm(TEXT, tokenizer=tokenizer)
        assert report.prompt_tokens == len(tokenizer.encode(TEXT))
        role = "user" if name == "strict" else "system"
        assert "no chat begins with this text: the chat template writes '<|im_start|>" in str(report)
        assert f"Warm the messages of such chats, [{{'role': '{role}', 'content': text}}]" in str(report)
        assert store.warm(tokenizer.encode(TEXT), tokenizer=tokenizer).start_reason == report.start_reason
        assert reused(reader[0], tokenizer, store, [USER])[0] == 0
        behind = store.warm(documents=[TEXT], prefix=TEXT, tokenizer=tokenizer)
        assert behind.start_reason == report.start_reason

    @pytest.mark.parametrize("name", ["chatml", "tools", "strict", "system last", "documents", "switched"])
    def test_a_text_that_a_template_has_written(
        self, reader: tuple[PreTrainedModel, Any], tokenizer: Any, name: str
    ) -> None:
        tokenizer.chat_template = TEMPLATES[name]
        given: dict[str, Any] = {"tools": TOOLS, "documents": [{"title": "a", "text": TEXT}], "quick": True}
        text = str(tokenizer.apply_chat_template([USER], tokenize=False, **given))
        assert ChunkStore(reader[0]).warm(text, tokenizer=tokenizer).start_reason is None

    def test_a_template_that_writes_nothing_before_it(
        self, reader: tuple[PreTrainedModel, Any], tokenizer: Any
    ) -> None:
        tokenizer.chat_template = TEMPLATES["bare"]
        store = ChunkStore(reader[0], chunk_size=16)
        assert store.warm(TEXT, tokenizer=tokenizer).start_reason is None
        assert reused(reader[0], tokenizer, store, [SYSTEM])[0] >= 32

    def test_no_template(self, reader: tuple[PreTrainedModel, Any], tokenizer: Any) -> None:
        tokenizer.chat_template = None
        assert ChunkStore(reader[0]).warm(TEXT, tokenizer=tokenizer).start_reason is None

    def test_the_first_token_of_texts(self, reader: tuple[PreTrainedModel, Any]) -> None:
        """Twice, where a template has written it and the tokenizer adds it; or where no chat has it."""
        model, tokenizer = load_embedded()
        bos = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
        store = ChunkStore(model)
        tokenizer.chat_template = bos + _TURNS
        text = str(tokenizer.apply_chat_template([SYSTEM], tokenize=False))
        assert "twice, as this text does: the tokenizer has added one" in str(store.warm(text, tokenizer=tokenizer))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert store.warm(ids, tokenizer=tokenizer).start_reason is None
        assert "before it. Warm the messages" in str(store.warm(TEXT, tokenizer=tokenizer))
        tokenizer.chat_template = TEMPLATES["bare"]
        assert f"no chat begins with {bos!r}, as this text does" in str(store.warm(TEXT, tokenizer=tokenizer))


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ({"text_or_ids": [SYSTEM]}, r"Warming messages needs `tokenizer`: store\.warm\(messages, tokenizer="),
            ({"text_or_ids": TEXT, "tools": TOOLS}, r"`tools` needs messages, .* got str\. Pass \[\{'role': 'system'"),
            (
                {"text_or_ids": [1, 2], "chat_template_kwargs": {"a": 1}},
                "`chat_template_kwargs` needs messages, .* list",
            ),
            ({"documents": [TEXT], "tools": TOOLS}, "`tools` needs messages"),
            ({"documents": [[SYSTEM]]}, "`documents` must be texts or ids, .* got messages"),
            ({"documents": [SYSTEM]}, "`documents` must be texts or ids, .* got messages"),
            (
                {"text_or_ids": [TEXT, TEXT]},
                "a text, ids or a list of messages, got list. Pass one text after the other",
            ),
            ({"text_or_ids": {"input_ids": [1, 2]}}, r"got dict. Pass \['input_ids'\] of it"),
            ({"text_or_ids": SYSTEM}, r"got dict. Pass \[message\]"),
            ({"text_or_ids": [[SYSTEM], [USER]]}, "a text, ids or a list of messages, got list. Pass one prompt"),
            ({"text_or_ids": b"abc"}, "a text, ids or a list of messages, got bytes. Pass one prompt"),
            ({"text_or_ids": [SYSTEM, "a"]}, "A chat must be a list of messages such as .* got one of type str"),
        ],
    )
    def test_arguments(self, reader: tuple[PreTrainedModel, Any], given: dict[str, Any], told: str) -> None:
        with pytest.raises(ValueError, match=told):
            ChunkStore(reader[0]).warm(**given, tokenizer=None if "needs `tokenizer`" in told else reader[1])

    @pytest.mark.parametrize(
        ("template", "messages", "told"),
        [
            (None, [SYSTEM], "Messages need a chat template, and TokenizersBackend has none"),
            (_STRICT, [SYSTEM], "The chat template refuses these messages: roles must alternate"),
            (_STRICT, [USER, USER], "The chat template refuses these messages: roles must alternate"),
            (_TURNS, [{"role": "user", "content": [{"type": "image"}]}], "Only the text of chats .* type 'image'"),
        ],
    )
    def test_messages(
        self, reader: tuple[PreTrainedModel, Any], tokenizer: Any, template: str | None, messages: Any, told: str
    ) -> None:
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=told):
            ChunkStore(reader[0]).warm(messages, tokenizer=tokenizer)


def test_documents_behind_a_system_message(reader: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = reader
    store, document = (
        ChunkStore(model, chunk_size=16),
        "Anna lives in Oslo. She plays the piano. The lamp is red. " * 12,
    )
    report = store.warm(documents=[document], prefix=[SYSTEM], tokenizer=tokenizer)
    assert report.start_reason is None
    cache = ChunkReuseCache(model, store, ReusePolicy(mode="blend"))
    chat = [SYSTEM, {"role": "user", "content": document + "Who?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    model.generate(**inputs, cache=cache, max_new_tokens=1)
    start = ChatTemplate(tokenizer).start([SYSTEM]).ids
    assert cache.report.exact_tokens >= len(start) - 16
    assert cache.report.moved_tokens >= len(tokenizer.encode(document)) - 16


def test_the_facade_takes_tools(reader: tuple[PreTrainedModel, Any], tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["tools"]
    engine = KVBoost(*reader, chunk_size=16)
    warmed = engine.warm([SYSTEM], tools=TOOLS)
    text = tokenizer.apply_chat_template([SYSTEM, USER], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert engine.generate(text, 1).cached_tokens >= warmed.token_count - 8
    assert warmed.report.start_reason is None
    assert engine.warm(text).report.start_reason is None
    assert engine.warm(TEXT).report.start_reason is None  # it becomes a message
    assert "no chat begins" in (engine.warm(TEXT + "<|im_end|>").report.start_reason or "no chat begins")
    with pytest.raises(ValueError, match="`tools` needs messages"):
        engine.warm(text, tools=TOOLS)
