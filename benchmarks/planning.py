"""What planning costs: finding what a store can serve of a long prompt, before anything is computed or copied.

    python benchmarks/planning.py --out benchmarks/results

A prompt of 32k tokens against an index of 10k chunks, which hold tokens but no K/V. Half of the prompt is stored
documents, each at another place than where it was stored; in one arm all chunks start with the same 24 tokens, and so
does every document of the prompt. Milliseconds of computing, so that other work on the machine is not counted; medians
of 20 rounds.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from record import write
from reuse import Result, measured_on, provenance

from kvboost_hf.cache.planning.chunks import (
    HEAD_TOKENS,
    Chunker,
    ContentChunker,
    FixedChunker,
    Tokens,
    prefix_key,
    text_of,
)
from kvboost_hf.cache.planning.content_index import ContentIndex
from kvboost_hf.cache.planning.match import find_moved
from kvboost_hf.cache.planning.plan import Border, plan_row

PROMPT_TOKENS, CHUNKS = 32_768, 10_000
ROOT = b"root"


@dataclass(frozen=True, eq=False)
class FakeChunk:
    key: bytes
    parent: bytes
    start: int
    tokens: Tokens
    content_only: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> bytes:
        return text_of(self.tokens)


class FakeStore:
    """An index of chunks without K/V, by prefix and by content."""

    def __init__(self, chunker: Chunker) -> None:
        self.chunker = chunker
        self.chunks: dict[bytes, FakeChunk] = {}
        self.by_head: dict[tuple[bytes, bytes], list[FakeChunk]] = {}
        self.content: ContentIndex[FakeChunk] = ContentIndex(threading.RLock())

    def put(self, tokens: Tokens) -> None:
        border = Border(0, ROOT)
        while (cut := self.chunker.next_cut(tokens, border.at)) is not None:
            part = tokens[border.at : cut]
            key = prefix_key(border.key, part)
            chunk = FakeChunk(key, border.key, border.at, part)
            if key not in self.chunks:
                self.chunks[key] = chunk
                self.by_head.setdefault((border.key, part[:HEAD_TOKENS].tobytes()), []).append(chunk)
                self.content.add(chunk)
            border = Border(cut, key)

    def find(self, key: bytes, tokens: Tokens) -> FakeChunk | None:
        chunk = self.chunks.get(key)
        return chunk if chunk is not None and np.array_equal(chunk.tokens, tokens) else None

    def siblings(self, parent: bytes, head: Tokens) -> list[FakeChunk]:
        return self.by_head.get((parent, head.tobytes()), [])[-256:]

    def states_after(self, parent: bytes, head: Tokens) -> list[FakeChunk]:
        return []


def words(rng: np.random.Generator, n: int) -> Tokens:
    return np.minimum(rng.zipf(1.3, n), 30_000).astype(np.int64)


def measure(work: Callable[[], int], rounds: int) -> Result:
    times, found = [], 0
    for _ in range(rounds):
        begin = time.process_time()
        found = work()
        times.append(1000 * (time.process_time() - begin))
    return {"ms": statistics.median(times), "tokens_found": found}


def moved(store: FakeStore, prompt: Tokens) -> int:
    return sum(s.stop - s.start for s in find_moved(prompt, 16, len(prompt), store.content))


def exact(store: FakeStore, prompt: Tokens) -> int:
    return plan_row(prompt, 0, Border(0, ROOT), len(prompt) - 1, store.chunker, store).hit


def cuts(chunker: Chunker, prompt: Tokens) -> int:
    at = 0
    while (cut := chunker.next_cut(prompt, at)) is not None:
        at = cut
    return at


def run(rounds: int) -> Result:
    rng = np.random.default_rng(0)
    template = words(rng, 24)
    arms: Result = {}
    for name, head in (("chunks of their own", template[:0]), ("all chunks start alike", template)):
        store = FakeStore(FixedChunker(128))
        documents = [np.concatenate([head, words(rng, 128 - len(head))]) for _ in range(CHUNKS)]
        for document in documents:
            store.put(document)
        half = [
            np.concatenate([documents[i], head, words(rng, 128 - len(head))])
            for i in rng.choice(CHUNKS, PROMPT_TOKENS // 256, replace=False)
        ]
        prompt = np.concatenate(half)
        arms[f"moved, {name}"] = measure(lambda: moved(store, prompt), rounds)
    repeated = np.full(PROMPT_TOKENS, 7)
    store.put(np.full(PROMPT_TOKENS // 8, 7))
    arms["moved, one token over and over"] = measure(lambda: moved(store, repeated), rounds)
    for name, chunker in (("fixed", FixedChunker(128)), ("by content", ContentChunker(128))):
        store = FakeStore(chunker)
        while len(store.chunks) < CHUNKS:
            store.put(prompt := words(rng, PROMPT_TOKENS))
        arms[f"exact, cuts {name}"] = measure(lambda: exact(store, prompt), rounds)
        arms[f"cutting, {name}"] = measure(lambda: cuts(chunker, prompt), rounds)
    return arms


def markdown(result: Result) -> str:
    lines = [
        f"A prompt of {PROMPT_TOKENS} tokens, {CHUNKS} stored chunks; {measured_on(result['provenance'])}",
        "",
        "| | median | tokens found |",
        "| --- | ---: | ---: |",
    ]
    lines += [f"| {name} | {row['ms']:.1f} ms | {row['tokens_found']} |" for name, row in result["arms"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    result: Result = {"provenance": provenance(sys.argv[1:], "planning.py"), "arms": run(options.rounds)}
    write(options.out, "planning", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
