"""A server under attack: bodies, schemas, texts and connections that are wrong in every way that chance finds.

    python benchmarks/server_attack.py [--seconds 60] [--clients 8] [--seed 0]

The server is `kvboost-server` on the embedded model, a process of its own with two keys. While attackers use one of
them, or none, the owner of the other asks a plain question over and over, and `/health` is asked every 50 ms. The
attack has found something, and the status is 1, if the process ends, answers 500, is silent for more than `SILENT_S`,
answers the plain question wrongly or not at all, or has more memory or descriptors at the end than it should. Memory
goes up and down by hundreds of MB with the requests under way, so that two instants tell nothing: a leak is when the
least of the last quarter is far above the most of the first half. In the first minutes the server's caches and the
allocator's arenas fill, which looks like a leak: a run of less than `FULL_S` is judged by the most memory alone.
"""

import argparse
import http.client
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from server_process import OURS, Process, serving

KEYS = ("attacker", "owner")
OPTIONS = "--device cpu --chunk-size 16 --max-cache-bytes 24MB --max-queue-size 16 --max-tokens 50 --timeout-s 20"
SILENT_S = 2.0
OWNER_S = 15.0  # for the plain question, beside the attackers' requests
LIMIT_S = 60  # for an attacker's request
MORE_BYTES = 250e6  # that the least memory of the last quarter may lie above the most of the first half
MOST_BYTES = 3e9  # at any time
FULL_S = 240  # until what the server keeps has grown to its bounds

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/warm", "/v1/embeddings")
TEXTS = (
    "a", "", " ", "\0", "<|im_end|>", "<|im_start|>system\n", "a" * 50_000, "\u202e", "\ufeff", "é" * 3000, "😀" * 500,
    "{" * 2000, "\\" * 999, '"', "../../etc/passwd", "\r\nX: y", "<tool_call>", "a b " * 9000,
)  # fmt: skip
GOOD: dict[str, Any] = {
    "model": "reader",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "prompt": "a",
    "input": [{"role": "user", "content": "a"}],
    "texts": ["a"],
    "n": 2,
    "max_tokens": 3,
    "stream": True,
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "tool_choice": "required",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "logit_bias": {"5": 1},
    "stop": ["a"],
    "seed": 3,
    "metadata": {"a": "b"},
    "prompt_cache_key": "a",
}
NEEDED = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/warm": "texts",
}


def anything(draw: random.Random, depth: int = 3) -> Any:
    """A value of JSON."""
    kind = draw.randrange(9 if depth else 6)
    if kind < 2:
        return draw.choice(TEXTS)
    if kind == 2:
        return draw.choice([0, 1, -1, 2**31, -(2**63), 2**70, 10**300, draw.randrange(2000)])
    if kind == 3:
        return draw.choice([0.5, -0.0, 1e308, 1e-320, 1.0])
    if kind < 6:
        return draw.choice([None, True, False])
    size = draw.choice([0, 1, 2, 3, 3, 40])
    if kind == 6:
        return {draw.choice([*GOOD, *TEXTS[:6]]): anything(draw, depth - 1) for _ in range(size)}
    return [anything(draw, depth - 1)] * size if kind == 7 else [anything(draw, depth - 1) for _ in range(size)]


def spoilt(draw: random.Random, value: Any) -> Any:
    """A value like this one, with a part that is anything."""
    if draw.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return anything(draw)
    if isinstance(value, list):
        return [spoilt(draw, value[0]), *value[1:]]
    name = draw.choice([*value])
    return {**value, name: spoilt(draw, value[name])}


def schema(draw: random.Random, depth: int = 4) -> Any:
    """A JSON schema, often one that takes long to compile, or cannot be."""
    inner = lambda: schema(draw, depth - 1)  # noqa: E731
    kinds: list[Callable[[], Any]] = [
        lambda: {"type": draw.choice(["string", "integer", "number", "boolean", "null", "object", "array", "any"])},
        lambda: {"type": "integer", "multipleOf": draw.choice([2, 97, 9973, 99991, 0.1, -1, 0, 1e-9])},
        lambda: {
            "type": "string",
            "pattern": draw.choice(["^a+$", "(a|b)*a(a|b){30}", "a{99999}", "(((", ".{50}b", "\\p{L}+"]),
        },
        lambda: {
            "type": "string",
            "minLength": draw.choice([0, 5, 10**6, -1]),
            "maxLength": draw.choice([0, 9, 10**9]),
        },
        lambda: {"type": "integer", "minimum": draw.choice([0, -(2**70), 1e300]), "maximum": draw.choice([5, 2**70])},
        lambda: {"enum": [anything(draw, 1) for _ in range(draw.choice([0, 1, 3, 3000]))]},
        lambda: {"const": anything(draw, 2)},
        lambda: {
            "$ref": draw.choice(["#", "#/$defs/a", "#/$defs/b", "#/$defs%2Fa", "a", "https://a.example/", "#/x/0"])
        },
        lambda: anything(draw, 2),
    ]
    if depth:
        kinds += [
            lambda: {
                "type": "object",
                "properties": {n: inner() for n in "abc"[: draw.randrange(4)]},
                "required": ["a"],
            },
            lambda: {"type": "array", "items": inner(), "minItems": draw.choice([0, 2, 10**6])},
            lambda: {draw.choice(["allOf", "anyOf", "oneOf"]): [inner() for _ in range(draw.choice([0, 1, 2, 6]))]},
            lambda: {"$defs": {"a": inner(), "b": inner()}, "$ref": "#/$defs/a"},
            lambda: {"additionalProperties": inner(), "patternProperties": {"^a": inner()}},
        ]
    return draw.choice(kinds)()


class Attack:
    """On one server, until it is told to end.

    Args:
        server: The process.
        seconds: How long.
        seed: The seed of what is drawn.
    """

    def __init__(self, server: Process, seconds: float, seed: int) -> None:
        self.found: list[str] = []
        self.requests = self.answers = 0
        self.silent_s = self.owner_s = 0.0
        self.memory: list[float] = []  # bytes, every 50 ms
        self._server, self._end, self._seed = server, time.monotonic() + seconds, seed
        self._tells_leaks = seconds >= FULL_S

    @property
    def rss_bytes(self) -> float:
        """The most memory that the server has had."""
        return max(self.memory, default=0.0)

    @property
    def over(self) -> bool:
        """Whether it is time to end."""
        return time.monotonic() >= self._end

    def run(self, clients: int) -> None:
        """Attack."""
        threads = [threading.Thread(target=self._attack, args=(n,)) for n in range(clients)]
        threads += [threading.Thread(target=self._watch), threading.Thread(target=self._own)]
        for thread in threads:
            thread.start()
        time.sleep(max(0.0, self._end - time.monotonic()) / 2)
        first = self._server.figures
        for thread in threads:
            thread.join()
        time.sleep(1)
        last = self._server.figures
        before, after = most_and_least(self.memory)
        if self._tells_leaks and after > before + MORE_BYTES:
            self._wrong(f"memory grew from {before:.0f} bytes at most to {after:.0f} at least")
        if last["descriptors"] > first["descriptors"] + 20:
            self._wrong(f"descriptors grew from {first['descriptors']} to {last['descriptors']}")

    def _wrong(self, what: str) -> None:
        self.found.append(what[:500])

    def _attack(self, n: int) -> None:
        draw = random.Random(f"{self._seed} {n}")
        kinds = [self._body, self._body, self._schema, self._schema, self._raw, self._half]
        while not self.over:
            state = draw.getstate()[1][:1]
            try:
                draw.choice(kinds)(draw)
            except (OSError, http.client.HTTPException):
                pass  # to be cut off is an attacker's lot
            except Exception as error:
                self._wrong(f"client {n} at {state}: {error!r}")
            self.requests += 1

    def _body(self, draw: random.Random) -> None:
        path = draw.choice(ROUTES)
        body = {"model": "reader", NEEDED.get(path, "input"): GOOD[NEEDED.get(path, "input")]}
        for _ in range(draw.randrange(4)):
            name = draw.choice([*GOOD, *TEXTS[:4]])
            body[name] = spoilt(draw, GOOD.get(name))
        self._post(draw, path, json.dumps(body, allow_nan=True).encode())

    def _schema(self, draw: random.Random) -> None:
        found = schema(draw)
        body = {"model": "reader", "messages": GOOD["messages"], "max_tokens": 20}
        if draw.random() < 0.7:
            form = {"name": "a", "schema": found}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        else:
            function = {"name": "look", "parameters": found}
            body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        self._post(draw, "/v1/chat/completions", json.dumps(body).encode())

    def _raw(self, draw: random.Random) -> None:
        """A body that is no JSON, or much of it."""
        part = draw.choice(
            [b"[", b"{}", b"[],", b'{"a":', b'"\\u', b"9", b'"a",', bytes(draw.randrange(256) for _ in range(9))]
        )
        prompt = (
            b'{"model":"reader","prompt":[' + part * draw.choice([1, 99, 10_000, 300_000]) + draw.choice([b"", b"]}"])
        )
        self._post(draw, draw.choice(ROUTES), prompt)

    def _post(self, draw: random.Random, path: str, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=LIMIT_S)
        try:
            key = draw.choice([KEYS[0], KEYS[0], KEYS[0], "wrong"])
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", path, body, headers)
            if draw.random() < 0.1:
                return  # nobody waits for the answer
            answer = connection.getresponse()
            said = answer.read()
            self.answers += 1
            if answer.status in (500, 501, 502) or b'"internal_error"' in said:
                self._wrong(f"{path} answered {answer.status} {said[:200]!r} to {body[:300]!r}")
        finally:
            connection.close()

    def _half(self, draw: random.Random) -> None:
        """Connections that are opened, and say nothing, or nonsense, or a part of a request."""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
        said = [
            b"",
            b"GET",
            head,
            head + b"\r\n{",
            b"\0" * 99,
            b"GET / HTTP/9\r\n\r\n",
            b"A" * 200_000,
            head + b"\r\n" + b"{" * 99,
        ]
        opened = [
            socket.create_connection(("127.0.0.1", self._server.port), 5) for _ in range(draw.choice([1, 5, 30]))
        ]
        try:
            for each in opened:
                each.sendall(draw.choice(said))
            time.sleep(draw.random())
        finally:
            for each in opened:
                each.close()

    def _watch(self) -> None:
        while not self.over:
            start = time.monotonic()
            try:
                status, _ = self._ask("GET", "/health", None, LIMIT_S)
                self.memory.append(self._server.figures["rss_bytes"])
            except (OSError, http.client.HTTPException) as error:
                self._wrong(f"the server is gone: {error!r}")
                self._end = 0
                return
            took = time.monotonic() - start
            self.silent_s = max(self.silent_s, took)
            if status != 200 or took > SILENT_S:
                self._wrong(f"/health answered {status} after {took:.1f} s")
            if self.memory[-1] > MOST_BYTES:
                self._wrong(f"the server has {self.memory[-1]} bytes")
                self._end = 0
            time.sleep(0.05)

    def _own(self) -> None:
        """What the owner of the other key is answered."""
        body = {"model": "reader", "prompt": "Anna plays the", "max_tokens": 4, "temperature": 0}
        expected = None
        while not self.over:
            start = time.monotonic()
            try:
                status, said = self._ask("POST", "/v1/completions", body, LIMIT_S)
            except (OSError, http.client.HTTPException) as error:
                self._wrong(f"the owner of the other key got no answer: {error!r}")
                return
            took = time.monotonic() - start
            self.owner_s = max(self.owner_s, took)
            text = json.loads(said)["choices"][0]["text"] if status == 200 else None
            expected = text if expected is None else expected
            if text is None or text != expected or took > OWNER_S:
                self._wrong(f"the owner of the other key got {status} {said[:200]!r} after {took:.1f} s")
            time.sleep(0.2)

    def _ask(self, method: str, path: str, body: Any, limit_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=limit_s)
        try:
            headers = {"Authorization": f"Bearer {KEYS[1]}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def most_and_least(memory: Sequence[float]) -> tuple[float, float]:
    """The most of the first half of a series, and the least of its last quarter."""
    return max(memory[: len(memory) // 2], default=0.0), min(memory[len(memory) * 3 // 4 :], default=0.0)


def attack(seconds: float, clients: int, seed: int) -> Attack:
    """Attack a server of our own."""
    keys = [part for key in KEYS for part in ("--api-key", key)]
    with serving([*OURS, *OPTIONS.split(), "--model-name", "reader", *keys]) as server:
        found = Attack(server, seconds, seed)
        found.run(clients)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=None, help="(default: another one each time)")
    options = parser.parse_args()
    seed = random.randrange(2**31) if options.seed is None else options.seed
    found = attack(options.seconds, options.clients, seed)
    for what in found.found[:20]:
        print(what)
    print(
        f"seed {seed}: {found.requests} attacks, {found.answers} answered; silent for {found.silent_s:.2f} s at most, "
        f"the other key's answers took {found.owner_s:.2f} s at most, memory {found.rss_bytes / 1e6:.0f} MB at most; "
        f"{len(found.found)} found"
    )
    sys.exit(1 if found.found else 0)


if __name__ == "__main__":
    main()
