"""What is reused of chats and of documents in other orders, cut at multiples of 128 tokens and by content.

    python benchmarks/cutting.py --out benchmarks/results

The prompts are those of `kvboost-hf bench`, of three seeds; plain answers of 16 tokens go back into chats. Each prompt
has a cache of its own, so that all it reuses comes from the store. Counts, which are the same on every machine.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from record import write
from reuse import Result, measured_on, provenance

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.texts import encode
from kvboost_hf.bench.prompts import shuffled_documents
from kvboost_hf.bench.workloads import WORKLOADS
from kvboost_hf.config import ReuseMode
from kvboost_hf.engine import EngineSettings

PROMPTS, ANSWER_TOKENS, DOCUMENT_TOKENS, SHUFFLED = 8, 16, 1000, 6
CUTS = {"at multiples": 0, "by content": None}  # `chunk_boundary_window`


def generate(model: Any, ids: list[int], cache: ChunkReuseCache, tokens: int) -> list[int]:
    row = torch.tensor([ids])
    out = model.generate(
        row, attention_mask=torch.ones_like(row), past_key_values=cache, max_new_tokens=tokens, do_sample=False
    )
    return list(out[0, len(ids) :].tolist())


def prompts(model: Any, tokenizer: Any, name: str, seed: int) -> Iterator[list[int]]:
    if name == "shuffled":
        for question in shuffled_documents(tokenizer, DOCUMENT_TOKENS, SHUFFLED, seed):
            yield encode(tokenizer, [{"role": "user", "content": question.text}])
        return
    asked, said = WORKLOADS[name].ask(tokenizer, PROMPTS, seed), None
    while True:
        try:
            prompt = next(asked) if said is None else asked.send(said)
        except StopIteration:
            return
        yield prompt.ids
        answer = generate(model, prompt.ids, ChunkReuseCache(model, ChunkStore(model)), ANSWER_TOKENS)
        said = tokenizer.decode(answer, skip_special_tokens=True)


def run(seeds: int) -> list[dict[str, Any]]:
    model, tokenizer = load_embedded()
    rows = []
    for name in ("chat", "agent", "few-shot", "rag", "shuffled"):
        asked = [list(prompts(model, tokenizer, name, seed)) for seed in range(seeds)]
        for mode in get_args(ReuseMode):
            row: dict[str, Any] = {"prompts": name, "mode": mode}
            for cut, window in CUTS.items():
                chunker = EngineSettings(chunk_boundary_window=window).chunker(tokenizer)
                total = reused = chunks = 0
                for series in asked:
                    store = ChunkStore(model, chunker=chunker)
                    for ids in series:
                        cache = ChunkReuseCache(model, store, ReusePolicy(mode=mode))
                        generate(model, ids, cache, 1)
                        total += cache.report.prompt_tokens
                        reused += cache.report.reused_tokens
                        cache.reset()
                    chunks += store.stats()["chunks"]
                row[cut] = {"tokens": total, "reused": reused, "chunks": chunks}
            rows.append(row)
    return rows


def markdown(result: Result) -> str:
    lines = [
        f"Tokens reused, of all prompt tokens, and chunks stored; {measured_on(result['provenance'])}",
        "",
        "| prompts | mode | cut at multiples | cut by content |",
        "| --- | --- | ---: | ---: |",
    ]
    for row in result["rows"]:
        cells = [f"{row[cut]['reused'] / row[cut]['tokens']:.1%} ({row[cut]['chunks']} chunks)" for cut in CUTS]
        lines.append(f"| {row['prompts']} | {row['mode']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--seeds", type=int, default=3, help="series of prompts of each kind")
    options = parser.parse_args()
    result: Result = {"provenance": provenance(sys.argv[1:], "cutting.py"), "rows": run(options.seeds)}
    write(options.out, "cutting", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
