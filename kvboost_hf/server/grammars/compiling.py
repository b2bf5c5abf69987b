"""Compiles grammars of clients in processes that can be killed, and caches them by salt.

What no grammar can be compiled with of a schema is found by compiling it without, and left to the model.
"""

import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvboost_hf.errors import KVBoostError
from kvboost_hf.server.fair_share import FairCache
from kvboost_hf.server.grammars import program
from kvboost_hf.server.grammars.fitting import OBJECT, Fitted, Left, opened, under
from kvboost_hf.server.grammars.schemas import LISTS
from kvboost_hf.server.grammars.structured import GrammarConstraint, json_schema
from kvboost_hf.server.protocol import DrainingError

T = TypeVar("T")
_START_S = 120.0  # until a process has read the tokenizer
_WALL_S = 20.0  # for a grammar: the process ends itself by the time that it computes, which is less
_KEPT, _KEPT_OF_ONE = 64, 8  # grammars in all, and of one salt
_MOST_TRIALS = 64  # compilations of one schema
_SEARCH_S = 4.0  # for what a grammar cannot be compiled with

_TOO_MUCH = (
    f"Compiling the grammar or schema takes more than {program.CPU_S:g} s of computing or "
    f"{program.MEMORY_BYTES // 2**20} MiB, or nests too deep. Make it simpler: fewer patterns, multiples and "
    "combinations of them."
)


class Grammars:
    """Compiles grammars for one tokenizer. Safe to use from several threads.

    A grammar is compiled in a process of its own first, which has limits of time, memory and stack and may be killed.
    Only one that this process is done with is compiled here: that takes the same time once more, and is known to end.

    Args:
        tokenizer: The fast tokenizer of the model.
        vocab_size: How many logits the model has; may be more than the tokenizer has tokens.
        ends: Tokens that end an answer; the tokenizer's own if empty.
        processes: How many grammars are compiled at the same time, at most. They start when they are needed.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> from kvboost_hf.server.grammars.structured import regex
        >>> model, tokenizer = load_embedded()
        >>> grammars = Grammars(tokenizer, model.config.vocab_size)
        >>> constraint = grammars.constraint(regex("yes|no"))
        >>> [tokenizer.decode(token) for token in constraint.allowed().nonzero()]
        ['n', 'y']
        >>> grammars.close()
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        *,
        ends: Collection[int] = (),
        processes: int = 2,
    ) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._lock = threading.Lock()
        # By salt and grammar, those used last at the end: a matcher at its start, or why there is none.
        self._kept: FairCache[bytes, LLMatcher | str] = FairCache(_KEPT, _KEPT_OF_ONE)
        # Likewise, schemas without what they could not be compiled with, or why that is refused.
        self._narrowed: FairCache[bytes, Sequence[Fitted] | str] = FairCache(_KEPT, _KEPT_OF_ONE)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._places = threading.BoundedSemaphore(processes)
        self._closed = False

    def constraint(self, grammar: str, salt: bytes = b"", *, is_json: bool = True) -> GrammarConstraint:
        """A constraint for one job. Equal grammars of one salt are compiled once, and kept for a while.

        Raises `ValueError` for a grammar that is none, asks for what cannot be enforced, or takes too much to compile.
        How long that takes tells nothing of what clients with other salts have asked.
        """
        found = self._known(self._kept, salt, grammar, lambda: self._compile(grammar))
        return GrammarConstraint(found.deep_copy(), self._tokens, self._vocab_size, is_json=is_json)

    def fitting(
        self, grammar_of: Callable[[Sequence[Mapping[str, Any]]], str], schemas: Sequence[Fitted], salt: bytes
    ) -> tuple[str, Sequence[Fitted]]:
        """The grammar of schemas, and these, without what no grammar can be compiled with.

        Raises `ValueError` as `constraint` does, or where a client asks for all of a schema that cannot be enforced.
        """
        grammar = grammar_of([fitted.schema for fitted in schemas])
        if (error := self._why_not(grammar, salt)) is None:
            return grammar, schemas
        grammar += repr([(fitted.name, fitted.strict) for fitted in schemas])
        found = self._known(self._narrowed, salt, grammar, lambda: self._narrow(grammar_of, schemas, salt, error))
        return grammar_of([fitted.schema for fitted in found]), found

    def _known(self, kept: FairCache[bytes, T | str], salt: bytes, key: str, make: Callable[[], T | str]) -> T:
        """What is kept of a salt under a key, or made for it; raises `ValueError` where that is why there is none."""
        with self._lock:
            found = kept.get(salt, key)
        if found is None:
            found = make()
            with self._lock:
                kept.put(salt, key, found)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _narrow(
        self,
        grammar_of: Callable[[Sequence[Mapping[str, Any]]], str],
        schemas: Sequence[Fitted],
        salt: bytes,
        error: str,
    ) -> Sequence[Fitted] | str:
        end = time.monotonic() + _SEARCH_S

        def compiles(schema: Mapping[str, Any]) -> bool:
            if time.monotonic() > end:
                return False
            try:
                grammar = json_schema(schema)
            except ValueError:  # references without an end
                return False
            with self._places:
                tried = self._tried(grammar)
            return tried is not None and not tried["error"]

        found = list(schemas)
        try:
            if error != _TOO_MUCH:  # a search would take as long, many times
                found = [narrowed(fitted, compiles) for fitted in schemas]
                error = self._why_not(grammar_of([fitted.schema for fitted in found]), salt) or ""
            elif any(fitted.strict for fitted in schemas):
                return error
            if error:
                found = [opened(fitted) for fitted in found]
                self.constraint(grammar_of([fitted.schema for fitted in found]), salt)
        except ValueError as wrong:
            return str(wrong)
        return found

    def _why_not(self, grammar: str, salt: bytes) -> str | None:
        """Why there is no constraint of a grammar; None if there is one."""
        try:
            self.constraint(grammar, salt)
        except ValueError as error:
            return str(error)
        return None

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for; None for a token of another kind of tokenizer, or of none."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast) or token >= len(self._tokenizer):
            return None
        return bytes(self._tokens.decode_bytes([token]))

    def open(self) -> None:
        """Compile again after `close`, as an app that is started again does."""
        self._closed = False

    def close(self) -> None:
        """End the processes, also those that compile. What is compiled stays usable; nothing more is compiled."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
            for process in self._busy:
                process.end()
        for process in idle:
            process.kill()

    def _compile(self, grammar: str) -> LLMatcher | str:
        tokens = self._tokens
        with self._places:
            tried = self._tried(grammar)
            if tried is None:
                return _TOO_MUCH
            error = tried["error"]
            matcher = program.compiled(tokens, tried["grammar"]) if not error else None
        error = error if matcher is None else matcher.get_error()
        return f"The grammar or schema cannot be enforced: {error}. Leave that out." if error else matcher or ""

    def _tried(self, grammar: str) -> dict[str, str] | None:
        """`grammar` as it is compiled, and its `error`, empty if it is fine; None if compiling it takes too much."""
        self._require_open()
        process = self._take_idle() or _Process(self._settings)
        with self._lock:
            if not self._closed:
                self._busy.add(process)
        answer = process.ask(grammar, _WALL_S) if process in self._busy else None
        with self._lock:
            self._busy.discard(process)
            stays = answer is not None and not self._closed
            if stays:
                self._idle.append(process)
        if not stays:
            process.kill()
            if answer is None:
                self._require_open()
        return answer

    def _require_open(self) -> None:
        if self._closed:
            raise DrainingError("The server ends, and compiles no more grammars.")

    def _take_idle(self) -> "_Process | None":
        """A process that is ready, or None. Those that something else has killed are left out."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                process = self._idle.pop()
            if process.is_alive:
                return process
            process.kill()

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The arguments of an `LLTokenizer`, here and in a process."""
        tokenizer, ends = self._tokenizer, self._ends
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"A grammar needs a fast tokenizer, got {type(tokenizer).__name__}.")
        if not ends and tokenizer.eos_token_id is None:
            raise ValueError("`ends` must name a token for a tokenizer that has no `eos_token`, got none.")
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return {
            "tokenizer": backend.to_str(),
            "n_vocab": max(self._vocab_size, len(tokenizer)),
            "eos_token": sorted(ends) or [tokenizer.eos_token_id],
        }

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return LLTokenizer(**self._settings)


class _Process:
    """Runs `program`. Used by one thread at a time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            # -P: what lies beside the program is not what its imports mean.
            [sys.executable, "-P", program.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server
        )
        self._free = weakref.finalize(self, _free, self._process)  # also where nobody calls `kill`
        self._free.atexit = False  # it ends with this process
        if self.ask(settings, _START_S) is None:
            self.kill()
            raise KVBoostError("The process that compiles grammars does not start. Can Python run llguidance here?")

    def ask(self, question: object, limit_s: float) -> dict[str, str] | None:
        """Send a request; returns the answer, or None if the process ended without one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(limit_s, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            return None
        finally:
            watch.cancel()
        return dict(json.loads(answer)) if answer.endswith(b"\n") else None

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill the process. The thread that asks it, if there is one, calls `kill`."""
        self._process.kill()

    def kill(self) -> None:
        """Kill the process, and free what it takes here."""
        self._free()


def _free(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # what was not written yet
            pipe.close()


def narrowed(fitted: Fitted, compiles: Callable[[Mapping[str, Any]], bool]) -> Fitted:
    """Leave to the model what a grammar of the schema cannot be compiled with; `ValueError` if it is strict."""
    search = _Search(fitted.schema, compiles)
    schema = search.schema()
    return replace(fitted, schema=schema, left=(*fitted.left, *search.left)).require()


@dataclass
class _Search:
    """Finds what a grammar cannot be compiled with, by compiling it without."""

    root: Mapping[str, Any]
    compiles: Callable[[Mapping[str, Any]], bool]
    left: list[Left] = field(default_factory=list)
    _trials: int = 0

    def schema(self) -> Mapping[str, Any]:
        """The schema without it."""
        if self._holds(self.root):
            return self.root
        self._defs = dict(self.root.get("$defs", {}))
        for name in self._failing([(name, each) for name, each in self._defs.items()]):
            self._defs[name] = self._part(self._defs[name], f"$defs.{name}")
        found = self._part({name: value for name, value in self.root.items() if name != "$defs"}, "")
        if isinstance(found, dict) and self._is_fine(found):
            return {**found, **({"$defs": self._defs} if self._defs else {})}
        self.left = [Left("", "its grammar is too large, or allows no value")]
        return OBJECT if self.root.get("type") == "object" else {}

    def _holds(self, schema: Any) -> bool:
        self._trials += 1
        return self._trials <= _MOST_TRIALS and self.compiles(schema)

    def _is_fine(self, schema: Any) -> bool:
        return self._holds({**schema, **({"$defs": self._defs} if self._defs else {})})

    def _failing(self, parts: list[tuple[Any, Any]]) -> list[Any]:
        """The keys of those schemas that no grammar can be compiled with."""
        parts = [(key, part) for key, part in parts if isinstance(part, dict) and part]
        tried = [part for _, part in parts]
        if not parts or self._is_fine({"type": "array", "prefixItems": tried, "minItems": len(tried)}):
            return []
        if len(parts) == 1:
            return [parts[0][0]]
        half = len(parts) // 2
        return [*self._failing(parts[:half]), *self._failing(parts[half:])]

    def _part(self, schema: Any, path: str) -> Any:
        """A part of the schema without it."""
        found = dict(schema)
        inner = dict(_inner(found))
        for keys in self._failing(list(inner.items())):
            _put(found, keys, self._part(inner[keys], ".".join(filter(None, (path, *map(str, keys))))))
        if self._is_fine(found):
            return found
        for name in [name for name in found if name not in ("properties", "type")] + ["properties", "type"]:
            fewer = {key: value for key, value in found.items() if key != name}
            if name == "patternProperties":
                fewer["additionalProperties"] = True
            if name in found and self._is_fine(fewer):
                self.left.append(Left(under(path, name), "no grammar can be compiled with it"))
                return fewer
        self.left.append(Left(path, "no grammar can be compiled with it"))
        return True


def _inner(schema: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The schemas in one, with the keys that lead there."""
    for name in ("properties", "patternProperties"):
        yield from (((name, key), each) for key, each in schema.get(name, {}).items())
    for name in (*LISTS, "prefixItems"):
        yield from (((name, n), each) for n, each in enumerate(schema.get(name, ())))
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield (name,), schema[name]


def _put(schema: dict[str, Any], keys: tuple[Any, ...], value: Any) -> None:
    if len(keys) == 1:
        schema[keys[0]] = value
        return
    outer = schema[keys[0]]
    schema[keys[0]] = inner = dict(outer) if isinstance(outer, dict) else list(outer)
    inner[keys[1]] = value
