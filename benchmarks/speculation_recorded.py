"""Tokens a pass of drafts that are looked up, on recorded answers: no model runs while they are counted.

    PYTHONPATH=. python benchmarks/speculation_recorded.py --out benchmarks/results

SmolLM2-135M-Instruct writes plain greedy answers once: code edits over three turns, an agent with tools over four,
extracts, and what quotes nothing. They are kept in a temporary file. Each arm then drafts behind each answer as far as
it has come, and as many tokens are accepted as are those of the answer. With a store, it holds the sessions before.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import write
from targets import Result
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from kvboost_hf import lookup_assistant
from kvboost_hf.assets.texts import prose, source
from kvboost_hf.bench.run import provenance
from kvboost_hf.ngrams import NgramIndex
from recipes import real_model

TEXT_TOKENS, NEW_TOKENS, CHUNK = 300, 110, 64
ARMS = ("transformers, 10 tokens", "lookup_assistant, no store", "lookup_assistant, store")
Draft = Callable[[list[int], int], list[int]]
EDITS = (
    "{0}\n\nWrite the code above again, with a comment above each function.",
    "Now write it again, and rename every argument `self` to `this`.",
    "Write only the last function again, with type annotations.",
)
AGENT = (
    "You are a coding agent. Task: make the functions raise ValueError for empty input.\nTool read_file(path='a.py') "
    "returned:\n{0}\n\nSay which function you change first, and write it with the change.",
    "Tool write_file returned: ok.\nTool run_tests returned:\nFAILED test_a.py::test_empty - ValueError not raised\n"
    "1 failed, 3 passed\nTool read_file(path='b.py') returned:\n{1}\n\nSay which function fails, and write it again "
    "with the change.",
    "Tool run_tests returned:\n4 passed\nTool git_diff returned:\n{2}\n\nWrite the final version of the changed "
    "function and a summary.",
    "Tool read_file(path='a.py') returned:\n{3}\n\nQuote the lines you changed, word for word.",
)
EXTRACT = (
    "{0}\n\nList, word for word, the three most important sentences of the text above.",
    "Write the text again in short sentences.",
)
OTHERS = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain to a child why the sky is blue.",
    "Give me ten ideas for a birthday party in winter.",
)


def sessions(count: Callable[[str], int]) -> Iterator[tuple[str, list[str]]]:
    """The kind and the turns of each session."""
    code, text = source(TEXT_TOKENS, count, 1), prose(TEXT_TOKENS, count, 0)
    for part in code[:6]:
        yield "edit code", [turn.format(part) for turn in EDITS]
    for number in range(4):
        one, other = code[6 + 2 * number : 8 + 2 * number]
        yield "agent with tools", [turn.format(one, other, one[:400], one[:700]) for turn in AGENT]
    for part in text[:3]:
        yield "extract", [turn.format(part) for turn in EXTRACT]
    for asked in OTHERS:
        yield "nothing to quote", [asked]


def recorded() -> list[Result]:
    """The prompt and the answer of each turn, from a file that is written once."""
    file = Path(tempfile.gettempdir()) / "kvboost_hf-recorded-answers.json"
    if file.exists():
        found: list[Result] = json.loads(file.read_text("utf-8"))
        return found
    (model, tokenizer), found = real_model.load(), []
    writer: Any = model
    for kind, turns in sessions(lambda text: len(tokenizer.encode(text, add_special_tokens=False))):
        chat: list[dict[str, str]] = []
        for turn in turns:
            chat.append({"role": "user", "content": turn})
            told = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            out = writer.generate(**told, max_new_tokens=NEW_TOKENS, do_sample=False)
            prompt, new = told["input_ids"][0].tolist(), out[0, told["input_ids"].shape[1] :].tolist()
            found.append({"kind": kind, "prompt": prompt, "answer": new})
            chat.append({"role": "assistant", "content": tokenizer.decode(new, skip_special_tokens=True)})
    file.write_text(json.dumps(found), "utf-8")
    return found


class Stored:
    """The text of sessions, as a store indexes it."""

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._known = set[bytes]()

    def learn(self, ids: list[int]) -> None:
        """Store the whole chunks of a text."""
        parent = b""
        for stop in range(CHUNK, len(ids) + 1, CHUNK):
            key = np.array(ids[:stop]).tobytes()
            if key not in self._known:
                self._known.add(key)
                self.index.add(key, parent, np.array(ids[stop - CHUNK : stop]))
            parent = key

    def continued(self, ids: Any, length: int, *, max_ngram: int, min_ngram: int, salt: Any) -> Any:
        """As `ChunkStore.continued`."""
        return self.index.continued(ids, length, max_ngram, min_ngram)


def drafts(arm: str, stored: Stored) -> Draft:
    """Drafts at most so many tokens behind a text."""
    if arm.startswith("transformers"):
        limits: dict[str, Any] = {"num_output_tokens": 10, "max_matching_ngram_size": 2, "max_length": 100_000}
        stock: Any = PromptLookupCandidateGenerator(**limits)

        def draft(ids: list[int], most: int) -> list[int]:
            found: list[int] = stock.get_candidates(torch.tensor([ids]))[0][0, len(ids) :].tolist()
            return found[:most]

        return draft
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=60_000)
    )
    assistant: Any = lookup_assistant(model, stored if arm.endswith(", store") else None)
    return lambda ids, most: assistant.proposed(np.array(ids), min(most, assistant.longest), ())


def measure(turns: list[Result]) -> Result:
    """Tokens, passes, drafted and accepted tokens of each kind and arm."""
    kinds: Result = {kind: {} for kind in [*dict.fromkeys(turn["kind"] for turn in turns), "all"]}
    for arm in ARMS:
        stored = Stored()
        draft = drafts(arm, stored)
        for turn in turns:
            prompt, answer = turn["prompt"], turn["answer"]
            stored.learn(prompt)
            at, passes, drafted, accepted = 1, 1, 0, 0  # the prompt's pass gives the first token
            while at < len(answer):
                room = len(answer) - at - 1
                found = draft(prompt + answer[:at], room)[:room] if room else []
                right = next((i for i, token in enumerate(found) if token != answer[at + i]), len(found))
                at, passes = at + right + 1, passes + 1
                drafted, accepted = drafted + len(found), accepted + right
            stored.learn(prompt + answer)
            for kind in (turn["kind"], "all"):
                row = kinds[kind].setdefault(
                    arm, {"answers": 0, "tokens": 0, "passes": 0, "drafted": 0, "accepted": 0}
                )
                for name, more in zip(row, (1, len(answer), passes, drafted, accepted), strict=True):
                    row[name] += more
    return {"kinds": kinds, "stored_tokens": CHUNK * len(stored.index.keys()), "index_bytes": stored.index.nbytes}


def markdown(result: Result) -> str:
    lines = [
        result["provenance"],
        "",
        f"Answers of at most {NEW_TOKENS} tokens by SmolLM2-135M-Instruct, float32, greedy, recorded once. The store "
        f"holds {result['stored_tokens']:,} tokens in the end, whose index takes {result['index_bytes']:,} bytes.",
        "",
        "| answers | arm | tokens a pass | drafted a pass | accepted of drafted |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for kind, arms in result["kinds"].items():
        for arm, row in arms.items():
            share = row["accepted"] / row["drafted"] if row["drafted"] else 0.0
            lines.append(
                f"| {kind} ({row['answers']}) | {arm} | {row['tokens'] / row['passes']:.2f} "
                f"| {row['drafted'] / row['passes']:.1f} | {share:.0%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    options = parser.parse_args()
    command = f"`python benchmarks/speculation_recorded.py {' '.join(sys.argv[1:])}`"
    result = {"provenance": str(provenance(command, "cpu")), **measure(recorded())}
    write(options.out, "speculation-recorded", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
