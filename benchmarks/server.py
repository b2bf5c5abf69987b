"""The server beside those of kvboost 0.9.0 and transformers: times, throughput, and how many answers are right.

    python benchmarks/server.py --out benchmarks/results [--peer-python PYTHON]

All servers run the same weights in float32 on the CPU, one thread each, and wait side by side; for each figure they
take turns. Prompts are texts to `/v1/completions`, greedy; those of a round are the same for all servers. kvboost is
asked with a temperature of 0.0001, since it divides by it.

- Time to the first token: from the request sent to the first line received of a stream that holds text. Cold prompts
  have a beginning that was never seen, warm ones share about `SHARED` tokens with one that was.
- Throughput: warm prompts of unseen endings, not streamed, by so many clients that each send one after the other.
- Right answers: those equal to a plain `generate()` of the prompt alone, of all requests. One that is refused, fails
  or takes longer than `LIMIT_S` is not right.

The model is a random Llama of 6 layers, 256 wide, with the embedded tokenizer.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from record import write
from reuse import Result, make_model, measured_on, provenance
from server_process import OURS, serving

from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.world import make_documents

SHARED, UNSEEN = 1024, 24  # tokens, nearly: a word or a full stop is one
NEW_TOKENS = 16
CLIENTS = (1, 8, 32)
LIMIT_S = 30


@dataclass(frozen=True)
class Said:
    """What came of a request."""

    text: str | None  # None without an answer
    first_ms: float | None  # until the first piece of text
    trouble: str | None  # why there is none


@dataclass
class Server:
    """One of those compared."""

    name: str
    model: str  # as it calls it
    command: list[str]
    health: str = "/health"
    temperature: float = 0
    port: int = 0
    first_ms: dict[str, list[float]] = field(default_factory=dict)
    per_s: dict[int, float] = field(default_factory=dict)  # answers, by clients
    asked: int = 0
    right: int = 0
    troubles: Counter[str] = field(default_factory=Counter)

    def ask(self, prompt: str, wanted: str, *, stream: bool = False) -> Said:
        """Send a request, and note what came of it."""
        said = _ask(self.port, self.model, prompt, self.temperature, stream)
        self.asked += 1
        self.right += said.text == wanted
        if said.text != wanted:
            self.troubles[said.trouble or ("another answer" if said.text else "an empty answer")] += 1
        return said


def _ask(port: int, model: str, prompt: str, temperature: float, stream: bool) -> Said:
    sizes = {"max_tokens": NEW_TOKENS, "temperature": temperature}
    body = {"model": model, "prompt": prompt, "stream": stream, **sizes}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    start = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return Said(None, None, f"status {answer.status}")
        if not stream:
            return Said(json.loads(answer.read())["choices"][0]["text"], None, None)
        text, first = "", None
        while line := answer.readline():
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices")
                piece = choices[0].get("text") if choices else ""
                if piece and first is None:
                    first = 1000 * (time.perf_counter() - start)
                text += piece or ""
            if time.perf_counter() - start > LIMIT_S:
                raise TimeoutError
        return Said(text, first, None)
    except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
        return Said(None, None, "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    finally:
        connection.close()


class Prompts:
    """Texts, and what a plain `generate()` says to each."""

    def __init__(self, folder: str, seed: int) -> None:
        tokenizer = load_embedded()[1]
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4}
        self._model = make_model(
            "cpu", **sizes, num_key_value_heads=4, vocab_size=len(tokenizer), initializer_range=0.1
        )
        self._model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        self._tokenizer, self._draw = tokenizer, random.Random(seed)

    def text(self, tokens: int) -> str:
        """A text of about so many."""
        count = max(1, tokens // 128)
        return " ".join(one.text for one in make_documents(self._draw, count, num_words=tokens // count))

    @torch.no_grad()
    def wanted(self, prompt: str) -> str:
        ids = torch.tensor([self._tokenizer.encode(prompt)])
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=self._tokenizer.eos_token_id,
        )
        return str(self._tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def measure_first(servers: list[Server], prompts: Prompts, rounds: int) -> None:
    """The first round is not timed."""
    shared = prompts.text(SHARED)
    for n in range(-1, rounds):
        for kind, start in (("cold", prompts.text(SHARED)), ("warm", shared)):
            prompt = f"{start} {prompts.text(UNSEEN)}"
            wanted = prompts.wanted(prompt)
            for server in _in_turn(servers, n):
                first = server.ask(prompt, wanted, stream=True).first_ms
                if n >= 0 and first is not None:
                    server.first_ms.setdefault(kind, []).append(first)
        print(f"round {n}: {[(server.name, server.first_ms) for server in servers]}", file=sys.stderr, flush=True)


def measure_throughput(servers: list[Server], prompts: Prompts) -> None:
    shared = prompts.text(SHARED)
    for n, clients in enumerate(CLIENTS):
        asked = [f"{shared} {prompts.text(UNSEEN)}" for _ in range(max(8, clients))]
        wanted = [prompts.wanted(prompt) for prompt in asked]
        for server in _in_turn(servers, n):
            server.ask(asked[0], wanted[0])  # the shared part is known, as in the middle of a day
            start = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                said = list(pool.map(server.ask, asked, wanted))
            answered = sum(one.text is not None for one in said)
            server.per_s[clients] = answered / (time.perf_counter() - start)
            print(f"{clients} clients: {server.name} {server.per_s[clients]:.2f}/s", file=sys.stderr, flush=True)


def _in_turn(servers: list[Server], n: int) -> list[Server]:
    return servers[n % len(servers) :] + servers[: n % len(servers)]


def compared(folder: str, peer_python: str | None) -> list[Server]:
    transformers = [str(Path(sys.executable).with_name("transformers")), "serve", folder, "--device", "cpu"]
    servers = [
        Server("kvboost_hf", "llama", [*OURS, "--model", folder, "--model-name", "llama", "--device", "cpu"]),
        Server("transformers serve", folder, transformers),
        Server("transformers serve, continuous batching", folder, [*transformers, "--continuous-batching"]),
    ]
    if peer_python is not None:
        peer = [peer_python, "-m", "kvboost.server", "--model", folder, "--model-name", "llama"]
        # It divides by the temperature: with 0 it says nothing.
        told = [*peer, "--device", "cpu", "--dtype", "float32"]
        servers.append(Server("kvboost 0.9.0", "llama", told, temperature=1e-4))
    return servers


def run(rounds: int, seed: int, peer_python: str | None, logs: Path | None) -> Result:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        prompts = Prompts(folder, seed)
        found, servers = compared(folder, peer_python), []
        for n, server in enumerate(found):
            where = logs / f"{n}.log" if logs is not None else Path(os.devnull)
            log = stack.enter_context(where.open("w"))
            try:
                started = serving(server.command, log=log, health=server.health, environment={"HF_HUB_OFFLINE": "1"})
                server.port = stack.enter_context(started).port
                servers.append(server)
            except RuntimeError:
                server.troubles["did not start"] += 1
        measure_first(servers, prompts, rounds)
        measure_throughput(servers, prompts)
    return {
        "load": os.getloadavg()[1],
        "servers": [
            {
                "name": server.name,
                "first_ms": {kind: statistics.median(times) for kind, times in server.first_ms.items()},
                "per_s": server.per_s,
                "asked": server.asked,
                "right": server.right,
                "troubles": dict(server.troubles),
            }
            for server in found
        ],
    }


def markdown(result: Result) -> str:
    lines = [
        f"Random Llama, 6 layers of 256, float32, one thread each, prompts of about {SHARED + UNSEEN} tokens and "
        f"{NEW_TOKENS} new ones, a load of {result['load']:.1f}; {measured_on(result['provenance'])}",
        "",
        "| | first token, cold | first token, warm | "
        + " | ".join(f"answers/s, {clients} client{'s' * (clients > 1)}" for clients in CLIENTS)
        + " | right answers | what else happened |",
        "| --- |" + " ---: |" * (3 + len(CLIENTS)) + " --- |",
    ]
    for server in result["servers"]:
        times = [f"{server['first_ms'][k]:.0f} ms" if k in server["first_ms"] else "-" for k in ("cold", "warm")]
        rates = [f"{server['per_s'][n]:.1f}" if n in server["per_s"] else "-" for n in CLIENTS]
        right = f"{server['right']} of {server['asked']}"
        told = ", ".join(f"{what}: {count}" for what, count in server["troubles"].items())
        lines.append(f"| {' | '.join([server['name'], *times, *rates, right, told])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--peer-python", help="interpreter that has kvboost 0.9.0; see kvboost_peer.py")
    parser.add_argument("--rounds", type=int, default=7, help="of times to the first token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for what the servers print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "provenance": provenance(sys.argv[1:], "server.py"),
        **run(options.rounds, options.seed, options.peer_python, options.logs),
    }
    write(options.out, "server-cpu", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
