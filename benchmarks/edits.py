"""Prompts that an agent has edited: what is computed again, how long it takes, and what it does to the answer.

    python benchmarks/edits.py [quality] [long] [ways] --out benchmarks/results
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from texts import Count, prose, source

Message = dict[str, str]

_RULES = (
    "You are a coding agent. You read files with read_file and answer questions about them. Read before you answer, "
    "and name the file that you mean."
)
_QUESTION = "What does the last file that you have read define? Answer in one or two sentences."
_LAST_TOKENS = 16  # always computed


@dataclass(frozen=True, slots=True)
class Edit:
    """A prompt, and what an agent makes of it.

    Args:
        kind: What is edited.
        before: Token ids of the prompt that was seen.
        after: Those of the prompt that is asked next.
    """

    kind: str
    before: list[int]
    after: list[int]

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt that the one before has nowhere, or in another order."""
        blocks = difflib.SequenceMatcher(None, self.before, self.after, autojunk=False).get_matching_blocks()
        return len(self.after) - sum(block.size for block in blocks)


def conversation(tokens: int, count: Count) -> list[Message]:
    """An agent's conversation of about so many tokens: rules with a clock, then thoughts, calls and results."""
    results = source(max(192, tokens // 10), count)
    thoughts = prose(96, count)
    messages = [{"role": "system", "content": f"Time: 2024-05-17 09:41:07. Step 9. {_RULES}"}]
    messages.append({"role": "user", "content": "Read the files one by one, and remember what they define."})
    total = sum(count(message["content"]) + 8 for message in messages) + count(_QUESTION) + 16
    for result, thought in zip(results, thoughts, strict=False):
        name = result.split("\n", 1)[0].removeprefix("# ")
        step = [
            {"role": "assistant", "content": f"<think>\n{thought}\n</think>\nread_file({name!r})"},
            {"role": "user", "content": f"Result of read_file:\n{result}"},
        ]
        total += sum(count(message["content"]) + 8 for message in step)
        if total > tokens:
            break
        messages += step
    return [*messages, {"role": "user", "content": _QUESTION}]


def _in_head(old: str, new: str) -> Callable[[list[Message]], list[Message]]:
    return lambda messages: [_changed(messages[0], old, new), *messages[1:]]


def _changed(message: Message, old: str, new: str) -> Message:
    assert old in message["content"]
    return {**message, "content": message["content"].replace(old, new, 1)}


def _result_cut(messages: list[Message]) -> list[Message]:
    at = _result(messages, 1 / 3)
    return _with(messages, at, "Result of read_file:\n[removed to save room]")


def _result_replaced(messages: list[Message]) -> list[Message]:
    at = _result(messages, 1 / 3)
    lines = messages[at]["content"].split("\n")
    return _with(messages, at, "\n".join([*lines[: len(lines) // 2], "[the file ends here]"]))


def _without_thoughts(messages: list[Message]) -> list[Message]:
    return [{**message, "content": message["content"].split("</think>\n")[-1]} for message in messages]


def _message_inserted(messages: list[Message]) -> list[Message]:
    at = _result(messages, 1 / 2) + 1
    note = {"role": "user", "content": "Note: two of the files were changed this morning. Go on with the next one."}
    return [*messages[:at], note, *messages[at:]]


def _line_edited(messages: list[Message]) -> list[Message]:
    at = _result(messages, 1 / 2)
    lines = messages[at]["content"].split("\n")
    middle = next(i for i in range(len(lines) // 2, len(lines)) if len(lines[i].split()) > 3)
    lines[middle] += "  # checked, and left as it was"
    return _with(messages, at, "\n".join(lines))


def _result(messages: list[Message], share: float) -> int:
    """The index of the result that stands at this share of the conversation."""
    at = int(len(messages) * share)
    return next(i for i in range(at, len(messages)) if messages[i]["content"].startswith("Result"))


def _with(messages: list[Message], at: int, content: str) -> list[Message]:
    return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]


EDITS: dict[str, Callable[[list[Message]], list[Message]]] = {
    "timestamp in the head": _in_head("09:41:07", "09:43:52"),
    "counter in the head, a digit longer": _in_head("Step 9.", "Step 10."),
    "result of a tool removed": _result_cut,
    "result of a tool cut in half": _result_replaced,
    "thinking taken out of the history": _without_thoughts,
    "message inserted in the middle": _message_inserted,
    "line of a file edited": _line_edited,
}


def traces(tokens: int, tokenizer: Any) -> list[Edit]:
    """Every kind of edit of one conversation."""

    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    def ids(messages: Sequence[Message]) -> list[int]:
        return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)["input_ids"])

    messages = conversation(tokens, count)
    before = ids(messages)
    return [Edit(kind, before, ids(edit(messages))) for kind, edit in EDITS.items()]
