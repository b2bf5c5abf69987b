"""Moved documents: quality, time to the first token, the long run, and kvboost 0.9.0 beside them.

    python benchmarks/repair.py [quality] [ttft] [steady] [peer] --out benchmarks/results [--device cuda]
        [--peer-python PYTHON]

All parts but the peer run unless some are named; the peer needs an interpreter of its own (see `kvboost_peer.py`).
`quality` is described in `repair_quality.py`, `steady` in `repair_steady.py`. Clocks, rounds and medians are those of
`reuse.py`: from the call to the first token on the host.

`ttft` asks about 6 documents of 512 tokens. Each round has an order and a question of its own; before each timed call,
untimed, a fresh store sees the documents in another order, none behind the one that it stands behind in the timed
prompt. The model is the random Llama of `reuse.py` with 4 key-value heads.

`peer` asks the embedded reader one question about each of the shuffled prompts of `quality`, of documents that were
seen in another order. Both sides tokenize within the clock and are told the texts.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from repair_quality import (
    draw_case,
    measure_quality,
    other_order,
    quality_figure,
    quality_markdown,
)
from repair_steady import measure_steady, steady_figure, steady_markdown
from reuse import Result, in_turn, make_model, measured_on, medians, provenance, rounded, run_peer, ttft

from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy
from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from kvboost_hf.assets.chat import encode
from kvboost_hf.assets.world import Fact, Turn, chat_messages, make_documents
from kvboost_hf.cache.report import ReuseReport
from kvboost_hf.demo.run import timed_generate

NUM_DOCUMENTS, NUM_WORDS, NUM_LAYERS = 6, 512, (8, 16)  # of ttft
MAX_NEW_TOKENS = 12
POLICIES: dict[str, ReusePolicy] = {
    "exact": ReusePolicy(),
    "none": ReusePolicy(mode="blend", repair="none"),
    "first_k": ReusePolicy(mode="blend", repair="first_k"),
    "selective": ReusePolicy(mode="blend", repair="selective"),
    "selective_before": ReusePolicy(mode="blend", repair="selective_before"),
    "cacheblend": ReusePolicy(mode="blend", repair="cacheblend"),
    "query": ReusePolicy(mode="blend", repair="query"),
}


def measure_ttft(device: str, rounds: int) -> Result:
    """Milliseconds and forwarded tokens, by way to use what is stored, for models of some depths."""
    return {"by_layers": {layers: _measure_ttft(device, rounds, layers) for layers in NUM_LAYERS}}


def _measure_ttft(device: str, rounds: int, layers: int) -> Result:
    _, tokenizer = load_embedded()
    model = make_model(device, vocab_size=len(tokenizer), num_key_value_heads=4, num_hidden_layers=layers)
    documents = make_documents(random.Random(0), NUM_DOCUMENTS, num_words=NUM_WORDS)
    facts = [fact for document in documents for fact in document.facts]
    chunker = ContentChunker.for_tokenizer(tokenizer)

    def prompt(order: Any, seed: str) -> list[int]:
        fact = random.Random(seed).choice(facts)
        return encode(tokenizer, chat_messages([Turn(tuple(documents[i] for i in order), fact)]))

    seen = prompt(range(NUM_DOCUMENTS), "seen")
    prompts = {n: prompt(other_order(random.Random(n), NUM_DOCUMENTS), f"round {n}") for n in range(-1, rounds)}
    reports: dict[str, ReuseReport] = {}

    def reused(name: str, n: int) -> float:
        store = ChunkStore(model, chunker=chunker)
        store.warm(seen)
        cache = ChunkReuseCache(model, store, POLICIES[name])
        ms = ttft(model, prompts[n], past_key_values=cache)
        reports[name] = cache.report
        return ms

    arms: dict[str, Callable[[int], float]] = {"plain": lambda n: ttft(model, prompts[n])}
    arms |= {name: lambda n, name=name: reused(name, n) for name in POLICIES}
    found = medians(in_turn(arms, rounds))
    print(f"ttft, {layers} layers: {rounded(found)}", flush=True)
    return {
        "prompt_tokens": len(prompts[0]),
        "ms": found,
        "last_round": {
            name: {
                "forwarded": reports[name].forwarded_tokens,
                "exact": reports[name].exact_tokens,
                "moved": reports[name].moved_tokens,
                "recomputed": reports[name].recomputed_tokens,
                "layers": reports[name].layer_tokens,
            }
            for name in POLICIES
        },
    }


def ttft_markdown(result: Result) -> list[str]:
    return [line for layers, found in result["by_layers"].items() for line in _ttft_table(layers, found)]


def _ttft_table(layers: int, result: Result) -> list[str]:
    plain = result["ms"]["plain"]
    lines = [
        f"Random Llama, {layers} layers of 512, 4 key-value heads, float32; {NUM_DOCUMENTS} documents of {NUM_WORDS} "
        f"tokens, {result['prompt_tokens']} in all, documents seen in another order; repairs at their defaults.",
        "",
        "| | TTFT | speed-up | forwarded (mean over layers) | moved | recomputed |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        f"| plain generate() | {plain:.0f} ms | 1.00x | {result['prompt_tokens']} | | |",
    ]
    lines += [
        f"| {name if name == 'exact' else f'blend, {name}'} | {result['ms'][name]:.0f} ms "
        f"| {plain / result['ms'][name]:.2f}x | {row['forwarded']} | {row['moved']} | {row['recomputed']} |"
        for name, row in result["last_round"].items()
    ]
    return [*lines, ""]


def measure_peer(device: str, num_cases: int, num_documents: int, python: str) -> Result:
    """The same prompts, primed in the same way, here and there."""
    model, tokenizer = load_embedded()
    model.to(device)
    chunker = ContentChunker.for_tokenizer(tokenizer)
    seen, asked, facts = [], [], []
    for n in range(num_cases):
        case = draw_case(f"repair/{n}", num_documents, 1)
        fact = (case.starts + case.others)[n % 2]
        facts.append(fact)
        seen.append(tokenizer.decode(case.seen_ids(tokenizer)))
        asked.append(tokenizer.decode(case.ids(tokenizer, fact)))
    arms = {"plain": None, **POLICIES}
    answered: dict[str, list[tuple[float, int, str]]] = {name: [] for name in arms}
    for n in range(-1, num_cases):  # the first round is not timed
        for name, policy in arms.items():
            cache = None
            if policy is not None:
                store = ChunkStore(model, chunker=chunker)
                store.warm(seen[max(n, 0)], tokenizer=tokenizer)
                cache = ChunkReuseCache(model, store, policy)
            start = time.perf_counter()
            ids = tokenizer.encode(asked[max(n, 0)])
            tokenizing = 1000 * (time.perf_counter() - start)
            call = timed_generate(model, ids, MAX_NEW_TOKENS, past_key_values=cache)
            if n >= 0:
                forwarded = cache.report.forwarded_tokens if cache is not None else len(ids)
                said = str(tokenizer.decode(call.ids, skip_special_tokens=True))
                answered[name].append((tokenizing + call.ttft_ms, forwarded, said))
    ours = {name: peer_row(facts, *map(list, zip(*found, strict=True))) for name, found in answered.items()}
    workload = {
        "max_new_tokens": 1,
        "cases": [{"name": str(n), "prime": [seen[n]], "prompt": asked[n], "repeats": 1} for n in range(num_cases)],
        "answers": {
            "max_new_tokens": MAX_NEW_TOKENS,
            "prompts": [text for both in zip(seen, asked, strict=True) for text in both],
        },
    }
    found = run_peer(python, workload, str(EMBEDDED_MODEL_DIR), device)
    theirs = {}
    for answers in found["answers"]:
        cases = [case for case in found["cases"] if case["method"] == answers["method"]]
        theirs[answers["method"]] = peer_row(
            facts,
            [case["first_token_ms"][0] for case in cases],
            [case["forwarded_to_first_token"] for case in cases],
            answers["said"][1::2],
        )
    sizes = {"prompts": num_cases, "documents": num_documents}
    return {**sizes, "ours": ours, "peer": theirs, "version": found["version"]}


def peer_row(facts: list[Fact], times: list[float], forwarded: list[int], said: list[str]) -> Result:
    return {
        "ms": statistics.median(times),
        "forwarded": statistics.fmean(forwarded),
        "right": statistics.fmean(text == fact.answer for text, fact in zip(said, facts, strict=True)),
    }


def peer_markdown(result: Result) -> list[str]:
    lines = [
        f"{result['prompts']} prompts of {result['documents']} documents on the embedded model, seen in another "
        "order; every other question is about a pronoun at the start of a document. Speed-ups are over plain "
        "generate() of the same process.",
        "",
        "| | right | forwarded to the first token | TTFT | speed-up |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for who, rows in (("kvboost_hf", result["ours"]), (f"kvboost {result['version']}", result["peer"])):
        lines += [
            f"| {who}, {name} | {row['right']:.1%} | {row['forwarded']:.0f} | {row['ms']:.1f} ms "
            f"| {rows['plain']['ms'] / row['ms']:.2f}x |"
            for name, row in rows.items()
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="of quality, ttft, steady, peer")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON, the tables and the figures")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=int, default=20, help="of quality, and prompts of peer")
    parser.add_argument("--documents", type=int, default=10, help="of quality and peer: in each prompt")
    parser.add_argument("--questions", type=int, default=5, help="of quality: of either kind in each case")
    parser.add_argument("--rounds", type=int, default=7, help="of ttft")
    parser.add_argument("--batches", type=int, default=10, help="of steady")
    parser.add_argument("--batch", type=int, default=200, help="of steady: prompts in each batch")
    parser.add_argument("--room", type=float, default=0.33, help="of steady: share of the pool that the store holds")
    parser.add_argument("--peer-python", help="an interpreter with kvboost 0.9.0, torch and transformers")
    options = parser.parse_args()
    shape = (options.device, options.cases, options.documents)
    steady = (options.device, options.batches, options.batch, options.room)
    parts: dict[str, tuple[Callable[[], Result], Callable[[Result], list[str]]]] = {
        "quality": (lambda: measure_quality(*shape, options.questions), quality_markdown),
        "ttft": (lambda: measure_ttft(options.device, options.rounds), ttft_markdown),
        "steady": (lambda: measure_steady(*steady), steady_markdown),
        "peer": (lambda: measure_peer(*shape, options.peer_python), peer_markdown),
    }
    if unknown := set(options.parts) - set(parts):
        parser.error(f"parts must be of {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    if "peer" in options.parts and not options.peer_python:
        parser.error("peer needs --peer-python")
    figures = {"quality": quality_figure, "steady": steady_figure}
    arguments = ["PEER_PYTHON" if a == options.peer_python else a for a in sys.argv[1:]]
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = options.parts or [part for part in parts if part != "peer" or options.peer_python]
    for part in chosen:
        measure, markdown = parts[part]
        where = provenance(arguments, "repair.py")
        result = measure()
        name = f"repair-{part}-{options.device}"
        text = "\n".join([measured_on(where), "", *markdown(result)]) + "\n"
        (options.out / f"{name}.json").write_text(json.dumps({"provenance": where, **result}, indent=1) + "\n")
        (options.out / f"{name}.md").write_text(text)
        if part in figures:
            figures[part](result, options.out / f"{name}.png")
        print(text)


if __name__ == "__main__":
    main()
