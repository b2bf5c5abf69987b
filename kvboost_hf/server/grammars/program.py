"""The program that compiles grammars of clients within limits, in a process that may be killed.

It imports nothing of this package and no torch: it starts fast, and is small. Each line of standard input is JSON, and
is answered by a line of JSON on standard output. The first one has the tokenizer, the others a grammar each.
"""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

CPU_S = 2.0  # for a grammar
MEMORY_BYTES = 256 * 2**20  # besides what the tokenizer takes
# Less than any thread of the server has: what recurses too deep ends this process, not that one.
_STACK_BYTES = 3 * 2**19
_STATUS = Path("/proc/self/statm")
WRITTEN = "# written\n"  # begins a grammar that a client has written, in GBNF or in Lark
_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_QUOTED, _CLASS = r'"(?:\\.|[^"\\])*"', r"\[(?:\\.|[^\]\\])*\]"
_PIECES = re.compile(rf"{_QUOTED}|{_CLASS}|#[^\n]*|\.|(?<![\w-])start(?![\w-])", re.DOTALL)
_CHAR = r"(\\x[0-9a-fA-F]{2}|\\.|[^\\])"
_RANGE = re.compile(rf"{_CHAR}(?:-{_CHAR})?", re.DOTALL)  # or a character
_OPERATORS = {char: f"\\x{ord(char):02x}" for char in "&-~"}
_ESCAPES = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)

# A token then takes some 10 ms at most, and the states of a lexer some 40 MB.
LIMITS: dict[str, Any] = {"step_lexer_fuel": 100_000, "max_lexer_states": 20_000, "verbose_errors": False}


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of a grammar; in the state of an error if it is not one that can be followed."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    first = matcher.deep_copy()
    first.compute_bitmask()  # some grammars fail no earlier
    return first if first.is_error() else matcher


def _main() -> None:
    lines = iter(sys.stdin.buffer.readline, b"")
    tokens = LLTokenizer(**json.loads(next(lines)))
    with suppress(AttributeError):  # not on Windows
        os.nice(10)  # the model goes first
    _limit_memory()
    _answer({})
    threading.stack_size(_STACK_BYTES)
    for line in lines:
        with _limited_time():
            _answer(_tried(tokens, json.loads(line)))


def _tried(tokens: LLTokenizer, grammar: str) -> dict[str, str]:
    """A grammar as it is compiled, and its error; found by a thread, whose stack has the size that was set."""
    found = {"error": "it fails", "grammar": ""}

    def work() -> None:
        try:
            found["grammar"] = _as_lark(grammar)
        except Exception as error:  # such as `Exception`, which is what the converter raises
            found["error"] = str(error)
        else:
            found["error"] = compiled(tokens, found["grammar"]).get_error()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


def _as_lark(grammar: str) -> str:
    """What llguidance reads, of a grammar from a client or from this package."""
    if not grammar.startswith(WRITTEN):
        return grammar
    text = grammar.removeprefix(WRITTEN)
    return gbnf_to_lark(_PIECES.sub(_readable, text)) if _GBNF.search(text) else text


def _readable(found: re.Match[str]) -> str:
    """A piece of GBNF as llguidance's converter reads it.

    It takes less than llama.cpp does: no long escapes, no brackets that are escaped in a text, and no rule by the name
    that it gives the first one. For `.` it writes what leaves line ends out, and of classes what Rust reads as
    operations on them.
    """
    piece = found[0]
    if piece[0] in '"[':
        quoted = piece[0] == '"'
        text = _ESCAPES.sub(lambda escape: _unescaped(escape[1], escape[0], quoted=quoted), piece)
        return text if quoted else _class(text)
    return {".": "[\\x00-\U0010ffff]", "start": "start-of-gbnf"}.get(piece, piece)


def _class(text: str) -> str:
    """A class of characters without what Rust takes for operations on classes: `&&`, `--` and `~~`."""
    head = "[^" if text.startswith("[^") else "["
    inner = _RANGE.sub(
        lambda found: "-".join(_OPERATORS.get(char, char) for char in found.groups() if char), text[len(head) : -1]
    )
    return f"{head}{inner}]"


def _unescaped(name: str, escape: str, *, quoted: bool) -> str:
    code = int(name[1:], 16) if name[0] in "uU" and len(name) > 1 else -1
    if 0 <= code < 128:
        return f"\\x{code:02x}"
    if 128 <= code <= sys.maxunicode:
        return chr(code)
    return name if quoted and name in "[]" else escape


def _answer(answer: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _limit_memory() -> None:
    if not _STATUS.exists():
        return
    import resource

    used = int(_STATUS.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def _limited_time() -> Iterator[None]:
    """Ends the process when it has computed for too long, even if nobody waits for it any more."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    _main()
