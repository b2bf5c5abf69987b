"""Where the tokens of edited prompts go, by kind of edit: prefix, moved text, its repair, new text, what is lost.

    PYTHONPATH=. python benchmarks/transcripts_where.py --out benchmarks/results

The sessions are those of `transcripts.py`, in the tokens of SmolLM2. A small random model runs them: what is found,
moved and chosen for repair depends on tokens alone, and on how many tokens are computed. Nothing is timed or judged.
Text is known if 16 tokens in a row were in an earlier request of the session, or in its answer.
"""

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from edits import as_edits
from record import Record, add_options
from targets import Result
from transcripts import BLEND, EDITS, Session, answer, shared, tool_sessions
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.bench.run import provenance
from recipes.real_model import FLOAT32, fetch

_KNOWN = 16  # tokens in a row
_SELECTIVE = replace(BLEND, repair="selective", progressive=False)
WAYS = {
    "blend": replace(BLEND, repair="query", progressive=False),
    "edit()": replace(BLEND, repair="query", progressive=False),
    "blend, selective": _SELECTIVE,
    "edit(), selective": _SELECTIVE,
}


def known(ids: Sequence[int], earlier: Sequence[Sequence[int]]) -> int:
    """How many tokens are within `_KNOWN` in a row that an earlier text has."""
    windows = {tuple(text[at : at + _KNOWN]) for text in earlier for at in range(len(text) - _KNOWN + 1)}
    found = [False] * len(ids)
    for at in range(len(ids) - _KNOWN + 1):
        if tuple(ids[at : at + _KNOWN]) in windows:
            found[at : at + _KNOWN] = [True] * _KNOWN
    return sum(found)


def count(model: PreTrainedModel, session: Session, way: str, new: int) -> Counter[str]:
    """Where the tokens of all requests but the first went."""
    cache, total = ChunkReuseCache(model, ChunkStore(model), WAYS[way]), Counter[str]()
    earlier = list[list[int]]()
    for at, request in enumerate(session.requests):
        report = None
        edits = as_edits(earlier[-1], request.ids) if earlier else []
        if edits and way.startswith("edit"):
            cache.edit(replace=edits)
            report = cache.report
        said = answer(model, request.ids, cache, new)
        report = cache.report if report is None else report
        if at:
            served = report.reused_tokens + report.recomputed_tokens
            findable = known(request.ids, earlier)
            total["tokens"] += len(request.ids)
            total["prefix"] += shared(session.requests, at)
            total["served"] += served
            total["repair"] += report.recomputed_tokens
            total["reused"] += report.reused_tokens
            total["new"] += len(request.ids) - findable
            total["lost"] += findable - served
        earlier.append([*request.ids, *said[:-1]])
    return total


def measure(into: list[Result], model: PreTrainedModel, session: Session, new: int) -> None:
    """Add the counts of a session, for each way."""
    into.append({"kind": session.kind, "ways": {way: dict(count(model, session, way, new)) for way in WAYS}})
    print(into[-1], flush=True)


def markdown(result: Result) -> str:
    lines = [
        "# Where the tokens of edited prompts go",
        "",
        f"Agents' sessions over tools' outputs, in the tokens of SmolLM2; {result['provenance']}",
        "",
        "`served`: from a prefix, or moved; the `repair` computes some of these again. `new`: not within 16 tokens in",
        "a row that were there before. `lost`: known, and computed all the same: the last 16 tokens of a prompt, and",
        "short texts between edits.",
    ]
    for way in WAYS:
        lines += ["", f"## {way}", "", "| edits | tokens | prefix | served | repair | reused | new | lost |"]
        lines += ["| --- |" + " ---: |" * 7]
        for kind in (*EDITS, "all"):
            rows = [each["ways"][way] for each in result["sessions"] if kind in (each["kind"], "all")]
            tokens = sum(row["tokens"] for row in rows)
            if rows:
                names = ("prefix", "served", "repair", "reused", "new", "lost")
                cells = (f"{sum(row.get(name, 0) for row in rows) / tokens:.1%}" for name in names)
                lines.append(f"| {kind} | {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--sessions", type=int, default=4, help="of each kind of edit")
    parser.add_argument("--turns", type=int, default=3, help="requests of a session")
    parser.add_argument("--steps", type=int, default=8, help="results of a session before its first request")
    parser.add_argument("--new", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    fetch()
    tokenizer = AutoTokenizer.from_pretrained(FLOAT32)
    layers = {"num_hidden_layers": 9, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 8192, **layers}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    command = f"`python benchmarks/transcripts_where.py {' '.join(sys.argv[1:])}`".replace(" `", "`")
    result: Result = {"provenance": str(provenance(command, "cpu")), "sessions": []}
    record = Record("transcripts-where", options, result, markdown)
    made = tool_sessions(tokenizer, list(EDITS), options.sessions, options.turns, options.steps, options.seed)
    for number, session in enumerate(made):
        record.measure(f"{session.kind}, {number}", partial(measure, result["sessions"], model, session, options.new))
    record.show()


if __name__ == "__main__":
    main()
