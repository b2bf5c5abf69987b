"""What K/V in fewer bits does to answers: every codec, and what transformers has of the kind, on the trained reader.

    PYTHONPATH=. python benchmarks/codecs_quality.py --out benchmarks/results [--live]

Several questions are asked about the same documents. A store has computed these for one more question, and holds them
through a codec; it is frozen, so that each answer starts from nothing but codes. Only the question itself, and the
answer, are computed, on top of what is decoded. The quantized caches of transformers are given just the same tokens to
quantize, in one go, and quantize nothing more. With `--live`, so are caches of kvboost_hf that hold codes, and whose
last tokens stay exact.

The right answer is fed token by token behind each prompt. A question counts as right if every token of its answer, end
included, is the model's first choice; exactly then does greedy generate() give that answer. KL divergences are those
from the model with its K/V as it is, mean over the tokens of an answer. Their mean over questions is that of the few
that the model all but gets wrong anyway, so that it comes with its standard error, and with the median.

Bytes are those of the storage that tensors really have, scales and whatever else is kept included, by token of all
layers and heads.
"""

import argparse
import copy
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from record import write
from repair_quality import FreezableStore, damage
from reuse import Result, measured_on, provenance
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, QuantizedCache

from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy
from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.chat import encode
from kvboost_hf.assets.world import Fact, Turn, chat_messages, make_documents
from kvboost_hf.config import KVQuantConfig

NUM_DOCUMENTS, NUM_WORDS = 9, 96
PLAIN = "K/V as it is"
PACKED = (
    20  # HQQ packs 10 codes of 3 bits, or 8 of 1, of the tokens of both heads: others numbers of tokens it fails on
)
Spec = str | KVQuantConfig


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts that ask about the same documents, and the answers; the first prompt is what stores have seen."""

    prompts: tuple[list[int], ...]
    answers: tuple[list[int], ...]


def draw_case(tokenizer: PreTrainedTokenizerBase, seed: int, questions: int) -> Case:
    rng = random.Random(f"codecs/{seed}")
    documents = tuple(make_documents(rng, NUM_DOCUMENTS, num_words=NUM_WORDS))
    asked: list[Fact] = rng.sample([fact for document in documents for fact in document.facts], 1 + questions)
    return Case(
        tuple(encode(tokenizer, chat_messages([Turn(documents, fact)])) for fact in asked),
        tuple([*tokenizer.encode(f.answer, add_special_tokens=False), tokenizer.eos_token_id] for f in asked),
    )


class Stored:
    """Fresh caches on a store that holds the documents through a codec."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], arm: "Arm") -> None:
        self._model = model
        self._store = FreezableStore(model, chunker=ContentChunker.for_tokenizer(tokenizer), codec=arm.spec)
        self._store.warm(ids)
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
    """Copies of a cache that has been given the documents."""

    def __init__(self, model: PreTrainedModel, ids: Sequence[int], cache: Cache) -> None:
        self._cache, self._num_tokens = cache, len(ids)
        forward(model, ids, cache, last=1)

    def cache(self) -> Cache:
        """Layers that write to no tensor, but append by making new ones."""
        cache = copy.copy(self._cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        return cache

    @property
    def bytes_per_token(self) -> float:
        return storage([vars(layer) for layer in self._cache.layers]) / self._num_tokens


class Live:
    """Caches that hold codes, and have been given the documents in one go."""

    def __init__(self, model: PreTrainedModel, ids: Sequence[int], config: KVQuantConfig) -> None:
        self._model, self._ids, self._config = model, ids, config
        self.bytes_per_token = self.cache().nbytes / len(ids)

    def cache(self) -> ChunkReuseCache:
        cache = ChunkReuseCache(self._model, ChunkStore(self._model), live_quant=self._config)
        forward(self._model, self._ids, cache, last=1)
        return cache


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

    def prime(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], known: int
    ) -> Stored | Held | Live:
        """Keep a prompt, or, in a quantized cache, its first `known` tokens."""
        if self.live is not None:
            return Live(model, ids[:known], self.live)
        if self.spec is not None:
            return Stored(model, tokenizer, ids, self)
        if self.backend is None:
            return Held(model, ids[:known], DynamicCache(config=model.config))
        # The residual is never full: what was quantized first is never quantized again.
        cache = QuantizedCache(config=model.config, residual_length=10**6, q_group_size=64, **self.backend)
        return Held(model, ids[:known], cache)


def make_arms() -> list[Arm]:
    def turboquant(key_bits: float, value_bits: float | None = None, **settings: Any) -> KVQuantConfig:
        return KVQuantConfig(key_bits=key_bits, value_bits=value_bits or key_bits, **settings)

    arms = [Arm(PLAIN, "plain"), Arm("raw", "raw", "raw")]
    arms += [Arm(name, "KIVI", name) for name in ("int8", "int4", "int2")]
    arms.append(Arm("int4 keys, int2 values", "KIVI", KVQuantConfig(method="kivi", value_bits=2), even=False))
    arms.append(Arm("int4, groups of 32", "KIVI", KVQuantConfig(method="kivi", group_size=32), even=False))
    for bits in ("4", "3.5", "3", "2.5", "2", "4:3", "4:2", "3:2"):
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
        arms.append(Arm(f"live, {bits} bits", "live", live=KVQuantConfig(key_bits=bits, value_bits=bits)))
        config = KVQuantConfig(key_bits=bits, value_bits=bits, exact_layers=0, window=16)
        arms.append(Arm(f"live, {bits} bits, all layers, window of 16", "live", live=config))
    return arms


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question by one arm, against the model with its K/V as it is."""

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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, case: Case, arm: Arm, full: list[torch.Tensor]
) -> tuple[float, list[Outcome]]:
    """Bytes per token, and the outcome of every question; `full` is filled by the first arm, and read by others."""
    ids = case.prompts[0]
    known = min(common(ids, other) for other in case.prompts[1:])
    known -= known % PACKED
    primed = arm.prime(model, tokenizer, ids, known)
    outcomes = []
    for n, (prompt, answer) in enumerate(zip(case.prompts[1:], case.answers[1:], strict=True)):
        cache = primed.cache()
        held = cache.get_seq_length()
        found = read(model, prompt, answer, cache)
        if len(full) == n:
            full.append(found)
        reused = held or cache.report.reused_tokens  # type: ignore[attr-defined]
        same = found.argmax(-1) == full[n].argmax(-1)
        outcomes.append(
            Outcome(
                right=found.argmax(-1).tolist() == answer,
                kl=float((full[n].exp() * (full[n] - found)).sum(-1).mean()),
                agreement=float(same.double().mean()),
                decoded=reused / len(prompt),
            )
        )
    return primed.bytes_per_token, outcomes


def common(ids: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    return next((n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))


def measure(device: str, dtype: torch.dtype, num_cases: int, questions: int, arms: Sequence[Arm]) -> Result:
    """Rows of figures, one for each arm; the first is that of K/V as it is."""
    model, tokenizer = load_embedded(dtype)
    model.to(device)  # type: ignore[arg-type]
    cases = [draw_case(tokenizer, n, questions) for n in range(num_cases)]
    answers: list[list[torch.Tensor]] = [[] for _ in cases]
    rows: list[Result] = []
    right: list[bool] = []
    for arm in arms:
        print(f"{arm.name:60}", end="\r", flush=True)
        found: list[tuple[float, list[Outcome]]] = []
        try:
            found = [ask(model, tokenizer, case, arm, full) for case, full in zip(cases, answers, strict=True)]
        except (ImportError, RuntimeError, ValueError) as error:
            if arm.backend is None:
                raise
            rows.append({"arm": arm.name, "family": arm.family, "failed": f"{type(error).__name__}: {error}"})
            continue
        outcomes = [outcome for _, each in found for outcome in each]
        row = {field: statistics.fmean(getattr(o, field) for o in outcomes) for field in Outcome.__slots__}
        divergences = [outcome.kl for outcome in outcomes]
        row["kl_median"] = statistics.median(divergences)
        row["kl_error"] = statistics.stdev(divergences) / len(divergences) ** 0.5
        right = right or [outcome.right for outcome in outcomes]
        pairs = [(before, outcome.right) for before, outcome in zip(right, outcomes, strict=True)]
        changed = {"lost": pairs.count((True, False)), "gained": pairs.count((False, True))}
        taken = statistics.fmean(taken for taken, _ in found)
        rows.append({"arm": arm.name, "family": arm.family, "even": arm.even, "bytes": taken, **row, **changed})
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {"questions": questions * num_cases, "dtype": str(dtype), "numbers": numbers, "rows": rows}


def markdown(result: Result) -> str:
    rows = [row for row in result["rows"] if "failed" not in row]
    plain = rows[0]
    raw_bytes = result["numbers"] * getattr(torch, result["dtype"].removeprefix("torch.")).itemsize
    lines = [
        measured_on(result["provenance"]),
        "",
        f"{result['questions']} questions about {NUM_DOCUMENTS} documents, {result['dtype'].removeprefix('torch.')}; "
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
    parser.add_argument("--questions", type=int, default=200, help="in all, 10 about the same documents")
    options = parser.parse_args()
    where = provenance(sys.argv[1:], "codecs_quality.py")
    arms = make_live_arms() if options.live else make_arms()
    dtype = getattr(torch, options.dtype)
    result = {"provenance": where, **measure(options.device, dtype, -(-options.questions // 10), 10, arms)}
    name = f"codecs-quality-{'live-' if options.live else ''}{options.device}"
    write(options.out, name, result, markdown(result))
    if not options.live:
        figure(result, options.out / "codecs-quality.png")
    print(markdown(result))


if __name__ == "__main__":
    main()
