"""Moved documents in the long run: how much of them a store goes on serving that cannot hold them all.

Each prompt holds six distinct documents of a pool, drawn by Zipf's law with exponent 1 and shuffled. The store has
room for a share of the pool. What a hit rate can be at most depends on the draws: beside ours stands that of a cache
of whole documents in as many bytes that knows the future and gives up what is needed last (Belady, 1966), and that of
one that always holds the most popular documents: draws do not depend on those before, so that no cache that knows only
the past can do better in the long run.

The model is a random Llama of 2 layers, 64 wide: what is counted does not depend on it.
"""

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from repair_quality import blend
from reuse import Result, make_model, rounded, ttft
from transformers import PreTrainedTokenizerBase

from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy
from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.texts import encode
from kvboost_hf.assets.world import ChatTurn, chat_messages, make_documents
from kvboost_hf.compat import bytes_per_token

POOL, DRAWN, NUM_WORDS = 200, 6, 192
STEADY_FROM = 3  # batches that the store is given to fill up
AHEAD = 3  # batches that nobody runs, and that the optimum sees coming: else it would gain from the end being near
_TOKEN_BYTES = 8  # of an id, which the store keeps, too
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    ids: list[int]
    documents: tuple[int, ...]  # of the pool, in the order of the prompt
    tokens: int  # of the documents
    head: int  # tokens in front of the first document


def draw_prompts(tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0) -> tuple[list[Prompt], list[int]]:
    """Prompts, and how many tokens each document of the pool has."""
    pool = [make_documents(random.Random(f"pool/{n}"), 1, num_words=NUM_WORDS)[0] for n in range(POOL)]
    sizes = [len(tokenizer.encode(document.text + "\n\n", add_special_tokens=False)) for document in pool]
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, POOL + 1)
    prompts = []
    for _ in range(count):
        drawn = tuple(rng.permutation(rng.choice(POOL, DRAWN, replace=False, p=weights / weights.sum())).tolist())
        documents = tuple(pool[n] for n in drawn)
        facts = [fact for document in documents for fact in document.facts]
        ids = encode(tokenizer, chat_messages([ChatTurn(documents, facts[rng.integers(len(facts))])]))
        first = tokenizer.encode(documents[0].text, add_special_tokens=False)
        head = next(at for at in range(len(ids)) if ids[at : at + len(first)] == first)
        prompts.append(Prompt(ids, drawn, sum(sizes[n] for n in drawn), head))
    return prompts, sizes


def belady(requests: Sequence[Sequence[int]], capacity: int) -> list[list[int]]:
    """Of each request, what a cache of `capacity` items finds that gives up, or does not take, what is needed last."""
    uses: dict[int, list[int]] = {}
    for at, request in enumerate(requests):
        for item in request:
            uses.setdefault(item, []).append(at)
    for times in uses.values():
        times.reverse()
    cached: dict[int, int] = {}  # item -> its next use
    hits = []
    for request in requests:
        hits.append([item for item in request if item in cached])
        for item in request:
            uses[item].pop()
            cached[item] = uses[item][-1] if uses[item] else _NEVER
            if len(cached) > capacity:
                del cached[max(cached, key=cached.__getitem__)]
    return hits


def measure_steady(device: str, num_batches: int, batch: int, share: float) -> Result:
    """Batch by batch: the share of the documents' tokens that were reused, and the time to the first token."""
    _, tokenizer = load_embedded()
    model = make_model(
        device,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    prompts, sizes = draw_prompts(tokenizer, (num_batches + AHEAD) * batch)
    per_token = bytes_per_token(model) + _TOKEN_BYTES
    max_bytes = int(share * sum(sizes) * per_token)
    capacity = int(max_bytes / (statistics.fmean(sizes) * per_token))
    policies: dict[str, ReusePolicy | None] = {
        "plain": None,
        "exact": ReusePolicy(min_prefill_saving=0),
        "blend": blend(),
    }
    chunker = ContentChunker.for_tokenizer(tokenizer)
    stores = {name: ChunkStore(model, chunker=chunker, max_bytes=max_bytes) for name in ("exact", "blend")}
    best = belady([prompt.documents for prompt in prompts], capacity)
    rows = []
    for n in range(num_batches):
        part = slice(n * batch, (n + 1) * batch)
        reused, times = dict.fromkeys(stores, 0), {name: [] for name in policies}  # type: ignore[var-annotated]
        for prompt in prompts[part]:
            for name, policy in policies.items():
                if policy is None:
                    times[name].append(ttft(model, prompt.ids))
                    continue
                cache = ChunkReuseCache(model, stores[name], policy)
                times[name].append(ttft(model, prompt.ids, past_key_values=cache))
                report = cache.report
                reused[name] += report.moved_tokens + max(0, report.exact_tokens - prompt.head)
        tokens = sum(prompt.tokens for prompt in prompts[part])
        row = {
            **{name: count / tokens for name, count in reused.items()},
            "popular": sum(sizes[item] for p in prompts[part] for item in p.documents if item < capacity) / tokens,
            "optimal": sum(sizes[item] for hits in best[part] for item in hits) / tokens,
            **{f"{name}_ttft_ms": statistics.median(found) for name, found in times.items()},
        }
        print(f"steady, batch {n + 1}: {rounded(row)}", flush=True)
        rows.append(row)
    steady = rows[STEADY_FROM:]
    return {
        "prompts": num_batches * batch,
        "prompt_tokens": statistics.fmean(len(prompt.ids) for prompt in prompts),
        "document_tokens": statistics.fmean(sizes),
        "max_bytes": max_bytes,
        "capacity_documents": capacity,
        "evictions": {name: store.stats()["evictions"] for name, store in stores.items()},
        "batches": rows,
        "steady": {
            name: statistics.fmean(row[name] for row in steady) for name in ("exact", "blend", "popular", "optimal")
        },
        "span": {
            "blend": spread(row["blend"] for row in steady),
            "optimal": spread(row["optimal"] for row in steady),
            "difference": spread(row["optimal"] - row["blend"] for row in steady),
        },
    }


def spread(values: Iterable[float]) -> float:
    """The largest less the smallest."""
    found = list(values)
    return max(found) - min(found)


def steady_markdown(result: Result) -> list[str]:
    found = result["steady"]
    points = {name: f"{100 * value:.1f}" for name, value in result["span"].items()}
    lines = [
        f"{result['prompts']} prompts of {result['prompt_tokens']:.0f} tokens: {DRAWN} of {POOL} documents of "
        f"{result['document_tokens']:.0f} tokens, Zipf; room for {result['capacity_documents']} of them. From batch "
        f"{STEADY_FROM + 1} on, {found['blend']:.1%} of the documents' tokens are reused, {found['exact']:.1%} by "
        f"exact reuse alone; the optimum that knows the future has {found['optimal']:.1%} (ratio "
        f"{found['blend'] / found['optimal']:.2f}), the most popular documents {found['popular']:.1%} (ratio "
        f"{found['blend'] / found['popular']:.2f}). Between batches, ours differs by {points['blend']} points, the "
        f"optimum by {points['optimal']}, and what lies between the two by {points['difference']}.",
        "",
        "| batch | blend | exact only | most popular | optimal | TTFT, plain | exact | blend |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {n + 1} | {row['blend']:.1%} | {row['exact']:.1%} | {row['popular']:.1%} | {row['optimal']:.1%} "
        f"| {row['plain_ttft_ms']:.1f} ms | {row['exact_ttft_ms']:.1f} ms | {row['blend_ttft_ms']:.1f} ms |"
        for n, row in enumerate(result["batches"])
    ]
    return lines


def steady_figure(result: Result, path: Path) -> None:
    """Write a PNG of the hit rates by batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    lines = (
        ("optimal", "#9a9a9a", "optimal (knows the future)"),
        ("popular", "#3a9d5d", "the most popular documents"),
        ("blend", "#1f6fb2", "blend"),
        ("exact", "#d9822b", "exact reuse alone"),
    )
    at = range(1, 1 + len(result["batches"]))
    for name, colour, label in lines:
        axis.plot(at, [100 * row[name] for row in result["batches"]], "o-", color=colour, label=label)
    axis.set_ylim(0, 100)
    axis.set_xticks(at)
    axis.set_xlabel(f"batch of {result['prompts'] // len(result['batches'])} prompts")
    axis.set_ylabel("tokens of documents reused (%)")
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="center right")
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)
