"""Whether drafts change what is said: every way to draft, with every cache, against plain generate().

    python benchmarks/speculation_parity.py --out benchmarks/results [--prompts 200]

The embedded reader answers held-out prompts, single questions and the turns of chats, greedily. Drafts come from the
embedded draft with `load_assistant`, at lengths that follow a clock or at one of 5, from `lookup_assistant`, from
transformers' prompt lookup and early exit (after 2 of 4 layers), and from a draft that reads and writes in another
vocabulary; and in trees, by `TreeDecoding`. Each of them meets each cache once; targets, resident and streamed, and
attentions take turns, so that any two values that can meet do. Plain answers are those of a resident target with the
same attention, without a cache of ours, but with codes where there are codes. Passes and tokens are counted in the
last layer. A warm store holds the plain answers, too; with no cache, lookups go there. The first cache of a model that
holds codes looks at it with a pass over four tokens, which is counted once.

In half precision a pass over several tokens rounds otherwise than one over a single token, so that answers may part
where two tokens are next to equal. For four assistants, logits and answers are compared with plain ones up to the
first token that differs, in units of the dtype's epsilon times the largest logit: of the reader, which is sure of what
it says, and, for every third conversation, of a random model of its shape, which is not. If no logit is off by more
than two units, tokens part only where the best two are within four.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from record import write
from reuse import Result, measured_on, provenance

from tests.speculation import (
    ATTENTIONS,
    DRAFTS,
    Combination,
    Conversation,
    Reader,
    combinations,
    conversations,
    parted,
    run,
)

WITHIN = 4.0  # units, between the two best logits where answers part
PER_CHAT = 4  # prompts: a single question and the three turns of a chat


def in_float32(chats: Sequence[Conversation]) -> list[Result]:
    readers = {key: Reader(*key) for key in product(ATTENTIONS, (False, True))}
    plain = {key: readers[key[0], False].plain(chats, codes=key[1]) for key in product(ATTENTIONS, (False, True))}
    for reader in readers.values():
        reader.warm(chats)
    rows = []
    for combination in combinations():
        began = time.perf_counter()
        expected = plain[combination.attention, combination.cache == "codes"]
        done = run(readers[combination.attention, combination.streamed], combination, chats)
        row = {
            **asdict(combination),
            "prompts": len(expected),
            "equal": done.equal(expected),
            "passes": done.target.passes,
            "forwarded": done.target.tokens,
            "reused": done.reused,
            "draft_forwarded": done.draft.tokens if combination.assistant in DRAFTS else None,
        }
        rows.append(row)
        print(f"{combination}: {row['equal']} of {row['prompts']}, {time.perf_counter() - began:.1f} s", flush=True)
    return rows


def make_unsure(reader: Reader) -> Reader:
    """Random weights in place of those that were learnt."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in reader.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return reader


def in_half_precision(name: str, reader: Reader, chats: Sequence[Conversation]) -> list[Result]:
    rows, dtype = [], reader.model.dtype
    told = {"output_logits": True, "return_dict_in_generate": True}
    prompts = [prompt for chat in chats for prompt in chat]
    plain = [reader.answer(prompt, **told) for prompt in prompts]  # type: ignore[arg-type]
    for assistant in ("constant", "lookup", "early exit", "trees"):
        done = run(reader, Combination(assistant, "conversation", False, "sdpa"), chats, **told)
        found = [
            parted(ours, theirs, prompt.shape[1], dtype)
            for ours, theirs, prompt in zip(done.answers, plain, prompts, strict=True)
        ]
        gaps = [gap for _, gap in found if gap is not None]
        row = {
            "dtype": str(dtype).removeprefix("torch."),
            "model": name,
            "assistant": assistant,
            "answers": len(plain),
            "tokens": sum(len(one.logits) for one in plain),  # type: ignore[attr-defined]
            "differ": len(gaps),
            "off": max(off for off, _ in found),
            "gap": max(gaps, default=0.0),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def markdown(result: Result) -> str:
    rows = result["float32"]
    lines = [
        measured_on(result["provenance"]),
        "",
        "## Float32",
        "",
        f"{sum(row['equal'] for row in rows)} of {sum(row['prompts'] for row in rows)} answers are those of plain "
        f"generate(). Plain decoding takes {result['plain_passes']} passes.",
        "",
        "| assistant | cache | target | attention | prompts | equal | passes | tokens forwarded | reused "
        "| forwarded by the draft |",
        "| --- | --- | --- | --- |" + " ---: |" * 6,
    ]
    for row in rows:
        cells = [row["assistant"], row["cache"], "streamed" if row["streamed"] else "resident", row["attention"]]
        cells += [str(row[name]) for name in ("prompts", "equal", "passes", "forwarded", "reused")]
        lines.append(f"| {' | '.join(cells)} | {row['draft_forwarded'] or ''} |")
    lines += [
        "",
        "## Half precision",
        "",
        "With one cache over the turns of a chat. The largest differences, in units of the dtype's epsilon times the "
        f"largest logit; answers may part where the best two logits are within {WITHIN:g}.",
        "",
        "| dtype | model | assistant | answers | tokens | differ | logits off by | gap where they part |",
        "| --- | --- | --- |" + " ---: |" * 5,
    ]
    for row in result["half"]:
        gap = f"{row['gap']:.2f}" if row["differ"] else ""
        cells = [str(row[name]) for name in ("dtype", "model", "assistant", "answers", "tokens", "differ")]
        lines.append(f"| {' | '.join(cells)} | {row['off']:.2f} | {gap} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--prompts", type=int, default=200, help=f"a multiple of {PER_CHAT}")
    parser.add_argument("--seed", type=int, default=2, help="below 10 000, so that the prompts are held out")
    parser.add_argument("--threads", type=int, default=1, help="more take longer with models this small")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reader = Reader("sdpa", False)
    chats = conversations(reader.tokenizer, options.prompts // PER_CHAT, seed=options.seed)
    tokens = sum(ids.shape[1] for ids in reader.plain(chats, codes=False))
    result: Result = {
        "provenance": provenance(sys.argv[1:], "speculation_parity.py"),
        "plain_passes": tokens - sum(prompt.shape[1] for chat in chats for prompt in chat),
        "float32": in_float32(chats),
        "half": [],
    }
    for dtype in (torch.bfloat16, torch.float16):
        result["half"] += in_half_precision("reader", Reader("sdpa", False, dtype), chats)
        result["half"] += in_half_precision("random", make_unsure(Reader("sdpa", False, dtype)), chats[::3])
    write(options.out, "speculation-parity", result, markdown(result))
    print(markdown(result))
    assert all(row["equal"] == row["prompts"] for row in result["float32"]), "a draft changed what is said"
    assert all(row["gap"] <= WITHIN for row in result["half"]), "answers part where no rounding would part them"


if __name__ == "__main__":
    main()
