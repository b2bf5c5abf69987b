"""Texts to make prompts of: those that every Python installation ships, cut at paragraphs, and chats as token ids."""

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pydoc_data.topics import topics
from types import ModuleType

from transformers import PreTrainedTokenizerBase

Count = Callable[[str], int]  # tokens of a text
_MODULES = (
    "abc argparse ast bisect calendar cmd code codeop colorsys configparser contextlib copy csv dataclasses datetime "
    "difflib dis enum filecmp fileinput fnmatch fractions functools getopt getpass glob graphlib gzip heapq hmac "
    "imaplib inspect ipaddress keyword linecache locale mailbox mimetypes netrc numbers opcode operator pathlib pdb "
    "pickle pickletools plistlib poplib pprint profile pstats queue quopri random reprlib sched selectors shelve "
    "shlex shutil signal smtplib socket socketserver statistics string stringprep struct subprocess symtable tarfile "
    "tempfile textwrap threading timeit tokenize trace traceback types typing uuid weakref zipapp zipfile"
).split()
ChatMessage = dict[str, str]


def prose(tokens: int, count: Count, seed: int = 0) -> list[str]:
    """Passages of Python's language reference, each of at most `tokens` tokens and at least half of that."""
    return _cut([text.strip() for _, text in sorted(topics.items())], tokens, count, seed)


def source(tokens: int, count: Count, seed: int = 0) -> list[str]:
    """The beginnings of modules of the standard library, each of at most `tokens` tokens and at least half of that."""
    return [
        f"# {name}.py\n{text}" for name, text in _parts(_modules(), tokens - 8, count, seed)
    ]  # the name is some 8 tokens


@cache
def _modules() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _MODULES:
        if name in sys.stdlib_module_names:
            try:
                module: ModuleType = import_module(name)
                found[name] = inspect.getsource(module).strip()
            except (ImportError, OSError, TypeError):  # not every installation has all of them, as source
                continue
    return found


def _cut(texts: list[str], tokens: int, count: Count, seed: int) -> list[str]:
    return [text for _, text in _parts({str(at): text for at, text in enumerate(texts)}, tokens, count, seed)]


def _parts(texts: dict[str, str], tokens: int, count: Count, seed: int) -> Iterator[tuple[str, str]]:
    """Of each text, in an order drawn by the seed, whole paragraphs as far as they fit."""
    names = sorted(texts)
    random.Random(seed).shuffle(names)
    for name in names:
        kept = ""
        for paragraph in texts[name].split("\n\n"):
            longer = f"{kept}\n\n{paragraph}" if kept else paragraph
            if count(longer) > tokens:
                break
            kept = longer
        if count(kept) >= tokens // 2:
            yield name, kept


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage]) -> list[int]:
    """Ids of a chat up to the start of the next answer; without a chat template, roles are written as plain labels."""
    if tokenizer.chat_template is not None:
        prompt = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        return list(tokenizer.encode(prompt, add_special_tokens=False))
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return list(tokenizer.encode("\n\n".join([*lines, "Assistant:"])))
