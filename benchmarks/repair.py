"""Moved documents: quality, time to the first token, the long run, and kvboost 0.9.0 beside them.

    python benchmarks/repair.py [quality] [ttft] [steady] [peer] --out benchmarks/results [--device cuda]
        [--peer-python PYTHON]

All parts but the peer run unless some are named; the peer needs an interpreter of its own (see `kvboost_peer.py`).
`quality` is described in `repair_quality.py`, `steady` in `repair_steady.py`. Clocks, rounds and medians are those of
`reuse.py`: from the call to the first token on the host, and to the end of an answer of 24 tokens.

`ttft` asks about 6 documents of 512 tokens; with a larger shape, about as many as its prompts have room for. Each
round has an order and a question of its own; before each timed call, untimed, a fresh store sees the documents in
another order, none behind the one that it stands behind in the timed prompt. The models are those of `shapes.py` with
4 key-value heads.

`peer` asks the embedded reader one question about each of the shuffled prompts of `quality`, of documents that were
seen in another order. Both sides tokenize within the clock and are told the texts.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from record import Record, add_options, add_shape, write
from repair_quality import (
    measure_quality,
    quality_figure,
    quality_markdown,
)
from repair_steady import measure_steady, steady_figure, steady_markdown
from reuse import in_turn, measured_on, medians, provenance, run_peer
from shapes import SHAPES, Shape, make_model
from targets import Result
from transformers import PreTrainedModel

from benchmarks.leaderboard.facts import draw_facts, other_order
from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy
from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from kvboost_hf.assets.texts import encode
from kvboost_hf.assets.world import ChatTurn, Fact, chat_messages, make_documents
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.verify.measure import timed_generate

DOCUMENTS, NUM_LAYERS = (6, 512), (8, 16)  # of ttft: how many of how many words; of the small model
MAX_NEW_TOKENS = 12
POLICIES: dict[str, ReusePolicy] = {
    "exact": ReusePolicy(),
    "none": ReusePolicy(mode="blend", repair="none", progressive=False),
    "first_k": ReusePolicy(mode="blend", repair="first_k", progressive=False),
    "selective": ReusePolicy(mode="blend", repair="selective", progressive=False),
    "cacheblend": ReusePolicy(mode="blend", repair="cacheblend", progressive=False),
    "query": ReusePolicy(mode="blend", repair="query", progressive=False),
    "riding": ReusePolicy(mode="blend", repair="query", progressive="ride"),
    "all before the second token": ReusePolicy(mode="blend", repair="query", progressive=True),
}
ANSWER = 24  # tokens of a whole answer


class Moved:
    """Prompts about documents that a store has seen in another order.

    Args:
        model: That answers.
        documents: The documents of each prompt.
        words: The words of each document.
        rounds: How many prompts are timed.
    """

    def __init__(self, model: PreTrainedModel, documents: int, words: int, rounds: int) -> None:
        self._model, self._rounds = model, rounds
        self._tokenizer = load_embedded()[1]
        self._documents = [make_documents(random.Random(n), 1, num_words=words)[0] for n in range(documents)]
        self._seen = self._prompt(range(documents), "seen")
        self._prompts = {
            n: self._prompt(other_order(random.Random(n), documents), f"round {n}") for n in range(-1, rounds)
        }
        self.tokens = len(self._prompts[-1])

    def _prompt(self, order: Sequence[int], seed: str) -> list[int]:
        facts = [fact for document in self._documents for fact in document.facts]
        fact = random.Random(seed).choice(facts)
        return encode(self._tokenizer, chat_messages([ChatTurn(tuple(self._documents[i] for i in order), fact)]))

    def measure(self, policy: ReusePolicy, shape: Shape) -> Result:
        """Milliseconds to the first token and of a whole answer, plainly and with a policy, in turn; and what it
        forwarded the last time."""
        chunker = ContentChunker.for_tokenizer(self._tokenizer)
        caches: list[ChunkReuseCache] = []

        def plain(n: int, first: dict[int, float]) -> float:
            call = timed_generate(self._model, self._prompts[n], ANSWER, min_new_tokens=ANSWER)
            first[n] = call.ttft_ms
            return call.total_ms

        def reused(n: int, first: dict[int, float]) -> float:
            store = shape.new_store(self._model, chunker=chunker)
            store.warm(self._seen)
            caches[:] = [cache := ChunkReuseCache(self._model, store, policy)]
            call = timed_generate(self._model, self._prompts[n], ANSWER, min_new_tokens=ANSWER, past_key_values=cache)
            first[n] = call.ttft_ms
            return call.total_ms

        firsts: dict[str, dict[int, float]] = {"plain": {}, "ms": {}}
        whole = {
            "plain_answer": partial(plain, first=firsts["plain"]),
            "answer_ms": partial(reused, first=firsts["ms"]),
        }
        found = medians(in_turn(whole, self._rounds))
        for name, times in firsts.items():
            found[name] = statistics.median(ms for n, ms in times.items() if n >= 0)
        report: ReuseReport = caches[0].report
        return {
            **found,
            "forwarded": report.forwarded_tokens,
            "exact": report.exact_tokens,
            "moved": report.moved_tokens,
            "recomputed": report.recomputed_tokens,
            "layers": report.layer_tokens,
        }


def measure_ttft(options: argparse.Namespace, where: Result) -> None:
    """Each way to use what is stored, in models of some depths, or in prompts of some lengths of a larger one."""
    shape = SHAPES[options.shape]
    # Sizes of models; how many documents of how many words.
    cases: list[tuple[Result, int, int]] = [({"num_hidden_layers": depth}, *DOCUMENTS) for depth in NUM_LAYERS]
    if options.shape != "small":
        words = min(DOCUMENTS[1], shape.prompts[0] // 6)
        cases = [({}, tokens // words, words) for tokens in shape.prompts]
    result: Result = {"provenance": where, "by_case": {}}
    record = Record(f"repair-ttft-{options.device}", options, result, ttft_markdown)
    vocabulary = len(load_embedded()[1])

    def measure(moved: Moved, case: str, way: str) -> None:
        found = result["by_case"].setdefault(case, {"prompt_tokens": moved.tokens, "ways": {}})
        found["ways"][way] = row = moved.measure(POLICIES[way], shape)
        print(f"{case}, {way}: {row['plain']:.1f} and {row['ms']:.1f} ms")

    for sizes, number, words in cases:
        model = make_model(options.device, options.shape, vocab_size=vocabulary, num_key_value_heads=4, **sizes)
        moved = Moved(model, number, words, options.rounds)
        case = f"{shape.describe(**sizes)}, {number} documents of {words} words"
        for way in options.ways:
            record.measure(f"{case}, {way}", partial(measure, moved, case, way))
    record.show()


def ttft_markdown(result: Result) -> str:
    lines = [measured_on(result["provenance"]), ""]
    for case, found in result["by_case"].items():
        lines += [
            f"{case}, {found['prompt_tokens']} tokens in all; documents seen in another order; 4 key-value heads; "
            "repairs at their defaults. Each way in turn with plain generate().",
            "",
            f"| | TTFT | plain | speed-up | {ANSWER} tokens | plain | speed-up | forwarded (mean over layers) | moved "
            "| recomputed |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {way if way == 'exact' else f'blend, {way}'} | {row['ms']:.0f} ms | {row['plain']:.0f} ms "
            f"| {row['plain'] / row['ms']:.2f}x | {row['answer_ms']:.0f} ms | {row['plain_answer']:.0f} ms "
            f"| {row['plain_answer'] / row['answer_ms']:.2f}x | {row['forwarded']} | {row['moved']} "
            f"| {row['recomputed']} |"
            for way, row in found["ways"].items()
        ]
        lines.append("")
    return "\n".join(lines)


def measure_peer(device: str, num_cases: int, num_documents: int, python: str) -> Result:
    """The same prompts, primed in the same way, here and there."""
    model, tokenizer = load_embedded()
    model.to(device)  # type: ignore[arg-type]
    chunker = ContentChunker.for_tokenizer(tokenizer)
    seen, asked, facts = [], [], []
    for n in range(num_cases):
        case = draw_facts(f"repair/{n}", num_documents, 1)
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
                store.warm(seen[max(n, 0)], tokenizer=tokenizer)  # type: ignore[arg-type]
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
    add_options(parser, rounds=7)
    add_shape(parser, "small")
    parser.add_argument("--ways", nargs="+", choices=POLICIES, default=list(POLICIES), help="of ttft")
    parser.add_argument("--cases", type=int, default=20, help="of quality, and prompts of peer")
    parser.add_argument("--documents", type=int, default=10, help="of quality and peer: in each prompt")
    parser.add_argument("--questions", type=int, default=5, help="of quality: of either kind in each case")
    parser.add_argument("--batches", type=int, default=10, help="of steady")
    parser.add_argument("--batch", type=int, default=200, help="of steady: prompts in each batch")
    parser.add_argument("--room", type=float, default=0.33, help="of steady: share of the pool that the store holds")
    parser.add_argument("--peer-python", help="an interpreter with kvboost 0.9.0, torch and transformers")
    options = parser.parse_args()
    shape = (options.device, options.cases, options.documents)
    steady = (options.device, options.batches, options.batch, options.room)
    parts: dict[str, tuple[Callable[[], Result], Callable[[Result], list[str]]]] = {
        "quality": (lambda: measure_quality(*shape, options.questions), quality_markdown),
        "steady": (lambda: measure_steady(*steady), steady_markdown),
        "peer": (lambda: measure_peer(*shape, options.peer_python), peer_markdown),
    }
    if unknown := set(options.parts) - {"ttft", *parts}:
        parser.error(f"parts must be of ttft, {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    if "peer" in options.parts and not options.peer_python:
        parser.error("peer needs --peer-python")
    figures = {"quality": quality_figure, "steady": steady_figure}
    arguments = ["PEER_PYTHON" if a == options.peer_python else a for a in sys.argv[1:]]
    if options.out is None:
        parser.error("--out is missing")
    chosen = options.parts or ["ttft", *(part for part in parts if part != "peer" or options.peer_python)]
    for part in chosen:
        where = provenance(arguments, "repair.py")
        if part == "ttft":
            measure_ttft(options, where)
            continue
        measure, markdown = parts[part]
        result = measure()
        name = f"repair-{part}-{options.device}"
        text = "\n".join([measured_on(where), "", *markdown(result)]) + "\n"
        write(options.out, name, {"provenance": where, **result}, text)
        if part in figures:
            figures[part](result, options.out / f"{name}.png")
        print(text)


if __name__ == "__main__":
    main()
