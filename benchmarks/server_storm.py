"""A server in a storm: requests of all kinds from many clients, some of which misbehave, and what is left over.

    python benchmarks/server_storm.py --out benchmarks/results [--requests 10000] [--clients 32]

The server is `kvboost-server` on the embedded model, a process of its own with small chunks, a small budget for K/V
and a queue shorter than the number of clients. Requests are drawn at random from `KINDS`; every greedy answer is
compared with that of a plain `generate()` for its prompt alone. Clients that are told to come back (status 429) do so.

After each fifth the clients pause, and the process is looked at: nothing may run, and its memory, threads and file
descriptors after the first fifth are compared with those at the end. Last the queue is filled to the brim, one
request too many is sent, and all of them are cancelled.
"""

import argparse
import http.client
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from record import write
from reuse import Result, measured_on, provenance
from server_process import OURS, Process, serving

from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.texts import encode
from kvboost_hf.assets.world import make_documents

KEY = "storm"
BATCH, QUEUE = 8, 16
OPTIONS = f"--device cpu --chunk-size 16 --max-cache-bytes 24MB --max-batch-size {BATCH} --max-queue-size {QUEUE}"
MOST = 12  # new tokens
SHARED, ASKED = 8, 4  # documents that several questions are about, and how many
MORE_RSS = 0.05  # than after the first part, which must have been long enough, is a leak
LONG, POOL = 1000, 40  # requests; threads that come and go as they are needed
PARTS = 5
LIMIT_S = 120  # for one request

Body = dict[str, Any]
_ON = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
_TOOLS = "{% if tools %}{{ tools | tojson }} <tool_call>{name, arguments}</tool_call>\n{% endif %}"  # a template
_TOOL = {"type": "function", "function": {"name": "switch", "parameters": _ON}}


class Prompts:
    """Chats, and what a plain `generate()` says to each.

    Args:
        own: Documents that one question is about, besides those that several are.
        seed: The seed of what is drawn.
    """

    def __init__(self, own: int, seed: int) -> None:
        draw = random.Random(seed)
        self._model, self.tokenizer = load_embedded()
        self.chats: list[list[Body]] = []
        for n in range(SHARED + own):
            (document,) = make_documents(draw, 1, num_words=96 if n < SHARED else 48)
            for fact in document.facts[: ASKED if n < SHARED else 1]:
                self.chats.append([{"role": "user", "content": f"{document.text}\n\n{fact.question}"}])
        self._said: dict[int, list[int]] = {}

    def ids(self, n: int) -> list[int]:
        return encode(self.tokenizer, self.chats[n])

    def text(self, n: int) -> str:
        return str(self.tokenizer.decode(self.ids(n)))

    def save(self, folder: str) -> None:
        """The model, with a chat template that has a place for tools."""
        self._model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        template = Path(folder, "chat_template.jinja")
        template.write_text(_TOOLS + template.read_text())

    @torch.no_grad()
    def said(self, n: int, most: int, stop: str | None = None) -> str:
        """The answer, of at most so many tokens, up to a text that ends it."""
        if n not in self._said:  # asked for by one thread before the storm
            ids = torch.tensor([self.ids(n)])
            found = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MOST, do_sample=False
            )
            self._said[n] = found[0, ids.shape[1] :].tolist()
        text = str(self.tokenizer.decode(self._said[n][:most], skip_special_tokens=True))
        return text if stop is None else text.split(stop)[0]


class Client:
    """One connection, kept open as long as the server does.

    Args:
        port: The port of the server.
        tally: Counts what happens; one for all clients.
    """

    def __init__(self, port: int, tally: "Tally") -> None:
        self._port, self._tally = port, tally
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)

    def get(self, path: str) -> Body:
        return json.loads(self._send("GET", path, None, KEY)[1])

    def post(self, path: str, body: Body | str, key: str = KEY, *, status: int = 200) -> bytes:
        """What the server says; asked again as long as it is busy. Another status than expected is counted."""
        while True:
            told, said = self._send("POST", path, body if isinstance(body, str) else json.dumps(body), key)
            self._tally.count(f"status {told}")
            if told == 429:
                time.sleep(0.05)
                continue
            if told != status:
                self._tally.wrong(f"{path} answered {told} in place of {status}: {said[:200]!r} to {body!r:.200}")
                return b""
            return said

    def _send(self, method: str, path: str, body: str | None, key: str) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def open(self, path: str, body: Body, *, part: float = 1.0) -> socket.socket:
        """Send a part of a request, and leave the rest to the caller."""
        sent = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        whole = f"{head}Content-Length: {len(sent)}\r\n\r\n{sent}".encode()
        client = socket.create_connection(("127.0.0.1", self._port), LIMIT_S)
        client.sendall(whole[: int(part * len(whole))])
        return client

    def close(self) -> None:
        self._connection.close()


class Tally:
    """What happened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.most_waiting = 0
        self.drawn: dict[Any, str] = {}  # what came of a seed

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def wrong(self, error: str) -> None:
        with self._lock:
            self.errors.append(error)

    def equal(self, got: object, wanted: object, what: str) -> None:
        self.count("compared")
        if got != wanted:
            self.wrong(f"{what}: {got!r} in place of {wanted!r}")


def _events(said: bytes) -> list[Body]:
    lines = [line.removeprefix("data: ") for line in said.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _choices(said: bytes, streamed: bool) -> list[tuple[str, str, list[Body]]]:
    """Text, reason of the end, and calls of each choice."""
    found: dict[int, tuple[str, str, list[Body]]] = {}
    for event in _events(said) if streamed else [json.loads(said)]:
        for choice in event["choices"]:
            message = choice.get("delta" if streamed else "message", choice)
            text, reason, calls = found.get(choice["index"], ("", "", []))
            text += message.get("text") or message.get("content") or ""
            reason = choice["finish_reason"] or reason
            found[choice["index"]] = text, reason, _with_pieces(calls, message.get("tool_calls") or [])
    return [found[n] for n in sorted(found)]


def _with_pieces(calls: list[Body], pieces: list[Body]) -> list[Body]:
    """Calls, and what a message has of them: in a stream the arguments of a call come in pieces."""
    found = list(calls)
    for piece in pieces:
        if piece.get("index", len(found)) < len(found):
            found[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        else:
            found.append(piece)
    return found


Kind = Callable[[Client, Prompts, Tally, random.Random], None]


def chat(client: Client, prompts: Prompts, tally: Tally, draw: random.Random) -> None:
    n, most, choices, stream = draw.randrange(len(prompts.chats)), draw.randint(1, MOST), *_forms(draw)
    stop = draw.choice([None, None, " the", "."])
    body = _body(prompts, n, most, stream) | {"temperature": 0, "n": choices} | ({"stop": stop} if stop else {})
    if said := client.post("/v1/chat/completions", body):
        texts = [text for text, _, _ in _choices(said, stream)]
        tally.equal(texts, [prompts.said(n, most, stop)] * choices, f"chat {n}")


def complete(client: Client, prompts: Prompts, tally: Tally, draw: random.Random) -> None:
    asked, most = draw.sample(range(len(prompts.chats)), draw.choice([1, 1, 2])), draw.randint(1, MOST)
    choices, stream = _forms(draw)
    given: Any = [prompts.ids(n) for n in asked]
    if draw.random() < 0.5:
        given = [prompts.text(n) for n in asked]
    body = {"model": "reader", "prompt": given, "max_tokens": most, "temperature": 0, "n": choices, "stream": stream}
    if said := client.post("/v1/completions", body):
        texts = [text for text, _, _ in _choices(said, stream)]
        tally.equal(texts, [prompts.said(n, most) for n in asked for _ in range(choices)], f"completions {asked}")


def respond(client: Client, prompts: Prompts, tally: Tally, draw: random.Random) -> None:
    n, most, stream = draw.randrange(len(prompts.chats)), draw.randint(1, MOST), draw.random() < 0.5
    body = {"model": "reader", "input": prompts.chats[n], "max_output_tokens": most, "temperature": 0}
    if said := client.post("/v1/responses", body | {"stream": stream}):
        found = _events(said)[-1]["response"] if stream else json.loads(said)
        tally.equal(found["output"][0]["content"][0]["text"], prompts.said(n, most), f"response {n}")


def seeded(client: Client, prompts: Prompts, tally: Tally, draw: random.Random) -> None:
    n, seed, stream = draw.randrange(SHARED), draw.randrange(4), draw.random() < 0.5
    body = _body(prompts, n, MOST, stream) | {"temperature": 1.0, "seed": seed, "top_p": 0.9}
    if said := client.post("/v1/chat/completions", body):
        ((text, _, _),) = _choices(said, stream)
        tally.equal(text, tally.drawn.setdefault((n, seed), text), f"seed {seed} for chat {n}")


def schema(client: Client, prompts: Prompts, tally: Tally, draw: random.Random) -> None:
    n, stream = draw.randrange(len(prompts.chats)), draw.random() < 0.5
    form = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": _ON}}
    if said := client.post("/v1/chat/completions", _body(prompts, n, 40, stream) | {"response_format": form}):
        ((text, reason, _),) = _choices(said, stream)
        if reason == "stop":  # or it was cut
            tally.equal(type(json.loads(text)["on"]), bool, f"schema for chat {n}")


def tool(client: Client, prompts: Prompts, tally: Tally, draw: random.Random) -> None:
    n, stream = draw.randrange(len(prompts.chats)), draw.random() < 0.5
    asked = draw.choice([{"type": "function", "function": {"name": "switch"}}, "required"])
    body = _body(prompts, n, 60, stream) | {"tools": [_TOOL], "tool_choice": asked, "parallel_tool_calls": False}
    if said := client.post("/v1/chat/completions", body):
        ((_, reason, calls),) = _choices(said, stream)
        if reason == "tool_calls":
            called = [type(json.loads(call["function"]["arguments"])["on"]) for call in calls]
            tally.equal(called, [bool], f"tool for chat {n}")


def refused(client: Client, prompts: Prompts, tally: Tally, draw: random.Random) -> None:
    good = _body(prompts, 0, 4, False)
    path, body, key, status = draw.choice(
        [
            ("/v1/chat/completions", "{", KEY, 400),
            ("/v1/chat/completions", good | {"messages": []}, KEY, 400),
            ("/v1/chat/completions", good | {"temperature": "warm"}, KEY, 400),
            ("/v1/chat/completions", good | {"modalities": ["audio"]}, KEY, 400),
            ("/v1/chat/completions", good | {"n": 99}, KEY, 400),
            ("/v1/chat/completions", good | {"model": "other"}, KEY, 404),
            ("/v1/chat/completions", good, "wrong", 401),
            ("/v1/completions", {"model": "reader", "prompt": [5] * 9000}, KEY, 400),
            ("/v1/completions", {"model": "reader", "prompt": [5, -1]}, KEY, 400),
            ("/v1/responses", {"model": "reader", "input": 5}, KEY, 400),
            ("/v1/embeddings", {"model": "reader", "input": "a"}, KEY, 404),
            ("/v1/nothing", {}, KEY, 404),
        ]
    )
    client.post(path, body, key, status=status)  # type: ignore[arg-type]


def leave(client: Client, prompts: Prompts, tally: Tally, draw: random.Random) -> None:
    """Go away before, while or after the answer comes."""
    stream, n = draw.random() < 0.5, draw.randrange(len(prompts.chats))
    body = _body(prompts, n, draw.choice([MOST, 400]), stream) | {"logit_bias": {"2": -100}}
    when = draw.choice(["asking", "waiting", "reading", "later"])
    with client.open("/v1/chat/completions", body, part=draw.random() if when == "asking" else 1.0) as left:
        if when == "reading":
            left.recv(1 if stream else 0)
        elif when == "later":
            time.sleep(draw.uniform(0, 0.2))
    tally.count("left")


# How often each comes.
KINDS: dict[Kind, int] = {chat: 8, complete: 5, respond: 4, seeded: 2, schema: 1, tool: 1, refused: 3, leave: 3}


def _forms(draw: random.Random) -> tuple[int, bool]:
    """How many choices, and whether streamed."""
    return draw.choice([1, 1, 1, 2, 3]), draw.random() < 0.5


def _body(prompts: Prompts, n: int, most: int, stream: bool) -> Body:
    return {"model": "reader", "messages": prompts.chats[n], "max_tokens": most, "stream": stream}


class Storm:
    """Clients of one server.

    Args:
        server: The process.
        prompts: What they ask.
        clients: How many.
    """

    def __init__(self, server: Process, prompts: Prompts, clients: int) -> None:
        self._server, self._prompts = server, prompts
        self.tally = Tally()
        self._clients = [Client(server.port, self.tally) for _ in range(clients)]
        self._watch = Client(server.port, self.tally)

    def rage(self, requests: int, seed: int) -> None:
        """Send so many requests, and wait until nothing runs."""
        draw, over = random.Random(seed), threading.Event()
        kinds = deque(draw.choices(list(KINDS), list(KINDS.values()), k=requests))

        def watch() -> None:
            while not over.wait(0.05):
                self.tally.most_waiting = max(self.tally.most_waiting, self._watch.get("/v1/stats")["waiting"])

        threads = [
            threading.Thread(target=self.work, args=(client, kinds, random.Random(draw.random())))
            for client in self._clients
        ]
        watcher = threading.Thread(target=watch)
        for thread in (*threads, watcher):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        watcher.join()
        self.settle()

    def work(self, client: Client, kinds: deque[Kind], draw: random.Random) -> None:
        """What one client does, until there is nothing left to do."""
        while True:
            try:
                kind = kinds.popleft()
            except IndexError:
                return
            try:
                kind(client, self._prompts, self.tally, draw)
                self.tally.count(kind.__name__)
            except Exception as error:  # whatever it is, it is told, and the others go on
                client.close()
                self.tally.wrong(f"{kind.__name__} failed: {error!r}")

    def settle(self) -> Body:
        """Wait until nothing runs; figures of the process then."""
        end = time.monotonic() + LIMIT_S
        while any((stats := self._watch.get("/v1/stats"))[name] for name in ("waiting", "prompts", "running")):
            if time.monotonic() > end:
                self.tally.wrong(f"rows are stuck: {stats}")
                break
            time.sleep(0.1)
        if stats["batch_bytes"]:
            self.tally.wrong(f"{stats['batch_bytes']} bytes of a batch are left")
        for client in self._clients:
            client.close()
        return self._server.figures | {"finished": stats["finished"]}

    def fill_the_queue(self) -> None:
        """As many as may run and wait are taken, the next is not, and all go away."""
        body = _body(self._prompts, 0, 4000, True) | {"logit_bias": {"2": -100}}
        taken: list[socket.socket] = []
        for n in range(BATCH + QUEUE + 1):
            while n == BATCH and self._watch.get("/v1/stats")["running"] < BATCH:
                time.sleep(0.01)
            taken.append(self._watch.open("/v1/chat/completions", body))
            line = taken[-1].recv(4096).split(b"\r\n")[0]
            self.tally.equal(line.split()[1], b"200" if n < BATCH + QUEUE else b"429", f"request {n} of a full queue")
        for one in taken:
            one.close()
        self.settle()


def run(requests: int, clients: int, seed: int) -> Result:
    prompts = Prompts(min(requests // 25, 200), seed)
    for n in range(len(prompts.chats)):
        prompts.said(n, MOST)
    begin, parts = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        prompts.save(folder)
        command = [*OURS, *OPTIONS.split(), "--model", folder, "--model-name", "reader", "--api-key", KEY]
        server = stack.enter_context(serving(command))
        storm = Storm(server, prompts, clients)
        for part in range(PARTS):
            storm.rage(requests // PARTS, seed + part)
            parts.append(storm.settle())
            print(f"part {part}: {parts[-1]}, {len(storm.tally.errors)} errors", file=sys.stderr, flush=True)
        storm.fill_the_queue()
    tally = storm.tally
    first, last = parts[0], parts[-1]
    if requests >= LONG and last["rss_bytes"] > (1 + MORE_RSS) * first["rss_bytes"]:
        tally.wrong(f"memory grew from {first['rss_bytes']} to {last['rss_bytes']} bytes")
    if last["threads"] > first["threads"] + POOL or last["descriptors"] > first["descriptors"]:
        tally.wrong(f"threads or descriptors grew from {first} to {last}")
    if tally.most_waiting > QUEUE:
        tally.wrong(f"{tally.most_waiting} requests waited, of {QUEUE} that may")
    return {
        "requests": requests // PARTS * PARTS,
        "clients": clients,
        "prompts": len(prompts.chats),
        "seconds": time.perf_counter() - begin,
        "counts": dict(sorted(tally.counts.items())),
        "most_waiting": tally.most_waiting,
        "parts": parts,
        "errors": len(tally.errors),
        "first_errors": tally.errors[:20],
    }


def markdown(result: Result) -> str:
    counts = result["counts"]
    lines = [
        f"`kvboost-server` on the embedded model, {result['clients']} clients; {measured_on(result['provenance'])}",
        "",
        "| | |",
        "| --- | ---: |",
        f"| requests | {result['requests']} |",
        f"| distinct prompts | {result['prompts']} |",
        *(f"| of kind {kind.__name__} | {counts.get(kind.__name__, 0)} |" for kind in KINDS),
        *(f"| answered with {name} | {count} |" for name, count in counts.items() if name.startswith("status")),
        f"| answers compared | {counts['compared']} |",
        f"| wrong answers, unexpected statuses, stuck rows | {result['errors']} |",
        f"| most that waited at once, of {QUEUE} that may | {result['most_waiting']} |",
        f"| seconds | {result['seconds']:.0f} |",
        "",
        "| after | resident MB | threads | file descriptors |",
        "| --- | ---: | ---: | ---: |",
    ]
    for n, part in enumerate(result["parts"], 1):
        lines.append(
            f"| {n * result['requests'] // PARTS} | {part['rss_bytes'] / 1e6:.0f} | {part['threads']} "
            f"| {part['descriptors']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "provenance": provenance(sys.argv[1:], "server_storm.py"),
        **run(options.requests, options.clients, options.seed),
    }
    write(options.out, "server-storm-cpu", result, markdown(result))
    print(markdown(result))
    sys.exit(1 if result["errors"] else 0)


if __name__ == "__main__":
    main()
