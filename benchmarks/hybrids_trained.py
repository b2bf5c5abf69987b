"""Models with states on a trained reader: states in fewer bits, and moved documents whose states are composed.

    python -m recipes.train_hybrid --out /tmp/LLLF
    PYTHONPATH=. python benchmarks/hybrids_trained.py /tmp/LLLF --out benchmarks/results

Readers are small Qwen3-Next models that `recipes.train_hybrid` trains, and that are asked for facts of made-up
documents. The right answer is fed token by token behind each prompt. A question counts as right if every token of its
answer is the model's first choice. KL divergences are those from plain generate(), mean over the tokens of an answer.

`codes`: a store with each codec of states takes in one document after the other, each on top of what comes out of the
codec. Then questions are asked behind all of them; K/V is kept as it is. `next tokens` are the eight behind a state.
The package has no codec to float8: this one is written here.

`moved`: documents have been seen in another order, or each of them alone. Arms compute the first tokens of a document,
put its other K/V behind what is there now, and join its states (`hybrids_moved.py`), by the maps of its tokens
(`composed`) or as they were behind it. Nothing in the package does this.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from record import Record, add_options
from reuse import measured_on, provenance
from targets import Result
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, PreTrainedModel

from benchmarks.hybrids_moved import FIRST, JOINS, Mover, Seen
from benchmarks.leaderboard.facts import Facts, draw_facts
from benchmarks.leaderboard.measure import FreezableStore
from kvboost_hf import ChunkReuseCache, check_model_compatibility
from kvboost_hf.cache.kv.layer_states import StateFormat

CODECS = ("raw", "int8", "int4", "int2", "turboquant:4", "turboquant:2")
DOCUMENTS = 6
NEXT = 8  # tokens behind a state


@dataclass(frozen=True, slots=True)
class Reader:
    """A trained model, with its tokenizer and its name."""

    name: str
    model: PreTrainedModel
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path) -> "Reader":
        """The reader in a folder."""
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        check_model_compatibility(model)
        kinds = "".join("L" if kind == "linear_attention" else "F" for kind in model.config.layer_types)
        return cls(kinds, model, AutoTokenizer.from_pretrained(folder))

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, where its documents are, the right answer, and what plain generate() makes of it."""

    ids: list[int]
    spans: list[tuple[int, int]]
    answer: list[int]
    is_start: bool
    plain: torch.Tensor  # log-probabilities, [answer, vocabulary]


Row = dict[str, float]


def _log_probs(model: PreTrainedModel, rest: Sequence[int], answer: Sequence[int], cache: Cache) -> torch.Tensor:
    """Log-probabilities at each token of an answer behind the rest of a prompt, [answer, vocabulary]."""
    first = model(input_ids=torch.tensor([list(rest)]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    others = model(input_ids=torch.tensor([list(answer[:-1])]), past_key_values=cache, use_cache=True)
    return torch.cat([first.logits[0], others.logits[0]]).double().log_softmax(-1)


def questions(reader: Reader, case: Facts) -> Iterator[Question]:
    """The questions of a case."""
    documents = [reader.ids(document.text) for document in case.documents]
    for fact in (*case.starts, *case.others):
        ids = case.ids(reader.tokenizer, fact)
        answer = [*reader.ids(fact.answer), reader.tokenizer.eos_token_id]
        plain = _log_probs(reader.model, ids, answer, DynamicCache(config=reader.model.config))
        yield Question(ids, [_span(ids, each) for each in documents], answer, fact in case.starts, plain)


def _span(ids: Sequence[int], part: Sequence[int]) -> tuple[int, int]:
    at = next(at for at in range(len(ids)) if list(ids[at : at + len(part)]) == list(part))
    return at, at + len(part)


def judged(question: Question, found: torch.Tensor, computed: int) -> Row:
    """How far what was found is from what plain generate() makes of a question."""
    choice = found.argmax(-1)
    return {
        "right": float((choice == torch.tensor(question.answer)).all()),
        "is_start": float(question.is_start),
        "kl": float((question.plain.exp() * (question.plain - found)).sum(-1).mean()),
        "same": float((choice == question.plain.argmax(-1)).double().mean()),
        "computed": computed / len(question.ids),
    }


def summary(reader: Reader, arm: str, rows: Sequence[Row], **more: Any) -> Result:
    """The means over all questions of an arm."""
    starts, others = ([row["right"] for row in rows if row["is_start"] == flag] for flag in (1, 0))
    return {
        "reader": reader.name,
        "arm": arm,
        "questions": len(rows),
        "starts": statistics.fmean(starts),
        "others": statistics.fmean(others),
        **{name: statistics.fmean(row[name] for row in rows) for name in ("kl", "same", "computed")},
        "median": statistics.median(row["kl"] for row in rows),
        **more,
    }


# States in fewer bits


class Float8:
    """Rows of a state as float8_e4m3fn, with a float32 scale each."""

    name, lossless, sink_tokens = "float8", False, 0
    largest = torch.finfo(torch.float8_e4m3fn).max

    def encode(self, x: torch.Tensor, role: str, rotations: object) -> dict[str, torch.Tensor]:
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / self.largest
        return {"codes": (x.float() / scale).to(torch.float8_e4m3fn), "scale": scale.squeeze(-1)}

    def decode(
        self, planes: dict[str, torch.Tensor], shape: object, dtype: torch.dtype, role: str, rotation: object
    ) -> torch.Tensor:
        return (planes["codes"].float() * planes["scale"].unsqueeze(-1)).to(dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype, role: str) -> int:
        return prod(shape) + 4 * prod(shape[:-1])


def _zeroed(store: FreezableStore) -> None:
    for saved in store.inspect().states.values():
        for layer in saved.states.layers:
            for tensor in layer.tensors if layer is not None else ():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()


def _next_kl(reader: Reader, ids: Sequence[int], end: int, plain: torch.Tensor, store: FreezableStore) -> list[float]:
    """KL divergences of the tokens that follow the state at `end`; plain log-probabilities are [tokens, vocabulary].

    Empty where a document ends less than 8 tokens behind a chunk, for no state is kept there.
    """
    found: list[float] = []
    for stop in range(end + 1, end + 1 + NEXT):
        cache, given = ChunkReuseCache(reader.model, store), torch.tensor([list(ids[:stop])])
        logits = reader.model(input_ids=given, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        if cache.report.reused_tokens != end:
            return []
        here = plain[stop - 1]
        found.append(float((here.exp() * (here - logits.double().log_softmax(-1))).sum()))
    return found


def codes(reader: Reader, cases: int, asked: int) -> list[Result]:
    """Answers behind documents whose states came from a store, by its codec."""
    rows: dict[str, list[Row]] = {}
    near: dict[str, list[float]] = {}
    sizes: dict[str, list[int]] = {}
    for number in range(cases):
        case = draw_facts(f"codes {number}", DOCUMENTS, asked)
        given = list(questions(reader, case))
        ids, end = given[0].ids, given[0].spans[-1][1]
        plain = reader.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for arm in (*CODECS, "float8", "zeroed"):
            codec = arm if arm in CODECS else "raw"
            store = FreezableStore(reader.model, chunk_size=64, max_bytes="1GB", state_codec=codec)
            if arm == "float8":
                store._reader.state_format = StateFormat(Float8())  # type: ignore[arg-type]
            for _, end in given[0].spans:
                store.warm(given[0].ids[:end])
            store.frozen = True
            sizes.setdefault(arm, []).extend(saved.states.nbytes for saved in store.inspect().states.values())
            if arm == "zeroed":
                _zeroed(store)
            near.setdefault(arm, []).extend(_next_kl(reader, ids, end, plain, store))
            for question in given:
                cache = ChunkReuseCache(reader.model, store)
                found = _log_probs(reader.model, question.ids, question.answer, cache)
                computed = len(question.ids) - cache.report.reused_tokens
                rows.setdefault(arm, []).append(judged(question, found, computed))
    summed = [
        summary(reader, arm, each, bytes=statistics.fmean(sizes[arm]), next=statistics.fmean(near[arm]))
        for arm, each in rows.items()
    ]
    print(*summed, sep="\n", flush=True)
    return summed


# Moved documents


ARMS = (
    *product(("composed", "as stored"), FIRST),
    *product(("left out", "zeroed"), (0, 16)),
)


def moved(reader: Reader, cases: int, asked: int) -> list[Result]:
    """Answers behind moved documents, by what becomes of the states, and how many first tokens are computed."""
    mover, rows = Mover(reader.model), dict[tuple[str, str], list[Row]]()
    for number in range(cases):
        case = draw_facts(f"moved {number}", DOCUMENTS, asked)
        given = list(questions(reader, case))
        first = given[0].spans[0][0]  # behind it, nothing is like it was
        seen_ids = case.seen_ids(reader.tokenizer)
        documents = [given[0].ids[a:b] for a, b in given[0].spans]
        stored = {"another order": mover.see(seen_ids, [_span(seen_ids, each) for each in documents]), "alone": {}}
        for place, document in enumerate(documents):
            ids = [*given[0].ids[:first], *document]
            for (_, skipped), seen in mover.see(ids, [(first, len(ids))]).items():
                stored["alone"][place, skipped] = seen
        for question in given:
            exact = DynamicCache(config=reader.model.config)
            mover.run(question.ids[:first], exact)
            found = _log_probs(reader.model, question.ids[first:], question.answer, exact)
            replayed = judged(question, found, len(question.ids) - first)
            for setting, documents_seen in stored.items():
                rows.setdefault((setting, "from the last checkpoint"), []).append(replayed)
                for join, skipped in ARMS:
                    row = _moved(reader, mover, question, documents_seen, JOINS[join], skipped)
                    rows.setdefault((setting, f"{join}, {skipped} first tokens"), []).append(row)
    found_rows = [summary(reader, arm, each, setting=setting) for (setting, arm), each in rows.items()]
    print(*found_rows, sep="\n", flush=True)
    return found_rows


def _moved(
    reader: Reader,
    mover: Mover,
    question: Question,
    seen: dict[tuple[int, int], Seen],
    join: Callable[[torch.Tensor, int, Seen], torch.Tensor],
    skipped: int,
) -> Row:
    cache, at = DynamicCache(config=reader.model.config), 0
    computed = -question.spans[0][0]  # what is before the documents is where it was
    for number, (start, stop) in enumerate(question.spans):
        if (number, skipped) in seen:
            mover.run(question.ids[at : start + skipped], cache)
            mover.put(seen[number, skipped], start + skipped, cache, join)
            computed, at = computed + start + skipped - at, stop
    found = _log_probs(reader.model, question.ids[at:], question.answer, cache)
    return judged(question, found, computed + len(question.ids) - at)


def _answers(row: Result) -> str:
    return (
        f"{row['computed']:.1%} | {row['others']:.1%} | {row['starts']:.1%} | {row['kl']:.1e} | {row['median']:.1e} |"
    )


_ANSWERS = "computed | right | right, pronouns at starts | KL, answer | median |"


def markdown(result: Result) -> str:
    lines = [*map(measured_on, result.get("provenances", [result["provenance"]]))]
    if found := result["codes"]:
        lines += ["", f"States in fewer bits, {found[0]['questions']} questions:", ""]
        lines += [f"| reader | states | one | KL, next tokens | {_ANSWERS}", "| --- | --- |" + " ---: |" * 7]
        lines += [
            f"| {row['reader']} | {row['arm']} | {row['bytes'] / 1000:.1f} kB | {row['next']:.1e} | {_answers(row)}"
            for row in found
        ]
    if found := result["moved"]:
        lines += ["", f"Moved documents, {found[0]['questions']} questions:", ""]
        lines += [f"| reader | documents were seen | arm | {_ANSWERS}", "| --- | --- | --- |" + " ---: |" * 5]
        lines += [f"| {row['reader']} | {row['setting']} | {row['arm']} | {_answers(row)}" for row in found]
    return "\n".join(lines) + "\n"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="+", type=Path, help="folders that recipes.train_hybrid has written")
    parser.add_argument("--parts", nargs="+", default=["codes", "moved"], choices=("codes", "moved"))
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--asked", type=int, default=3, help="questions of a case, of either kind")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: Result = {"provenance": provenance(sys.argv[1:], "hybrids_trained.py"), "codes": [], "moved": []}
    record = Record("hybrids-trained-cpu", options, result, markdown)
    work = {"codes": codes, "moved": moved}
    for folder in options.readers:
        reader = Reader.load(folder)
        for part in options.parts:
            ask = partial(work[part], reader, options.cases, options.asked)
            record.measure(f"{part}, {reader.name}", lambda part=part, ask=ask: result[part].extend(ask()))
    record.show()


if __name__ == "__main__":
    main()
