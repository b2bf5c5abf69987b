"""What K/V in fewer bits does to answers: every codec, and what transformers has of the kind.

    PYTHONPATH=. python benchmarks/codecs_quality.py --out benchmarks/results [--live] [--model NAME]

Several questions are asked about the same text. It is computed once; each arm keeps what was computed in its own way:
a store through its codec, and a cache that holds codes as it quantizes a whole prompt. Only the question itself, and
the answer, are computed, on top of what is decoded. A store takes nothing more, so that each answer starts from
nothing but codes. The quantized caches of transformers quantize the same tokens, in one go, and nothing more. Caches
of kvboost_hf that hold codes (`--live`) keep their last tokens exact, as they always do.

Without `--model`, the trained reader is asked for facts of made-up documents. With it, a chat model gets real prose
and source code (texts.py) with two facts inserted, and is asked for these (right, or not) and to tell what it has
read: KL and first choices are those of what it says then, in the words that it says without a codec.

The answer is fed token by token behind each prompt. A question counts as right if every token of its answer is the
model's first choice; exactly then does greedy generate() give that answer. KL divergences are those from the model
with its K/V as it is, mean over the tokens of an answer. Their mean over questions is that of the few that the model
all but gets wrong anyway, so that it comes with its standard error, and with the median.

Bytes are those of the storage that tensors really have, scales and whatever else is kept included, by token of all
layers and heads.
"""

import argparse
import copy
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import write
from reuse import Result, measured_on, provenance
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    QuantizedCache,
)

from benchmarks.leaderboard.changes import damage
from benchmarks.leaderboard.measure import FreezableStore
from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy
from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.texts import encode, prose, source
from kvboost_hf.assets.world import ChatTurn, Fact, chat_messages, make_documents
from kvboost_hf.cache.codecs import config_of
from kvboost_hf.cache.layers import make_layers
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.live.ledger import copier
from kvboost_hf.cache.planning.chunks import prefix_key
from kvboost_hf.compat import PrivateCache
from kvboost_hf.config import KVQuantConfig

NUM_DOCUMENTS, NUM_WORDS = 9, 96
SIZES, NEW_TOKENS = (1000, 2000, 3000), 32  # of real texts, and of what is said about them
PLAIN = "K/V as it is"
PACKED = (
    20  # HQQ packs 10 codes of 3 bits, or 8 of 1, of the tokens of both heads: others numbers of tokens it fails on
)
Spec = str | KVQuantConfig


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and what is fed behind it."""

    prompt: list[int]
    answer: list[int]
    kind: str  # "fact", whose answer is known, "said", which is what the model says, or "both"


class Case:
    """Questions about the same text, and the K/V of what they have in common, computed once.

    Args:
        model: Computes.
        questions: The questions of the same text.
    """

    def __init__(self, model: PreTrainedModel, questions: Sequence[Question]) -> None:
        self.model, self.questions = model, questions
        first = questions[0].prompt
        known = min(common(first, question.prompt) for question in questions)
        self.ids = first[: known - known % PACKED]
        self._layers = make_layers(model)
        forward(model, self.ids, self._cache(self._layers), last=1)

    @staticmethod
    def _cache(layers: Sequence[ReuseLayer]) -> Cache:
        return PrivateCache([layer.native for layer in layers])

    def plain(self) -> Cache:
        """A cache that holds the text as it was computed."""
        return self._cache([layer.share() for layer in self._layers])

    def fill(self, cache: Cache) -> None:
        """Give a cache all of it at once."""
        for index, layer in enumerate(self._layers):
            keys, values = layer.columns(0, 0, len(self.ids)) or ()
            cache.update(keys[None].clone(), values[None].clone(), index)

    def put_into(self, store: ChunkStore) -> None:
        """Offer all of it to a store."""
        tokens = np.array(self.ids)
        root = key = store.root(store.salt)
        at = 0
        while at < len(tokens):
            cut = store.chunker.next_cut(tokens, at) or len(tokens)
            chunk = tokens[at:cut]
            nbytes, copy_kv = copier(0, at, cut, self._layers, store.column_format, at_start=at == 0)
            store.put(root, key, at, chunk, nbytes, copy_kv, unfinished=cut == len(tokens))
            key, at = prefix_key(key, chunk), cut


def reader_case(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> Case:
    """Ten questions about made-up documents."""
    rng = random.Random(f"codecs/{seed}")
    documents = tuple(make_documents(rng, NUM_DOCUMENTS, num_words=NUM_WORDS))
    asked: list[Fact] = rng.sample([fact for document in documents for fact in document.facts], 11)[1:]
    prompts = [encode(tokenizer, chat_messages([ChatTurn(documents, fact)])) for fact in asked]
    answers = [[*tokenizer.encode(f.answer, add_special_tokens=False), tokenizer.eos_token_id] for f in asked]
    return Case(model, [Question(prompt, answer, "both") for prompt, answer in zip(prompts, answers, strict=True)])


def real_case(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> Case:
    """A real text with two facts in it: each is asked for, and what the text is about."""
    rng = random.Random(f"codecs/real/{seed}")
    tokens_of = partial(tokenizer.encode, add_special_tokens=False)
    kind, size = (prose, source)[seed % 2], SIZES[seed // 2 % len(SIZES)]
    texts = kind(size, lambda text: len(tokens_of(text)), seed)
    paragraphs = texts[seed % len(texts)].split("\n\n")
    places = rng.sample(["Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Porto"], 2)
    numbers = ["".join(rng.choices("123456789", k=5)) for _ in places]
    for place, number in zip(places, numbers, strict=True):
        paragraphs.insert(rng.randrange(1, len(paragraphs)), f"The secret number of {place} is {number}.")
    asked = "Tell in a few sentences what the text above is about."
    chats = [(asked, "")] + [(f"What is the secret number of {p}?", f"The secret number of {p} is ") for p in places]
    prompts = []
    for question, begun in chats:
        message = [{"role": "user", "content": "\n\n".join(paragraphs) + "\n\n" + question}]
        chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompts.append(tokens_of(f"{chat}{begun}"))
    case = Case(model, [Question(prompt, [], "said") for prompt in prompts])
    said = say(model, prompts[0], case.plain())
    facts = [Question(ids, tokens_of(number), "fact") for ids, number in zip(prompts[1:], numbers, strict=True)]
    case.questions = [Question(prompts[0], said, "said"), *facts]
    return case


def say(model: PreTrainedModel, prompt: Sequence[int], cache: Cache) -> list[int]:
    """What the model says, greedily, at most `NEW_TOKENS`."""
    said: list[int] = []
    given = prompt[cache.get_seq_length() :]
    ends = model.generation_config.eos_token_id
    while len(said) < NEW_TOKENS and (not said or said[-1] != ends):
        said.append(int(forward(model, given, cache, last=1)[-1].argmax()))
        given = said[-1:]
    return said


class Stored:
    """Fresh caches on a store that holds the text through a codec."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, case: Case, arm: "Arm") -> None:
        self._model = case.model
        self._store = FreezableStore(self._model, chunker=ContentChunker.for_tokenizer(tokenizer), codec=arm.spec)
        case.put_into(self._store)
        self._store.frozen = True
        if arm.control is not None:
            damage(self._store, arm.control)

    def cache(self) -> Cache:
        return ChunkReuseCache(self._model, self._store, ReusePolicy(min_prefill_saving=0))

    @property
    def bytes_per_token(self) -> float:
        chunks = self._store.inspect().chunks.values()
        return storage([chunk.kv.tensors for chunk in chunks]) / sum(len(chunk.tokens) for chunk in chunks)


class Held:
    """Copies of a cache that has been given the text."""

    def __init__(self, case: Case, cache: Cache) -> None:
        self._cache, self._num_tokens = cache, len(case.ids)
        case.fill(cache)

    def cache(self) -> Cache:
        """Layers that write to no tensor, but append by making new ones."""
        cache = copy.copy(self._cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        return cache

    @property
    def bytes_per_token(self) -> float:
        return storage([vars(layer) for layer in self._cache.layers]) / self._num_tokens


class Live:
    """Layers that hold codes, and have been given the text in one go."""

    def __init__(self, case: Case, config: KVQuantConfig) -> None:
        self._layers = make_layers(case.model, config)
        case.fill(PrivateCache([layer.native for layer in self._layers]))
        self.bytes_per_token = sum(layer.nbytes for layer in self._layers) / len(case.ids)

    def cache(self) -> Cache:
        return PrivateCache([layer.share().native for layer in self._layers])


def storage(kept: Any) -> int:
    """Bytes of all tensors that are kept, each storage counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(kept)}.values())


def tensors(kept: Any) -> Iterator[torch.Tensor]:
    """All plain tensors in nested containers and in tensors that are made of others."""
    if isinstance(kept, torch.Tensor):
        if hasattr(kept, "__tensor_flatten__"):
            yield from tensors([getattr(kept, name) for name in kept.__tensor_flatten__()[0]])
        else:
            yield kept
    elif isinstance(kept, dict | list | tuple):
        for each in kept.values() if isinstance(kept, dict) else kept:
            yield from tensors(each)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to keep K/V: by a codec in a store, or in a quantized cache of transformers."""

    name: str
    family: str  # its marker in the figure
    spec: Spec | None = None
    backend: dict[str, Any] | None = None  # of a QuantizedCache
    live: KVQuantConfig | None = None
    control: str | None = None  # what is done to what is stored
    even: bool = True  # as many bits for values as for keys, and groups of the usual size

    def prime(self, tokenizer: PreTrainedTokenizerBase, case: Case) -> Stored | Held | Live:
        """Keep the text of a case."""
        if self.live is not None:
            return Live(case, self.live)
        if self.spec is not None:
            return Stored(tokenizer, case, self)
        if self.backend is None:
            return Held(case, DynamicCache(config=case.model.config))
        # The residual is never full: what was quantized first is never quantized again.
        cache = QuantizedCache(config=case.model.config, residual_length=10**6, q_group_size=64, **self.backend)
        return Held(case, cache)


def make_arms() -> list[Arm]:
    def turboquant(key_bits: float, value_bits: float | None = None, **settings: Any) -> KVQuantConfig:
        return KVQuantConfig(key_bits=key_bits, value_bits=value_bits or key_bits, **settings)

    arms = [Arm(PLAIN, "plain"), Arm("raw", "raw", "raw")]
    arms += [Arm(name, "KIVI", name) for name in ("int8", "int4", "int2")]
    for keys, values in ((8, 4), (4, 2)):
        config = KVQuantConfig(method="kivi", key_bits=keys, value_bits=values)
        arms.append(Arm(f"int{keys} keys, int{values} values", "KIVI", config, even=False))
    for name in ("int8", "int4", "turboquant:4", "turboquant:2"):
        config = config_of(name)
        assert config is not None
        config = replace(config, sink_tokens=0)
        arms.append(Arm(f"{name}, first tokens coded", "first tokens coded", config))
    arms.append(Arm("int4, groups of 32", "KIVI", KVQuantConfig(method="kivi", group_size=32), even=False))
    for bits in ("4", "3.5", "3", "2.5", "2", "1", "4:3", "4:2", "3:2"):
        arms.append(Arm(f"turboquant:{bits}", "TurboQuant", f"turboquant:{bits}", even=":" not in bits))
    variants: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
        "with QJL": ({"qjl": True}, (4, 3.5, 3, 2)),
        "mean kept in": ({"remove_key_mean": False}, (4, 3, 2)),
        "Haar": ({"rotation": "haar"}, (4, 3, 2)),
        "lengths not corrected": ({"norm_correction": False}, (4, 3, 2)),
        "grouped values": ({"grouped_values": True}, (4, 2)),
    }
    for family, (settings, widths) in variants.items():
        arms += [Arm(f"turboquant:{b:g}, {family}", family, turboquant(b, **settings)) for b in widths]
    arms.append(Arm("turboquant:4:2, grouped values", "grouped values", turboquant(4, 2, grouped_values=True)))
    for nbits in (4, 2):
        arms.append(
            Arm(f"transformers, quanto, {nbits} bits", "quanto", backend={"backend": "quanto", "nbits": nbits})
        )
    axes = {"axis_key": 1, "axis_value": 1}  # as transformers' documentation asks for with HQQ
    for nbits in (8, 4, 3, 2, 1):
        backend = {"backend": "hqq", "nbits": nbits, **axes}
        arms.append(Arm(f"transformers, HQQ, {nbits} bits", "HQQ", backend=backend))
    for control in ("zeroed", "shuffled"):
        arms.append(Arm(f"control: turboquant:4, {control}", "control", "turboquant:4", control=control))
    return arms


def make_live_arms() -> list[Arm]:
    arms = [Arm(PLAIN, "plain")]
    for bits in (4, 3):
        arms.append(live(f"{bits} bits", key_bits=bits, value_bits=bits))
        name = f"{bits} bits, all layers, window of 16"
        arms.append(live(name, key_bits=bits, value_bits=bits, exact_layers=0, window=16))
    return arms


def live(name: str, **settings: Any) -> Arm:
    return Arm(f"live, {name}", "live", live=KVQuantConfig(**settings))


def make_real_arms() -> list[Arm]:
    """What a user chooses among, and the neighbours of each default."""
    names = ["raw", "int8", "int8 keys, int4 values", "int4", "int2"]
    names += [f"turboquant:{bits}" for bits in ("4", "3.5", "3", "2.5", "2", "1", "4:2")]
    names += [f"{name}, first tokens coded" for name in ("int8", "int4", "turboquant:4", "turboquant:2")]
    names += [f"turboquant:4, {what}" for what in ("mean kept in", "Haar", "with QJL", "lengths not corrected")]
    stored = {arm.name: arm for arm in make_arms()}
    return [Arm(PLAIN, "plain"), *(stored[name] for name in [*names, "control: turboquant:4, zeroed"])]


def make_real_live_arms() -> list[Arm]:
    """The same of caches that hold codes."""
    arms = [live(f"turboquant, {bits} bits", key_bits=bits, value_bits=bits) for bits in (4, 3, 2)]
    arms += [live(f"KIVI, {bits} bits", method="kivi", key_bits=bits, value_bits=bits) for bits in (8, 4, 2)]
    arms += [live(f"turboquant, 4 bits, {exact} exact layers", exact_layers=exact) for exact in (0, 1, 4)]
    arms += [live(f"turboquant, 4 bits, window of {window}", window=window) for window in (64, 256)]
    return [Arm(PLAIN, "plain"), *arms, live("turboquant, 4 bits, no sinks", sink_tokens=0)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question by one arm, against the model with its K/V as it is."""

    kind: str
    right: bool
    kl: float  # mean over the tokens of the answer
    agreement: float  # share of them with the same first choice
    decoded: float  # share of the prompt that was not computed


@torch.no_grad()
def forward(model: PreTrainedModel, ids: Sequence[int], cache: Cache, last: int = 0) -> torch.Tensor:
    """Logits [last, vocabulary] behind what the cache has; with 0, of all ids."""
    given = torch.tensor([list(ids)], device=model.device)
    out = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=last)
    logits: torch.Tensor = out.logits[0]
    return logits


def read(model: PreTrainedModel, ids: Sequence[int], answer: Sequence[int], cache: Cache) -> torch.Tensor:
    """Log-probabilities at each token of the answer, [answer, vocabulary]."""
    first = forward(model, ids[cache.get_seq_length() :], cache, last=1)
    return torch.cat([first, forward(model, answer[:-1], cache)]).double().log_softmax(-1)


def ask(
    tokenizer: PreTrainedTokenizerBase, case: Case, arm: Arm, full: list[torch.Tensor]
) -> tuple[float, list[Outcome]]:
    """Bytes per token, and the outcome of every question; `full` is filled by the first arm, and read by others."""
    primed = arm.prime(tokenizer, case)
    outcomes = []
    for n, question in enumerate(case.questions):
        cache = primed.cache()
        held = cache.get_seq_length()
        found = read(case.model, question.prompt, question.answer, cache)
        if len(full) == n:
            full.append(found)
        reused = held or cache.report.reused_tokens  # type: ignore[attr-defined]
        same = found.argmax(-1) == full[n].argmax(-1)
        outcomes.append(
            Outcome(
                kind=question.kind,
                right=found.argmax(-1).tolist() == question.answer,
                kl=float((full[n].exp() * (full[n] - found)).sum(-1).mean()),
                agreement=float(same.double().mean()),
                decoded=reused / len(question.prompt),
            )
        )
    return primed.bytes_per_token, outcomes


def common(ids: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    return next((n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))


def measure(model: PreTrainedModel, cases: Sequence[Case], tokenizer: Any, arms: Sequence[Arm]) -> Result:
    """Rows of figures, one for each arm; the first is that of K/V as it is."""
    answers: list[list[torch.Tensor]] = [[] for _ in cases]
    rows: list[Result] = []
    right: list[bool] = []
    for arm in arms:
        found: list[tuple[float, list[Outcome]]] = []
        try:
            found = [ask(tokenizer, case, arm, full) for case, full in zip(cases, answers, strict=True)]
        except (ImportError, RuntimeError, ValueError) as error:
            if arm.backend is None:
                raise
            rows.append({"arm": arm.name, "family": arm.family, "failed": f"{type(error).__name__}: {error}"})
            continue
        outcomes = [outcome for _, each in found for outcome in each]
        facts, said = ([o for o in outcomes if o.kind in (kind, "both")] for kind in ("fact", "said"))
        right = right or [outcome.right for outcome in facts]
        pairs = [(before, outcome.right) for before, outcome in zip(right, facts, strict=True)]
        divergences = [outcome.kl for outcome in said]
        row = {
            "right": statistics.fmean(outcome.right for outcome in facts),
            "lost": pairs.count((True, False)),
            "gained": pairs.count((False, True)),
            "kl": statistics.fmean(divergences),
            "kl_median": statistics.median(divergences),
            "kl_error": statistics.stdev(divergences) / len(divergences) ** 0.5,
            "agreement": statistics.fmean(outcome.agreement for outcome in said),
            "decoded": statistics.fmean(outcome.decoded for outcome in outcomes),
        }
        taken = statistics.fmean(taken for taken, _ in found)
        rows.append({"arm": arm.name, "family": arm.family, "even": arm.even, "bytes": taken, **row})
        print(f"{arm.name:50} {row['right']:.1%} right, KL {row['kl']:.1e}, {row['agreement']:.1%}", flush=True)
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    counts = {kind: sum(q.kind in (kind, "both") for c in cases for q in c.questions) for kind in ("fact", "said")}
    prompts = sorted(len(case.ids) for case in cases)
    shape = {"questions": counts, "tokens": [prompts[0], prompts[-1]], "dtype": str(model.dtype), "numbers": numbers}
    return {**shape, "rows": rows}


def markdown(result: Result) -> str:
    rows = [row for row in result["rows"] if "failed" not in row]
    plain = rows[0]
    raw_bytes = result["numbers"] * getattr(torch, result["dtype"].removeprefix("torch.")).itemsize
    lines = [
        measured_on(result["provenance"]),
        "",
        f"{result['questions']['fact']} questions whose answer is known, {result['questions']['said']} for KL; "
        f"texts of {result['tokens'][0]:,} to {result['tokens'][1]:,} tokens; "
        f"{result['dtype'].removeprefix('torch.')}; "
        f"{min(row['decoded'] for row in rows):.1%} of a prompt or more was not computed but came from where it was "
        f"kept. Bits are bytes by the {result['numbers']} numbers of a token, so that scales count. An answer is lost "
        "that is right with K/V as it is, and gained that is not.",
        "",
        "| | bytes per token | bits | less than raw | right | answers lost | gained | KL (nats), median | mean "
        "| same first choice |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['arm']} | {row['bytes']:.0f} | {8 * row['bytes'] / result['numbers']:.2f} "
        f"| {raw_bytes / row['bytes']:.2f}x | {row['right']:.1%} | {row['lost']} | {row['gained']} "
        f"| {row['kl_median']:.1e} | {row['kl']:.1e} ± {row['kl_error']:.0e} | {row['agreement']:.2%} |"
        for row in rows
        if row is not plain
    ]
    failed = [row for row in result["rows"] if "failed" in row]
    lines += ["", f"K/V as it is, in a `DynamicCache`: {plain['right']:.1%} right."]
    lines += [f"\n{row['arm']} does not run here: `{row['failed']}`" for row in failed]
    return "\n".join(lines) + "\n"


_FAMILIES = {  # colour, marker, and whether its points are joined
    "TurboQuant": ("#1f6fb2", "o", True),
    "with QJL": ("#b0554f", "v", True),
    "mean kept in": ("#8a5fbf", "^", False),
    "Haar": ("#5fa8d3", "D", False),
    "lengths not corrected": ("#888888", "x", False),
    "grouped values": ("#7a9d3a", "P", False),
    "KIVI": ("#3a9d5d", "s", True),
    "quanto": ("#d9822b", "*", True),
    "HQQ": ("#222222", "+", True),
}


def figure(result: Result, path: Path) -> None:
    """Write a PNG: KL, and answers right, against bytes per token; lines join equal bits for keys and values."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {row["arm"]: row for row in result["rows"] if row.get("kl", 1) < 1}
    drawn, axes = pyplot.subplots(1, 2, figsize=(12, 5.2), sharex=True, layout="constrained")
    for axis, field, scale in ((axes[0], "kl_median", 1), (axes[1], "right", 100)):
        for family, (colour, marker, joined) in _FAMILIES.items():
            own = [row for row in rows.values() if row["family"] == family]
            line = [row for row in own if row["even"] and joined]
            axis.plot([r["bytes"] for r in own], [scale * r[field] for r in own], marker, color=colour, label=family)
            axis.plot([r["bytes"] for r in line], [scale * r[field] for r in line], color=colour, linewidth=1)
        axis.set_xscale("log")
        axis.set_xticks((300, 400, 500, 600, 800, 1200), ("300", "400", "500", "600", "800", "1,200"))
        axis.set_xticks([], minor=True)
        axis.set_xlabel("bytes per token, scales included")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    labels = {f"turboquant:{bits}": bits for bits in ("4", "3.5", "3", "2.5", "2", "4:3", "4:2", "3:2")}
    for name, text in {**labels, **{name: name for name in ("int8", "int4", "int2")}}.items():
        where, colour = (rows[name]["bytes"], rows[name]["kl_median"]), _FAMILIES[rows[name]["family"]][0]
        axes[0].annotate(text, where, (6, 3), textcoords="offset points", color=colour, fontsize=8)
    axes[0].legend(frameon=False, fontsize=9, loc="lower left")
    plain = 100 * result["rows"][0]["right"]
    axes[1].axhline(plain, color="#555555", linestyle="--", linewidth=1)
    axes[1].annotate("K/V as it is", (900, plain), (0, 4), textcoords="offset points", color="#555555", fontsize=9)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("KL from the model with K/V as it is (nats), median")
    axes[1].set_ylabel("answers right (%)")
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON, the table and the figure")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of the model and its K/V (default: float32)")
    parser.add_argument("--live", action="store_true", help="caches that hold codes, in place of all others")
    parser.add_argument("--model", help="a chat model, as transformers takes it (default: the trained reader)")
    parser.add_argument("--cases", type=int, help="texts (default: 20 for the reader, 6 for a chat model)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = provenance(sys.argv[1:], "codecs_quality.py")
    dtype = getattr(torch, options.dtype)
    tokenizer: Any
    if options.model is None:
        model, tokenizer = load_embedded(dtype)
        draw, count, name = reader_case, 20, "codecs-quality"
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        draw, count, name = real_case, 6, "codecs-quality-real"
    model.to(options.device)
    makers = (make_arms, make_live_arms) if options.model is None else (make_real_arms, make_real_live_arms)
    arms = makers[options.live]()
    with torch.no_grad():
        cases = [draw(model, tokenizer, seed) for seed in range(options.cases or count)]
        found = measure(model, cases, tokenizer, arms)
    result = {"provenance": where, **found}
    name = f"{name}-{'live-' if options.live else ''}{options.device}"
    write(options.out, name, result, markdown(result))
    if not options.live and options.model is None:
        figure(result, options.out / "codecs-quality.png")
    print(markdown(result))


if __name__ == "__main__":
    main()
