"""Many samples of one prompt, and rows that begin alike, in one `generate()` call: plain against reuse, in turns.

    python -m tests.environments libraries
    .venv-libraries/bin/python benchmarks/samples.py --out benchmarks/results

The store is empty at the beginning of each call, so that what is saved is saved within it: a prompt is computed once
for all of its rows. Prompts are random tokens, and so are the answers, which are sampled with the same seed in both
arms; decoding takes as long in one as in the other. `ideal` counts each distinct beginning of a prompt once. Seconds
are those that one thread was computing, so that other work on the machine is not counted.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import write
from targets import Result
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.bench.run import provenance
from recipes.real_model import FLOAT32, fetch
from tests.conftest import counted

Inputs = dict[str, Any]


def ids(chance: torch.Generator, length: int) -> torch.Tensor:
    return torch.randint(5, 40_000, (1, length), generator=chance)


def left_padded(rows: list[torch.Tensor]) -> Inputs:
    """Rows [1, n] as a batch with padding on the left."""
    width = max(row.shape[1] for row in rows)
    padded = [torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows]
    masks = [torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows]
    return {"input_ids": torch.cat(padded), "attention_mask": torch.cat(masks)}


def workloads(length: int, group: int) -> dict[str, Inputs]:
    """Arguments of generate(), by what is asked for."""
    chance = torch.Generator().manual_seed(0)
    prompt = ids(chance, length)
    prompts = [ids(chance, length - 40 * number) for number in range(4)]
    head = ids(chance, length)
    questions = [torch.cat([head, ids(chance, 20 + 5 * number)], dim=1) for number in range(group)]
    one = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    return {
        f"{group} samples of a prompt": {**one, "do_sample": True, "num_return_sequences": group},
        "4 beams": {**one, "num_beams": 4},
        f"4 prompts, {group} rows of each": {**left_padded([row for row in prompts for _ in range(group)])},
        f"{group} questions behind one head": left_padded(questions),
    }


def ideal(inputs: Inputs, rows: int) -> int:
    """Tokens of the prompts to compute: each distinct beginning once, but the last token for each row."""
    mask = inputs["attention_mask"].bool()
    prompts = [row[seen].tolist() for row, seen in zip(inputs["input_ids"], mask, strict=True)]
    return len({tuple(row[: at + 1]) for row in prompts for at in range(len(row) - 1)}) + rows


def measure(model: PreTrainedModel, name: str, inputs: Inputs, new: int) -> Result:
    """Both arms, in turns; the faster of two runs each."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": "num_beams" not in inputs, **inputs}
    rows = len(inputs["input_ids"]) * (inputs.get("num_return_sequences") or inputs.get("num_beams") or 1)

    def run(make: Callable[[], Any]) -> tuple[torch.Tensor, float, int]:
        torch.manual_seed(0)
        with counted(model) as work:
            began = time.process_time()
            cache = make()
            given = {"past_key_values": cache} if cache is not None else {}
            found = model.generate(**options, **given, pad_token_id=0)
            return found, time.process_time() - began, work.tokens - rows * (new - 1)

    plain, reused = [], []
    for _ in range(2):
        plain.append(run(lambda: None))
        reused.append(run(lambda: ChunkReuseCache(model, ChunkStore(model))))
    result = {
        "workload": name,
        "rows": rows,
        "ideal": ideal(inputs, rows),
        "tokens": {"plain": plain[0][2], "reuse": reused[0][2]},
        "seconds": {"plain": min(each[1] for each in plain), "reuse": min(each[1] for each in reused)},
        "same": all(torch.equal(a[0], b[0]) for a, b in zip(plain, reused, strict=True)),
    }
    print(result, flush=True)
    return result


def markdown(result: Result) -> str:
    lines = [
        f"SmolLM2-135M-Instruct, float32, sdpa; prompts of about {result['length']} tokens, {result['new']} new "
        f"tokens for each row; {result['provenance']}",
        "",
        "| call | rows | prompt tokens, plain | reuse | ideal | fewer tokens | seconds, plain | reuse | less time | "
        "same tokens |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in result["calls"]:
        tokens, seconds = row["tokens"], row["seconds"]
        lines.append(
            f"| {row['workload']} | {row['rows']} | {tokens['plain']:,} | {tokens['reuse']:,} | {row['ideal']:,} "
            f"| {tokens['plain'] / tokens['reuse']:.1f}x | {seconds['plain']:.1f} | {seconds['reuse']:.1f} "
            f"| {seconds['plain'] / seconds['reuse']:.1f}x | {'yes' if row['same'] else '**no**'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--length", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--group", type=int, default=8, help="rows of each prompt")
    parser.add_argument("--new", type=int, default=8, help="new tokens of each row")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    fetch()
    model = AutoModelForCausalLM.from_pretrained(FLOAT32, dtype=torch.float32).eval()
    warm = left_padded([torch.arange(5, 95)[None], torch.arange(5, 105)[None]])
    model.generate(**warm, past_key_values=ChunkReuseCache(model), max_new_tokens=2, pad_token_id=0)  # probes
    result: Result = {"length": options.length, "new": options.new, "calls": []}
    result["provenance"] = str(provenance(f"`python benchmarks/samples.py {' '.join(sys.argv[1:])}`", "cpu"))
    for name, inputs in workloads(options.length, options.group).items():
        result["calls"].append(measure(model, name, inputs, options.new))
        write(options.out, "samples-cpu", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
