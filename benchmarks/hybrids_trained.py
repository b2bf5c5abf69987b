"""Models with states on a trained reader: states in fewer bits, and moved documents whose states are composed.

    python -m recipes.train_hybrid --out /tmp/LLLF
    PYTHONPATH=. python benchmarks/hybrids_trained.py /tmp/LLLF --out benchmarks/results

Readers are small Qwen3-Next models that `recipes.train_hybrid` trains, and that are asked for facts of made-up
documents. The right answer is fed token by token behind each prompt. A question counts as right if every token of its
answer is the model's first choice. KL divergences are those from plain generate(), mean over the tokens of an answer.

`codes`: a store with each codec of states takes in one document after the other, each on top of what comes out of the
codec. Then questions are asked behind all of them; K/V is kept as it is.

`moved`: documents have been seen in another order, or each of them alone. Over a document, a layer of gated delta rule
maps its state S to A S + B, where A and B depend on what the layer was given there, and so on the other layers only.
Arms put the document's maps, and its K/V turned to its new place, behind what is there now, and compute its first
tokens. Nothing in the package does this: the arms are written here, on transformers' own layers.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers.models.qwen3_next.modeling_qwen3_next as qwen
from record import Record, add_options
from reuse import measured_on, provenance
from targets import Result
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, PreTrainedModel

from benchmarks.leaderboard.facts import Facts, draw_facts
from benchmarks.leaderboard.measure import FreezableStore
from kvboost_hf import ChunkReuseCache, check_model_compatibility

CODECS = ("raw", "int8", "int4", "int2", "turboquant:4", "turboquant:2")
DOCUMENTS = 6
FIRST = (0, 4, 8, 16, 32)  # tokens of a document that are computed
Maps = list[tuple[torch.Tensor, torch.Tensor]]  # A and B of each layer of linear attention


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
    """Those of a case."""
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


def _zeroed(store: FreezableStore) -> None:
    for saved in store.inspect().states.values():
        for layer in saved.states.layers:
            for tensor in layer.tensors if layer is not None else ():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()


def codes(reader: Reader, cases: int, asked: int) -> list[Result]:
    """Answers behind documents whose states came from a store, by its codec."""
    rows: dict[str, list[Row]] = {}
    sizes: dict[str, list[int]] = {}
    for number in range(cases):
        case = draw_facts(f"codes {number}", DOCUMENTS, asked)
        given = list(questions(reader, case))
        for arm in (*CODECS, "zeroed"):
            store = FreezableStore(
                reader.model, chunk_size=64, max_bytes="1GB", state_codec=arm if arm != "zeroed" else "raw"
            )
            for _, end in given[0].spans:
                store.warm(given[0].ids[:end])
            store.frozen = True
            sizes.setdefault(arm, []).extend(saved.states.nbytes for saved in store.inspect().states.values())
            if arm == "zeroed":
                _zeroed(store)
            for question in given:
                cache = ChunkReuseCache(reader.model, store)
                found = _log_probs(reader.model, question.ids, question.answer, cache)
                computed = len(question.ids) - cache.report.reused_tokens
                rows.setdefault(arm, []).append(judged(question, found, computed))
    summed = [summary(reader, arm, each, bytes=statistics.fmean(sizes[arm])) for arm, each in rows.items()]
    print(*summed, sep="\n", flush=True)
    return summed


# Moved documents


@dataclass(frozen=True, slots=True)
class Seen:
    """A document without its first tokens, as it was computed somewhere."""

    kv: list[tuple[torch.Tensor, torch.Tensor]]  # of each layer of full attention, [1, heads, tokens, dim]
    at: int  # position of the first of these tokens
    maps: Maps
    convolutions: list[torch.Tensor]  # behind the document
    states: list[torch.Tensor]  # the same


@contextmanager
def _watched(calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]) -> Iterator[None]:
    """Within it, the arguments of the chunked gated delta rule are noted."""
    rule = qwen.torch_chunk_gated_delta_rule

    def note(*args: torch.Tensor, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return rule(*args, **kwargs)

    with mock.patch.object(qwen, "torch_chunk_gated_delta_rule", note):
        yield


def _maps(calls: Sequence[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]) -> Maps:
    """What each call does to a state: S becomes A S + B."""
    found: Maps = []
    for (query, key, value), kwargs in calls:
        heads, dim = value.shape[2], key.shape[-1]
        unit = torch.eye(dim).expand(1, heads, dim, dim).clone()
        nothing = value.new_zeros(*value.shape[:-1], dim)
        b = qwen.torch_chunk_gated_delta_rule(query, key, value, **{**kwargs, "initial_state": None})[1]
        a = qwen.torch_chunk_gated_delta_rule(query, key, nothing, **{**kwargs, "initial_state": unit})[1]
        found.append((a, b))
    return found


class Mover:
    """Puts documents that were computed elsewhere behind what a cache holds."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        kinds = model.config.layer_types
        self._linear = [idx for idx, kind in enumerate(kinds) if kind == "linear_attention"]
        self._full = [idx for idx, kind in enumerate(kinds) if kind != "linear_attention"]

    def run(self, ids: Sequence[int], cache: Cache) -> None:
        """Compute tokens behind what a cache holds."""
        self.model(input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=True, logits_to_keep=1)

    def see(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Seen]:
        """What is kept of the documents of a prompt, by their number and how many first tokens are left out."""
        cuts = sorted({0, len(ids), *(cut for a, b in spans for cut in (b, *(a + k for k in FIRST if a + k < b)))})
        cache, after = DynamicCache(config=self.model.config), {}
        for start, stop in pairwise(cuts):
            calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = []
            with _watched(calls):
                self.run(ids[start:stop], cache)
            layers = [cache.layers[idx] for idx in self._linear]
            after[start] = (
                stop,
                _maps(calls),
                [layer.conv_states[0].clone() for layer in layers],
                [layer.recurrent_states[0].clone() for layer in layers],
            )
        found = {}
        for number, (start, end) in enumerate(spans):
            for first in FIRST:
                if start + first >= end:
                    continue
                at, maps, convolutions, states = after[start + first]
                while at < end:
                    at, later, convolutions, states = after[at]
                    maps = [(c @ a, c @ b + d) for (a, b), (c, d) in zip(maps, later, strict=True)]
                kv = [
                    tuple(t[:, :, start + first : end].clone() for t in (layer.keys, layer.values))
                    for layer in (cache.layers[idx] for idx in self._full)
                ]
                found[number, first] = Seen(kv, start + first, maps, convolutions, states)  # type: ignore[arg-type]
        return found

    def put(self, seen: Seen, at: int, cache: Cache, join: Callable[[torch.Tensor, int, Seen], torch.Tensor]) -> None:
        """Put a document into a cache of `at` columns, whose states become what `join` makes of them."""
        for (keys, values), idx in zip(seen.kv, self._full, strict=True):
            layer = cache.layers[idx]
            layer.keys = torch.cat([layer.keys, self._turned(keys, at - seen.at)], dim=2)
            layer.values = torch.cat([layer.values, values], dim=2)
        for number, idx in enumerate(self._linear):
            layer = cache.layers[idx]
            layer.recurrent_states[0] = join(layer.recurrent_states[0], number, seen).clone()
            layer.conv_states[0] = seen.convolutions[number].clone()

    def _turned(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        cos, sin = self.model.model.rotary_emb(keys, torch.tensor([[shift]]))
        turned, rest = keys.split([cos.shape[-1], keys.shape[-1] - cos.shape[-1]], dim=-1)
        return torch.cat([turned * cos + qwen.rotate_half(turned) * sin, rest], dim=-1)


JOINS: dict[str, Callable[[torch.Tensor, int, Seen], torch.Tensor]] = {
    "composed": lambda state, layer, seen: seen.maps[layer][0] @ state + seen.maps[layer][1],
    "as stored": lambda state, layer, seen: seen.states[layer],
    "left out": lambda state, layer, seen: state,
    "zeroed": lambda state, layer, seen: torch.zeros_like(state),
}
ARMS = (
    *(("composed", first) for first in FIRST),
    *((join, first) for join in ("as stored", "left out", "zeroed") for first in (0, 16)),
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


def markdown(result: Result) -> str:
    lines = [f"{measured_on(result['provenance'])}"]
    for part, title, column, shown in (
        ("codes", "States in fewer bits", "one state", lambda row: f"{row['bytes'] / 1000:.1f} kB"),
        ("moved", "Moved documents", "seen", lambda row: row["setting"]),
    ):
        if found := result.get(part):
            lines += ["", f"{title}, {found[0]['questions']} questions:", ""]
            lines += [
                f"| reader | arm | {column} | computed | right | right, pronouns at starts | KL | median | same |",
                "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            ]
            lines += [
                f"| {row['reader']} | {row['arm']} | {shown(row)} | {row['computed']:.1%} | {row['others']:.1%} "
                f"| {row['starts']:.1%} | {row['kl']:.1e} | {row['median']:.1e} | {row['same']:.1%} |"
                for row in found
            ]
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
