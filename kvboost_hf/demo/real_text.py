"""Makes series of prompts on real text, for any model; their right answers are not known.

The text is that of the Python installation: its language reference, and the source of its standard library. Roles are
those of user and assistant alone, in turn, which every chat template takes.
"""

import json
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from kvboost_hf.assets.chat import Message, encode
from kvboost_hf.assets.texts import prose, source
from kvboost_hf.demo.series import Prompt, Prompts, Workload

# Tokens of the context, without those of answers. In a smaller one than the last, texts are shorter in proportion.
_LEAST, _LEAST_FOR_AGENT, _FULL = 512, 1536, 3600
_AGENT_TASK_TOKENS = 800  # at most; the task cannot be cut
_PASSAGE_TOKENS, _DOCUMENT_TOKENS, _NOTE_TOKENS, _RESULT_TOKENS = 190, 1500, 240, 380
_NOTES, _MOST_ANSWERS = 6, 8

_TURNS = (
    "Explain this passage of the Python reference in simple words.",
    "Thanks. What does this one say?",
    "And this? Which rule does it give?",
    "What follows from this for a beginner?",
    "Here is another. Summarize it in one sentence.",
    "How does this go with what we read before?",
    "Which words of this passage need an explanation?",
    "One more: what is its main point?",
)
_QUESTIONS = (
    "Summarize the text above in one sentence.",
    "Which terms does the text above define?",
    "Write a title for the text above.",
    "What must a programmer remember of the text above?",
    "Give one example of what the text above describes.",
    "For whom is the text above written?",
    "Which part of the text above is the hardest to understand?",
    "What does the text above not explain?",
)
_TOOLS = (
    ("list_files", "List the files of a folder.", {"folder": "string"}),
    ("read_file", "Read a file, or the lines of it from `first` to `last`.", {"path": "string", "first": "integer"}),
    ("search", "Find the lines that match a regular expression.", {"pattern": "string", "folder": "string"}),
    ("run_tests", "Run the tests of a folder, and return what they print.", {"folder": "string"}),
    ("write_note", "Keep a note for later.", {"text": "string"}),
)
_TASK = (
    "You are an agent that works on a Python project. In each step, think in one sentence, and call one tool as JSON, "
    'such as {{"tool": "read_file", "arguments": {{"path": "heapq.py"}}}}. The result comes back in the next message. '
    "The tools:\n{tools}\n\nThe task: find out what each module of the folder does, and which of them a newcomer "
    "should read first."
)


def workloads_for(config: PretrainedConfig, max_new_tokens: int) -> dict[str, Workload]:
    """The workloads by name, in sizes that fit into a model's context.

    Args:
        config: Of the model.
        max_new_tokens: Length of an answer; those of a chat go back in.

    Returns:
        Without the agent's transcript, where the context is too short for it.

    Raises:
        ValueError: the context is too short.
    """
    answers = _MOST_ANSWERS * max_new_tokens
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or _FULL + answers
    if longest - answers < _LEAST:
        raise ValueError(
            f"The model must take {_LEAST} tokens and {_MOST_ANSWERS} answers of {max_new_tokens}, but it takes "
            f"{longest} tokens. Pass a smaller `--max-new-tokens`, or name another model."
        )
    text = _RealText(longest - answers)
    found = {
        workload.name: workload
        for workload in (
            Workload("chat", "a chat that grows by a passage each turn; the answers go back in as text", text.chat),
            Workload("document", "questions about one long document", text.document),
            Workload("shuffled", "the same notes in another order for each question", text.shuffled),
            Workload("agent", "an agent's transcript, which grows by an answer and a tool's result", text.agent),
            Workload("restart", "questions about one document, the later half in a new process", text.document, True),
        )
    }
    if text.room < _LEAST_FOR_AGENT:
        del found["agent"]
    return found


@dataclass(frozen=True, slots=True)
class _RealText:
    room: int  # tokens for all but answers

    @property
    def scale(self) -> float:
        """Of the sizes of texts."""
        return min(1.0, self.room / _FULL)

    def chat(self, tokenizer: Any, count: int, seed: int) -> Prompts:
        passages = self._prose(tokenizer, _PASSAGE_TOKENS, seed)
        messages: list[Message] = []
        for turn in range(count):
            messages.append({"role": "user", "content": f"{_TURNS[turn]}\n\n{passages[turn]}"})
            said = yield Prompt(encode(tokenizer, messages), _TURNS[turn])
            messages.append({"role": "assistant", "content": said})

    def document(self, tokenizer: Any, count: int, seed: int) -> Prompts:
        text = max(self._prose(tokenizer, _DOCUMENT_TOKENS, seed)[:8], key=len)
        for question in _QUESTIONS[:count]:
            yield self._alone(tokenizer, text, question)

    def shuffled(self, tokenizer: Any, count: int, seed: int) -> Prompts:
        notes, rng = self._prose(tokenizer, _NOTE_TOKENS, seed)[:_NOTES], random.Random(seed)
        for at, question in enumerate(_QUESTIONS[:count]):
            first = notes[at % _NOTES]  # another one in each prompt, so that prompts share no beginning
            shown = [first, *rng.sample([note for note in notes if note is not first], _NOTES - 1)]
            yield self._alone(tokenizer, "\n\n".join(shown), question)

    def agent(self, tokenizer: Any, count: int, seed: int) -> Prompts:
        scale = min(1.0, (self.room - _AGENT_TASK_TOKENS) / (_FULL - _AGENT_TASK_TOKENS))
        files = source(int(scale * _RESULT_TOKENS), partial(_count, tokenizer), seed)
        tools = "\n".join(
            json.dumps({"name": name, "description": about, "arguments": arguments})
            for name, about, arguments in _TOOLS
        )
        messages: list[Message] = [{"role": "user", "content": _TASK.format(tools=tools)}]
        for step in range(count):
            name = files[step].partition("\n")[0].removeprefix("# ")
            said = yield Prompt(encode(tokenizer, messages), f"what to do, step {step + 1}")
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": f"Result of read_file, {name}:\n{files[step]}"})

    def _prose(self, tokenizer: Any, tokens: int, seed: int) -> list[str]:
        return prose(int(self.scale * tokens), partial(_count, tokenizer), seed)

    @staticmethod
    def _alone(tokenizer: Any, text: str, question: str) -> Prompt:
        return Prompt(encode(tokenizer, [{"role": "user", "content": f"{text}\n\n{question}"}]), question)


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))
