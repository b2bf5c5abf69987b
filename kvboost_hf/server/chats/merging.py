"""Rewrites messages for chat templates that take fewer kinds of chats than APIs do, and leaves changing lines out.

Lines of system prompts that change with each request mean nothing to a model, and nothing behind them would be found.

Templates raise errors for roles that do not alternate, for messages of the system, or for results of tools; or they
leave such messages out. `Abilities` says which, by rendering small chats, so that a message is written in the same way
in each request of a chat, and prompts that go on begin as before.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from kvboost_hf.server.chats.values import arguments_of
from kvboost_hf.server.http.metrics import note_changed

Messages = list[dict[str, Any]]
Ability = Literal["taken", "dropped", "refused"]
Write = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str | None]
_BETWEEN = "\n\n"  # texts of several messages
_ID_CHARS = 9  # which Mistral's templates want
_NO_USER = "(The assistant begins.)"
BILLING = "x-anthropic-billing-header"  # Claude Code's first line, with a number that changes with each request
_START = re.compile(rf"[ \t]*{BILLING}:[ \t]*", re.IGNORECASE)
_PAIR = re.compile(r"[\w.-]+=[^;\s]*;?[ \t]*")
_LINE_CHARS = 1000  # of a line that patterns are tried on
_BREAKS = "\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a chat template does with messages that not all of them take; by default it refuses them."""

    system: Ability = "refused"  # with a message of the system before all others
    lone_system: Ability = "refused"  # with one of the system and no others
    late_system: Ability = "refused"  # with others of the system
    users: Ability = "refused"  # with two of the user in a row
    assistants: Ability = "refused"  # with two of the assistant in a row
    first_assistant: Ability = "refused"  # with one of the assistant before all others
    tool: Ability = "refused"  # with results of tools
    user_after_tool: Ability = "refused"  # with one of the user behind a result
    calls: Ability = "refused"  # with calls whose arguments are objects
    text_calls: Ability = "refused"  # with calls whose arguments are JSON as a text
    named_calls: Ability = "refused"  # with calls, which it may leave out where it shows their results
    many_calls: Ability = "refused"  # with several calls in one message
    reasoned_calls: Ability = "refused"  # with calls behind a text and reasoning
    long_ids: Ability = "refused"  # with ids of calls that are longer than nine characters


def abilities_of(render: Callable[[Messages], str | None]) -> Abilities:
    """What a template does, by `render`, which makes a text of a chat, or None where the template refuses it."""

    def try_all(*chats: str, **options: Any) -> Ability:
        found = [_try(render, chat, **options) for chat in chats]
        return next((ability for ability in found if ability != "taken"), "taken")

    system = try_all("su")
    calls = try_all("uct", "uctau")
    as_text = calls == "refused" and try_all("uct", as_text=True) == "taken"
    how = {"as_text": as_text}
    return Abilities(
        system=system,
        lone_system=try_all("s"),
        late_system=try_all("ssu", "suasu", "susau") if system == "taken" else try_all("uasu", "usau"),
        users=try_all("uu", "uuau"),
        assistants=try_all("uaau"),
        first_assistant=try_all("au"),
        tool=try_all("uct", **how),
        user_after_tool=try_all("uctu", "uctuau", **how),
        calls=calls,
        text_calls="taken" if as_text else "refused",
        named_calls=try_all("uct", named=True, **how),
        many_calls=try_all("uctt", many=True, **how),
        reasoned_calls=try_all("uct", reasons=True, **how),
        long_ids=try_all("uct", long_id=True, **how),
    )


def _try(
    render: Callable[[Messages], str | None],
    chat: str,
    *,
    as_text: bool = False,
    named: bool = False,
    many: bool = False,
    reasons: bool = False,
    long_id: bool = False,
) -> Ability:
    """What a template does with a chat, given by the first letters of its roles, and "c" for a call."""
    ids = [each + "jklmno" * long_id for each in ("abcdefghi", "bbcdefghi")]
    arguments = json.dumps({"a": "b"}) if as_text else {"a": "b"}
    names = ("probefirst", "probesecond") if many else ("probefirst",) if named else ("look",)
    messages: Messages = []
    results = 0
    for n, letter in enumerate(chat):
        role = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}[letter]
        message: dict[str, Any] = {"role": role, "content": "" if letter == "c" else f"probe{n}text"}
        if letter == "c":
            functions = [{"name": name, "arguments": arguments} for name in names]
            pairs = zip(ids, functions, strict=False)
            message["tool_calls"] = [{"id": id, "type": "function", "function": one} for id, one in pairs]
            if reasons:
                message |= {"content": f"probe{n}text", "reasoning_content": f"probe{n}thought"}
        if letter == "t":
            message |= {"tool_call_id": ids[results % len(names)], "name": names[results % len(names)]}
            results += 1
        messages.append(message)
    text = render(messages)
    if text is None:
        return "refused"
    shown = all(message["content"] in text for message in messages)
    lost = (many and "probefirst" in text and "probesecond" not in text) or (named and "probefirst" not in text)
    return "taken" if shown and not lost else "dropped"


def adapted(
    messages: Messages, abilities: Abilities, *, dropped_only: bool = False, write: Write | None = None
) -> tuple[Messages, list[str]]:
    """Messages as a template takes them, and the names of what was changed.

    With `dropped_only` only messages that the template would leave out. `write` gives calls as the model writes them.

    Example:
        >>> chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello."}]
        >>> adapted(chat, Abilities())
        ([{'role': 'user', 'content': 'Be short.\\n\\nHello.'}], ['system-as-user', 'users-merged'])
    """

    def lacks(ability: Ability) -> bool:
        return ability == "dropped" or (ability == "refused" and not dropped_only)

    changes: dict[str, None] = {}
    found = [dict(message) for message in messages]
    heads = sum(message.get("role") == "system" for message in found)
    none = lacks(abilities.system) or (heads == len(found) and lacks(abilities.lone_system))
    # A template may take one of several for the assistant's, by its place, and refuse it in the next turn.
    if none or (heads and abilities.late_system != "taken"):
        found = list(_without_late_systems(found, none, changes))
    if lacks(abilities.tool):
        found = [_without_tools(message, changes) for message in found]
    elif lacks(abilities.many_calls):
        found = list(_with_one_call_each(found, changes))
    calls = not lacks(abilities.tool) and any(message.get("tool_calls") for message in found)
    if calls and abilities.named_calls == "dropped":
        found = [_with_written_calls(message, write, changes) for message in found]
    if calls and not dropped_only:
        if abilities.calls == "refused" and abilities.text_calls == "taken":
            found = [_with_text_arguments(message, changes) for message in found]
        if abilities.reasoned_calls == "refused":
            found = [_with_reasoned_text(message, changes) for message in found]
        if abilities.long_ids != "taken":
            found = [_with_short_ids(message, changes) for message in found]
    joined: Messages = []
    for message in found:
        role, before = message.get("role"), joined[-1].get("role") if joined else None
        if role == before == "user" and lacks(abilities.users):
            changes["users-merged"] = None
        elif role == before == "assistant" and lacks(abilities.assistants):
            changes["assistants-merged"] = None
        elif role == "user" and before == "tool" and lacks(abilities.user_after_tool):
            changes["user-into-result"] = None
        else:
            joined.append(message)
            continue
        joined[-1] = _joined(joined[-1], message)
    first = next((n for n, message in enumerate(joined) if message.get("role") != "system"), None)
    if first is not None and joined[first].get("role") == "assistant" and lacks(abilities.first_assistant):
        changes["user-added"] = None
        joined.insert(first, {"role": "user", "content": _NO_USER})
    return joined, list(changes)


def _without_late_systems(messages: Messages, none: bool, changes: dict[str, None]) -> Iterator[dict[str, Any]]:
    """The system's messages: those at the beginning as one, or as the user's if there may be none; others as his."""
    heads = 0
    while heads < len(messages) and messages[heads].get("role") == "system":
        heads += 1
    if heads > 1:
        changes["systems-merged"] = None
    if heads:
        head = messages[0]
        for message in messages[1:heads]:
            head = _joined(head, message)
        yield _of_user(head, changes) if none else head
    for message in messages[heads:]:
        yield _of_user(message, changes) if message.get("role") == "system" else message


def _of_user(message: dict[str, Any], changes: dict[str, None]) -> dict[str, Any]:
    changes["system-as-user"] = None
    return {**message, "role": "user"}


def _without_tools(message: dict[str, Any], changes: dict[str, None]) -> dict[str, Any]:
    """A call as a text of the assistant, and a result as one of the user."""
    if message.get("role") == "tool":
        changes["result-as-user"] = None
        name = f" of {message['name']}" if message.get("name") else ""
        return {"role": "user", "content": f"Result{name}:\n{message['content']}"}
    if not message.get("tool_calls"):
        return message
    changes["calls-as-text"] = None
    found = {name: value for name, value in message.items() if name != "tool_calls"}
    lines = [
        f"Call of {call['function']['name']}: {_as_text(call['function']['arguments'])}"
        for call in message["tool_calls"]
    ]
    return {**found, "content": "\n".join(filter(None, [found["content"], *lines]))}


def _with_written_calls(message: dict[str, Any], write: Write | None, changes: dict[str, None]) -> dict[str, Any]:
    """Calls as the model writes them; in no other form, as models repeat what they read."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [(one["name"], json.loads(arguments_of(_as_text(one["arguments"])) or "{}")) for one in functions]
    text = write(calls) if write is not None else None
    changes["calls-left-out" if text is None else "calls-written"] = None
    return message if text is None else {**message, "content": f"{message['content']}{text}"}


def _with_one_call_each(messages: Messages, changes: dict[str, None]) -> Iterator[dict[str, Any]]:
    """Calls of one message in messages of their own, each before its result."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(calls := message.get("tool_calls", ())) < 2:
            yield message
            continue
        changes["calls-parted"] = None
        results: Messages = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": "assistant", "content": ""}
            own = next(
                (n for n, each in enumerate(results) if each.get("tool_call_id") in (None, call.get("id"))), None
            )
            if own is not None:
                yield results.pop(own)
        yield from results


def _with_text_arguments(message: dict[str, Any], changes: dict[str, None]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    changes["arguments-as-text"] = None
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _with_reasoned_text(message: dict[str, Any], changes: dict[str, None]) -> dict[str, Any]:
    """A text between reasoning and calls as a part of the reasoning."""
    thoughts = message.get("reasoning_content")
    if not (thoughts and message["content"] and message.get("tool_calls")):
        return message
    changes["text-into-reasoning"] = None
    return {**message, "content": "", "reasoning_content": f"{thoughts}{_BETWEEN}{message['content']}"}


def _with_short_ids(message: dict[str, Any], changes: dict[str, None]) -> dict[str, Any]:
    found = dict(message)
    if message.get("tool_calls"):
        found["tool_calls"] = [{**call, "id": _short(call.get("id", ""), changes)} for call in message["tool_calls"]]
    if message.get("tool_call_id"):
        found["tool_call_id"] = _short(message["tool_call_id"], changes)
    return found


def _short(id: str, changes: dict[str, None]) -> str:
    """An id of nine letters and digits, the same for each id."""
    if len(id) == _ID_CHARS and id.isascii() and id.isalnum():
        return id
    changes["ids-shortened"] = None
    return hashlib.sha256(id.encode()).hexdigest()[:_ID_CHARS]


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two messages as one of the first one's role."""
    found = {**one, "content": _BETWEEN.join(filter(None, (one["content"], other["content"])))}
    thoughts: Sequence[str] = [each["reasoning_content"] for each in (one, other) if each.get("reasoning_content")]
    if thoughts:
        found["reasoning_content"] = _BETWEEN.join(thoughts)
    if calls := [*one.get("tool_calls", ()), *other.get("tool_calls", ())]:
        found["tool_calls"] = calls
    return found


def without_changing_lines(messages: Sequence[dict[str, Any]], patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Messages without changing lines of the system, those that a pattern matches as a whole; they are noted.

    Example:
        >>> text = "x-anthropic-billing-header: cc_version=2; cch=1a;\\nBe short."
        >>> without_changing_lines([{"role": "system", "content": text}], [])
        [{'role': 'system', 'content': 'Be short.'}]
    """
    found = []
    for message in messages:
        text = message.get("content")
        if message.get("role") == "system" and isinstance(text, str):
            kept = _without(text, patterns)
            if not kept and text:
                continue
            message = message if kept == text else {**message, "content": kept}
        found.append(message)
    return found or list(messages)


def _without(text: str, patterns: Sequence[str]) -> str:
    if not patterns and BILLING not in text.lower():
        return text
    lines = text.splitlines(keepends=True)
    kept = [_kept(line, patterns) for line in lines]
    whole = "".join(kept)
    return whole if kept[:1] == lines[:1] else whole.lstrip(_BREAKS)


def _kept(line: str, patterns: Sequence[str]) -> str:
    """A line without what changes; empty if all of it does."""
    if start := _START.match(line):
        note_changed(f"left-out:{BILLING}")
        end = start.end()
        while pair := _PAIR.match(line, end):
            end = pair.end()
        return line[end:].lstrip(_BREAKS) if end > start.end() else ""
    bare = line.rstrip(_BREAKS)
    if len(bare) <= _LINE_CHARS:
        for number, pattern in enumerate(patterns, 1):
            if _compiled(pattern).fullmatch(bare):
                note_changed(f"left-out:strip-head-{number}")
                return ""
    return line


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
