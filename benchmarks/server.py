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

The model is a random Llama of 6 layers, 256 wide, with the embedded tokenizer. With `--model FOLDER` it is that of the
folder, prompts are real text, and two more things are measured:

- An agent's session: turns of a transcript that grows by about `TURN` tokens and an answer, one after the other.
- Behind a long prompt: a short request, sent half a second after an unseen one of about `BEHIND` tokens.

    python benchmarks/server.py --out benchmarks/results --model .models/smollm2/float32
        [--llama-python PYTHON --gguf FILE]

llama.cpp runs weights of its own, quantized, so that its answers are others. They are right if they are those that it
gives to the same prompt again, alone.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from record import write
from reuse import Result, make_model, measured_on, provenance
from server_process import OURS, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.texts import prose
from kvboost_hf.assets.world import make_documents

SHARED, UNSEEN = 1024, 24  # tokens, nearly: a word or a full stop is one
NEW_TOKENS = 16
CLIENTS = (1, 8, 32)
TURNS, HEAD, TURN = 20, 400, 60  # of an agent's session: how many, and tokens before the first and of each
BEHIND = 3000  # tokens of the long prompt
COMPARED = 8  # answers of each throughput that are compared, with a model that takes seconds for a plain one
LIMIT_S = 30
SLOW_LIMIT_S = 300  # with a folder's model


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
    other_weights: bool = False
    limit_s: float = LIMIT_S
    port: int = 0
    first_ms: dict[str, list[float]] = field(default_factory=dict)
    per_s: dict[int, float] = field(default_factory=dict)  # answers, by clients
    session_s: list[float] = field(default_factory=list)
    asked: int = 0
    compared: int = 0
    right: int = 0
    troubles: Counter[str] = field(default_factory=Counter)

    def ask(self, prompt: str, wanted: str | None, *, stream: bool = False) -> Said:
        """Send a request, and note what came of it. Without `wanted` any answer will do."""
        said = self._ask(prompt, stream)
        self.asked += 1
        if said.text is None or wanted is not None:
            self.compare(said, wanted)
        return said

    def compare(self, said: Said, wanted: str | None) -> None:
        """Note whether an answer is right."""
        self.compared += 1
        right = said.text is not None and said.text == wanted
        self.right += right
        if not right:
            self.troubles[said.trouble or ("another answer" if said.text else "an empty answer")] += 1

    def alone(self, prompt: str) -> str | None:
        """What the server says to a prompt when nothing else runs; not counted."""
        return self._ask(prompt, False).text

    def _ask(self, prompt: str, stream: bool) -> Said:
        return _ask(self.port, self.model, prompt, self.temperature, stream, self.limit_s)


def _ask(port: int, model: str, prompt: str, temperature: float, stream: bool, limit_s: float) -> Said:
    sizes = {"max_tokens": NEW_TOKENS, "temperature": temperature}
    body = {"model": model, "prompt": prompt, "stream": stream, **sizes}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
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
            if time.perf_counter() - start > limit_s:
                raise TimeoutError
        return Said(text, first, None)
    except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
        return Said(None, None, "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    finally:
        connection.close()


@dataclass(frozen=True)
class Prompts:
    """Texts, and what a plain `generate()` says to each."""

    model: Any
    tokenizer: Any
    text: Callable[[int], str]  # draws one of about so many tokens
    compared: int | None  # answers of each throughput that are compared; None for all

    @torch.no_grad()
    def wanted(self, prompt: str) -> str:
        ids = torch.tensor([self.tokenizer.encode(prompt)])
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        return str(self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def real_prompts(folder: str, seed: int) -> Prompts:
    """Parts of Python's language reference, for the model of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, draw = AutoTokenizer.from_pretrained(folder), random.Random(seed)
    ids = tokenizer.encode("\n\n".join(prose(200, lambda text: len(tokenizer.encode(text)), seed)))

    def text(tokens: int) -> str:
        start = draw.randrange(len(ids) - tokens)
        return str(tokenizer.decode(ids[start : start + tokens]))

    return Prompts(model, tokenizer, text, COMPARED)


def random_prompts(folder: str, seed: int) -> Prompts:
    """Documents of the embedded model's world, for a random model that is written to a folder."""
    tokenizer, draw = load_embedded()[1], random.Random(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = make_model("cpu", **sizes, num_key_value_heads=4, vocab_size=len(tokenizer), initializer_range=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def text(tokens: int) -> str:
        count = max(1, tokens // 128)
        return " ".join(one.text for one in make_documents(draw, count, num_words=tokens // count))

    return Prompts(model, tokenizer, text, None)


def measure_first(servers: list[Server], prompts: Prompts, rounds: int) -> None:
    """The first round is not timed."""
    shared = prompts.text(SHARED)
    for n in range(-1, rounds):
        for kind, start in (("cold", prompts.text(SHARED)), ("warm", shared)):
            prompt = f"{start} {prompts.text(UNSEEN)}"
            wanted = prompts.wanted(prompt)
            for server in _in_turn(servers, n):
                first = server.ask(prompt, None if server.other_weights else wanted, stream=True).first_ms
                if n >= 0 and first is not None:
                    server.first_ms.setdefault(kind, []).append(first)
        print(f"round {n}: {[(server.name, server.first_ms) for server in servers]}", file=sys.stderr, flush=True)


def measure_throughput(servers: list[Server], prompts: Prompts) -> None:
    shared = prompts.text(SHARED)
    for n, clients in enumerate(CLIENTS):
        asked = [f"{shared} {prompts.text(UNSEEN)}" for _ in range(max(8, clients))]
        compared = prompts.compared or len(asked)
        wanted = [prompts.wanted(prompt) for prompt in asked[:compared]]
        for server in _in_turn(servers, n):
            known = [None] * len(asked) if server.other_weights else [*wanted, *[None] * (len(asked) - compared)]
            server.ask(asked[0], known[0])  # the shared part is known, as in the middle of a day
            start = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                said = list(pool.map(server.ask, asked, known))
            answered = sum(one.text is not None for one in said)
            server.per_s[clients] = answered / (time.perf_counter() - start)
            print(f"{clients} clients: {server.name} {server.per_s[clients]:.2f}/s", file=sys.stderr, flush=True)
            for prompt, one in zip(asked[:compared], said, strict=False):
                if server.other_weights:
                    server.compare(one, server.alone(prompt))


def measure_sessions(servers: list[Server], prompts: Prompts) -> None:
    """All servers get the same transcript, with the answers of plain `generate()`, a turn of each in turn."""
    transcript = prompts.text(HEAD)
    totals = dict.fromkeys((server.name for server in servers), 0.0)
    for turn in range(TURNS):
        transcript = f"{transcript}\n{prompts.text(TURN)}\n"
        wanted = prompts.wanted(transcript)
        for server in _in_turn(servers, turn):
            start = time.perf_counter()
            said = server.ask(transcript, None if server.other_weights else wanted, stream=True)
            totals[server.name] += time.perf_counter() - start
            if turn >= TURNS // 2 and said.first_ms is not None:
                server.first_ms.setdefault("turn", []).append(said.first_ms)
        transcript += wanted
    for server in servers:
        server.session_s.append(totals[server.name])
    print(f"session: {totals}", file=sys.stderr, flush=True)


def measure_behind(servers: list[Server], prompts: Prompts, rounds: int) -> None:
    for n in range(rounds):
        long, short = prompts.text(BEHIND), prompts.text(UNSEEN)
        for server in _in_turn(servers, n):
            with ThreadPoolExecutor(1) as pool:
                first = pool.submit(server.ask, long, None)
                time.sleep(0.5)
                said = server.ask(short, None, stream=True)
                first.result()
            if said.first_ms is not None:
                server.first_ms.setdefault("behind", []).append(said.first_ms)
    print(
        f"behind: {[(server.name, server.first_ms.get('behind')) for server in servers]}", file=sys.stderr, flush=True
    )


def _in_turn(servers: list[Server], n: int) -> list[Server]:
    return servers[n % len(servers) :] + servers[: n % len(servers)]


def compared(folder: str, options: argparse.Namespace) -> list[Server]:
    transformers = [str(Path(sys.executable).with_name("transformers")), "serve", folder, "--device", "cpu"]
    if options.model is not None:
        transformers += ["--dtype", "float32"]
    own = ["--model", folder, "--model-name", "llama", "--device", "cpu"]
    servers = [
        Server("kvboost_hf", "llama", [*OURS, *own]),
        Server("transformers serve", folder, transformers),
        Server("transformers serve, continuous batching", folder, [*transformers, "--continuous-batching"]),
    ]
    if options.peer_python is not None:
        peer = [options.peer_python, "-m", "kvboost.server", "--model", folder, "--model-name", "llama"]
        # It divides by the temperature: with 0 it says nothing.
        told = [*peer, "--device", "cpu", "--dtype", "float32"]
        servers.append(Server("kvboost 0.9.0", "llama", told, temperature=1e-4))
    if options.llama_python is not None:
        peer = [options.llama_python, str(Path(__file__).with_name("llama_cpp_peer.py")), "--gguf", str(options.gguf)]
        name = f"llama.cpp, {options.gguf.stem.split('.')[-1]}"
        servers.append(Server(name, "llama", peer, other_weights=True))
    for server in servers:
        server.limit_s = LIMIT_S if options.model is None else SLOW_LIMIT_S
    return servers


def run(options: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = made if options.model is None else str(options.model)
        prompts = (random_prompts if options.model is None else real_prompts)(folder, options.seed)
        found, servers = compared(folder, options), []
        for n, server in enumerate(found):
            where = options.logs / f"{n}.log" if options.logs is not None else Path(os.devnull)
            log = stack.enter_context(where.open("w"))
            try:
                started = serving(server.command, log=log, health=server.health, environment={"HF_HUB_OFFLINE": "1"})
                server.port = stack.enter_context(started).port
                servers.append(server)
            except RuntimeError:
                server.troubles["did not start"] += 1
        measure_first(servers, prompts, options.rounds)
        if options.model is not None:
            measure_behind(servers, prompts, options.rounds)
            measure_sessions(servers, prompts)
        measure_throughput(servers, prompts)
    return {
        "load": os.getloadavg()[1],
        "servers": [
            {
                "name": server.name,
                "first_ms": {kind: statistics.median(times) for kind, times in server.first_ms.items()},
                "per_s": server.per_s,
                "session_s": server.session_s,
                "asked": server.asked,
                "compared": server.compared,
                "right": server.right,
                "troubles": dict(server.troubles),
            }
            for server in found
        ],
    }


def markdown(result: Result) -> str:
    real = result["model"] is not None
    what = f"{result['model']}, float32" if real else "Random Llama, 6 layers of 256, float32"
    kinds = ["cold", "warm", *(["turn", "behind"] if real else [])]
    heads = {
        "cold": "first token, cold",
        "warm": "first token, warm",
        "turn": f"first token, turns {TURNS // 2 + 1} to {TURNS} of a session",
        "behind": f"first token, behind {BEHIND} tokens",
    }
    lines = [
        f"{what}, one thread each, prompts of about {SHARED + UNSEEN} tokens and {NEW_TOKENS} new ones, a load of "
        f"{result['load']:.1f}; {measured_on(result['provenance'])}",
        "",
        "| "
        + " | ".join(
            [
                "",
                *(heads[kind] for kind in kinds),
                *([f"session of {TURNS} turns"] if real else []),
                *(f"answers/s, {clients} client{'s' * (clients > 1)}" for clients in CLIENTS),
                "right answers",
                "what else happened",
            ]
        ).strip()
        + " |",
        "| --- |" + " ---: |" * (len(kinds) + real + len(CLIENTS) + 1) + " --- |",
    ]
    for server in result["servers"]:
        times = [f"{server['first_ms'][kind]:.0f} ms" if kind in server["first_ms"] else "-" for kind in kinds]
        session = [" ".join(f"{took:.1f} s" for took in server["session_s"]) or "-"] if real else []
        rates = [f"{server['per_s'][n]:.{2 if real else 1}f}" if n in server["per_s"] else "-" for n in CLIENTS]
        right = f"{server['right']} of {server['compared']}"
        told = ", ".join(f"{what}: {count}" for what, count in server["troubles"].items())
        lines.append(f"| {' | '.join([server['name'], *times, *session, *rates, right, told])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--model", type=Path, help="folder of a model, in place of a random one")
    parser.add_argument("--peer-python", help="interpreter that has kvboost 0.9.0; see kvboost_peer.py")
    parser.add_argument("--llama-python", help="interpreter that has xllamacpp; see llama_cpp_peer.py")
    parser.add_argument("--gguf", type=Path, help="weights for llama.cpp")
    parser.add_argument("--rounds", type=int, default=7, help="of times to the first token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for what the servers print")
    options = parser.parse_args()
    if (options.llama_python is None) != (options.gguf is None):
        parser.error("`--llama-python` and `--gguf` go together.")
    torch.set_num_threads(1)
    result = {
        "provenance": provenance(sys.argv[1:], "server.py"),
        "model": str(options.model) if options.model is not None else None,
        **run(options),
    }
    write(options.out, "server-cpu" if options.model is None else "server-real-cpu", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
