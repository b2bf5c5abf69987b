"""Ideas for repairing moved K/V, each measured alone on a real model: where the error is, and what removes it.

    python benchmarks/repair_ideas.py --out benchmarks/results

Prompts and earlier prompts are those of `leaderboard/workloads.py`. SmolLM2 runs in plain PyTorch, layer by layer, so
that any tokens can be computed in any layers; its logits are compared with those of transformers. Every arm is fed the
plain answer. The share of token-layers counts a token once for each layer that it went through, the question's look at
stored K/V included.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from record import Record, add_options
from targets import Result
from transformers.models.llama.modeling_llama import rotate_half

from benchmarks.leaderboard.workloads import NOTES, SOURCES, Pool
from kvboost_hf.bench.run import provenance
from recipes.real_model import load

NEW, ASKED, SEED = 24, 3, 11  # tokens of an answer, prompts of each kind
FIGURES = ("kl", "kl_first", "agreement", "before", "computed")
HEAD = "| | KL, mean | closer than row 1 | KL, first token | same first choice | computed before that token | in all |"
Score = Callable[["Look"], torch.Tensor]
Narrow = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]


class Row:
    """A prompt and its answer, but for the last token, with K/V of which any columns can be computed."""

    def __init__(self, model: Any, ids: torch.Tensor, question: tuple[int, int]) -> None:
        config = model.config
        shape = (config.num_hidden_layers, config.num_key_value_heads, len(ids), config.head_dim)
        self.model, self.ids, self.question, self.prompt = model, ids, question, question[1]
        self.columns = torch.arange(len(ids))
        self.asking = (self.columns >= question[0]) & (self.columns < question[1])  # behind all documents
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)  # keys as rotated for their columns
        self.moved = torch.zeros(len(ids), dtype=torch.bool)  # holds the K/V of another history
        self.computed = 0  # tokens, summed over layers

    def copy(self) -> "Row":
        """Another row with the same K/V, where nothing was computed."""
        made = Row(self.model, self.ids, self.question)
        made.keys, made.values, made.moved = self.keys.clone(), self.values.clone(), self.moved.clone()
        return made

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate [..., tokens, head_dim] by positions, or by distances."""
        cos, sin = (each[0] for each in self.model.model.rotary_emb(x, positions[None]))
        return x * cos + rotate_half(x) * sin

    def compute(self, mask: torch.Tensor, narrow: Narrow | None = None, look: list[Any] | None = None) -> torch.Tensor:
        """Compute masked columns over all K/V that is there, put theirs in place, and return the last logits.

        `narrow` may return a mask of those that go on; `look` gets each head's attention, summed over queries.
        """
        columns, model = self.columns[mask], self.model
        hidden = model.model.embed_tokens(self.ids[columns])
        for at, layer in enumerate(model.model.layers):
            own, x = layer.self_attn, layer.input_layernorm(hidden)
            projected = (each(x).unflatten(1, (-1, own.head_dim)) for each in (own.q_proj, own.k_proj, own.v_proj))
            query, key, value = (each.transpose(0, 1) for each in projected)
            query, key = self.rotate(query, columns), self.rotate(key, columns)
            kept = narrow(at, columns, value) if narrow is not None else None
            self.keys[at][:, columns], self.values[at][:, columns] = key, value
            if kept is not None:
                columns, hidden, query = columns[kept], hidden[kept], query[:, kept]
            seen = self.columns <= columns[:, None]
            if look is not None:
                scores = query @ self.keys[at].repeat_interleave(len(query) // len(key), 0).mT * own.scaling
                look.append(scores.masked_fill(~seen, -torch.inf).softmax(-1).sum(1))
            k, v = self.keys[at][None], self.values[at][None]
            got = F.scaled_dot_product_attention(query[None], k, v, attn_mask=seen, enable_gqa=True)[0]
            hidden = hidden + own.o_proj(got.transpose(0, 1).flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            self.computed += len(columns)
        return model.lm_head(model.model.norm(hidden[-NEW:]))


class Variant(NamedTuple):
    """K/V of a document from an earlier prompt."""

    start: int  # column
    before: tuple[int, ...]  # documents
    keys: torch.Tensor
    values: torch.Tensor


PICKS: dict[str, Callable[[list[Variant], int], list[Variant]]] = {
    "most text before it": lambda stored, at: [max(stored, key=lambda v: v.start)],
    "least text before it": lambda stored, at: [min(stored, key=lambda v: v.start)],
    "stored last": lambda stored, at: stored[-1:],
    "nearest position": lambda stored, at: [min(stored, key=lambda v: abs(v.start - at))],
    "mean of all": lambda stored, at: stored,
}


class Target(NamedTuple):
    """A prompt: what is stored of each document, exact K/V, plain logits."""

    documents: list[tuple[int, int, int]]  # number, first column, end
    stored: dict[int, list[Variant]]
    exact: Row
    plain: torch.Tensor

    def assembled(self, pick: str) -> Row:
        """The prompt over stored K/V, picked as `PICKS` says; documents whose history is the same are exact."""
        row, before = self.exact.copy(), tuple[int, ...]()
        for number, start, stop in self.documents:
            picked = PICKS[pick](self.stored[number], start)
            if any(each.before != before for each in picked):
                turned = [row.rotate(v.keys, torch.full((stop - start,), start - v.start)) for v in picked]
                row.keys[:, :, start:stop] = torch.stack(turned).mean(0)
                row.values[:, :, start:stop] = torch.stack([v.values for v in picked]).mean(0)
                row.moved[start:stop] = True
            before += (number,)
        return row


def places(ids: list[int], pieces: list[list[int]]) -> list[tuple[int, int, int]]:
    """The documents in a prompt, one behind the other: number, first column, end."""
    tried = ((at, at + len(piece), n) for n, piece in enumerate(pieces) for at in range(len(ids)))
    documents = [(n, at, end) for at, end, n in sorted(tried) if ids[at:end] == pieces[n]]
    assert all(a[2] == b[1] for a, b in pairwise(documents)), documents
    return documents


def targets(model: Any, tokenizer: Any, pool: Pool) -> Iterator[Target]:
    """The prompts of a case, over what earlier ones have stored."""
    case, texts = pool(tokenizer, SEED, ASKED), pool.drawn(tokenizer, SEED)
    pieces = [tokenizer(f"Document:\n{text}\n\nD", add_special_tokens=False).input_ids[:-1] for text in texts]
    stored: dict[int, list[Variant]] = {}
    for ids in case.seen:
        documents = places(ids, pieces)
        row = Row(model, torch.tensor(ids), (documents[-1][2], len(ids)))
        row.compute(row.columns >= 0)
        for at, (number, start, stop) in enumerate(documents):
            kv = (each[:, :, start:stop].clone() for each in (row.keys, row.values))
            stored.setdefault(number, []).append(Variant(start, tuple(d[0] for d in documents[:at]), *kv))
    for ids in (question.ids for question in case.asked):
        inputs, sizes = torch.tensor([ids]), {"min_new_tokens": NEW, "max_new_tokens": NEW}
        said = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, **sizes)
        documents = places(ids, pieces)
        row = Row(model, said[0, :-1], (documents[-1][2], len(ids)))
        plain = row.compute(row.columns >= 0)
        torch.testing.assert_close(plain, model(said[:, :-1]).logits[0, -NEW:], rtol=1e-3, atol=5e-3)
        yield Target(documents, stored, row, plain)


class Look:
    """What is known of a prompt over stored K/V when tokens are chosen, and, for oracles, what is not known."""

    def __init__(self, target: Target, row: Row) -> None:
        self.row, self.target = row, target
        looking, attention = row.copy(), list[torch.Tensor]()
        looking.compute(row.asking, look=attention)
        self.cost, self.attention = looking.computed, torch.stack(attention)  # [layers, heads, tokens]
        self.mean = self.attention.mean(1)  # [layers, tokens]
        self.roots = self.mean.sqrt().sum(0)  # so that no layer decides alone
        self.distance = torch.full((len(row.ids),), torch.inf)  # from the start of the document
        self.rank = self.distance.clone()  # among its tokens, by how much stored variants differ
        for number, start, stop in target.documents:
            self.distance[start:stop] = self.rank[start:stop] = torch.arange(stop - start).float()
            values = torch.stack([each.values for each in target.stored[number]])
            if len(values) > 1:
                varied = (values.var(0).sum((1, 3)) / values.mean(0).square().sum((1, 3)))[1:].mean(0)
                self.rank[start:stop] = (-varied).argsort().argsort().float()
        self.near = 1 / (1 + self.distance / 8)
        self.query = self.roots * self.near  # what `repair="query"` chooses by
        self.change = (target.exact.values - row.values).square().sum((1, 3))  # [layers, tokens]
        self.deviation = self.change / target.exact.values.square().sum((1, 3))
        length = row.values.square().sum((1, 3)).sqrt()
        self.length = length / length[:, row.moved].mean(1, keepdim=True)  # of values, over that of the layer's mean

    def best(self, scores: torch.Tensor, ratio: float, done: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens], the moved tokens with the highest scores, as many as a ratio of all moved ones."""
        moved, found = self.row.moved, torch.zeros_like(self.row.moved)
        allowed = moved if done is None else moved & ~done
        count = min(math.ceil(ratio * int(moved.sum()) - 1e-9), int(allowed.sum()))
        found[torch.where(allowed, scores, -torch.inf).topk(count).indices] = True
        return found


Arm = Callable[[Row, Look], Iterator[None]]  # repairs a row; yields after each stage


def stages(
    ratios: tuple[float, ...], row: Row, look: Look, by: Score = lambda look: look.query, looks: bool = True
) -> Iterator[None]:
    """Tokens with the best scores are computed, then others; an infinite ratio computes all of them once more."""
    done, row.computed = torch.zeros_like(row.moved), look.cost * looks
    for ratio in ratios:
        chosen = row.moved if ratio == math.inf else look.best(by(look), ratio, done)
        row.compute(chosen | row.asking)
        done = done | chosen
        yield


def stale_in(first: int, end: int, row: Row, look: Look) -> Iterator[None]:
    """K/V is stale in some layers, and exact in all others."""
    for held, exact in ((row.keys, look.target.exact.keys), (row.values, look.target.exact.values)):
        held[:first], held[end:] = exact[:first], exact[end:]
    return NOTHING(row, look)


def gradual(wide: float, layer: int, ratio: float, row: Row, look: Look, roots: bool = True) -> Iterator[None]:
    """Many tokens are computed up to a layer; how far their values changed there says which of them go on."""

    def narrow(at: int, columns: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        if at != layer:
            return None
        old, scores = row.values[at][:, columns], torch.full((len(row.ids),), -torch.inf)
        change = ((value - old).square().sum((0, 2)) / old.square().sum((0, 2))).sqrt()
        scores[columns] = change * look.roots[columns] if roots else change
        return (look.best(scores, ratio) | row.asking)[columns]

    row.computed = look.cost * roots
    row.compute(look.best(look.query, wide) | row.asking, narrow)
    yield


NOTHING, FIFTH = partial(stages, (0,), looks=False), partial(stages, (0.2,))
WINDOWS = [(0, 30), *((a, a + 6) for a in range(0, 30, 6)), (0, 12), (12, 30)]
CHOICES: dict[str, Arm] = {
    "roots of attention / (1 + d/8): `query`": FIFTH,
    "nothing": NOTHING,
    "attention alone": partial(FIFTH, by=lambda look: look.mean.sum(0)),
    "distance alone: `first_k`": partial(FIFTH, by=lambda look: -look.distance, looks=False),
    "attention / (1 + d/8)": partial(FIFTH, by=lambda look: look.mean.sum(0) * look.near),
    **{f"roots / (1 + d/{c})": partial(FIFTH, by=lambda k, c=c: k.roots / (1 + k.distance / c)) for c in (3, 16, 32)},
    "`query`, of layers 8 to 25": partial(FIFTH, by=lambda look: look.mean[8:26].sqrt().sum(0) * look.near),
    "`query`, x length of values": partial(FIFTH, by=lambda k: (k.mean.sqrt() * k.length).sum(0) * k.near),
    "`query`, roots of each head": partial(FIFTH, by=lambda k: k.attention.sqrt().mean(1).sum(0) * k.near),
    "difference of stored variants": partial(FIFTH, by=lambda look: -look.rank, looks=False),
    "roots / (1 + rank of that difference/8)": partial(FIFTH, by=lambda look: look.roots / (1 + look.rank / 8)),
    "all to layer 1, 20% by change: `cacheblend`": partial(gradual, 1, 1, 0.2, roots=False),
    "all to layer 1, 15% by change x roots": partial(gradual, 1, 1, 0.15),
    "40% to layer 3, 18% by change x roots": partial(gradual, 0.4, 3, 0.18),
    "40% to layer 6, 15% by change x roots": partial(gradual, 0.4, 6, 0.15),
    "25%, up to layer 24": partial(gradual, 0.25, 24, 0),
    "22%, up to layer 27": partial(gradual, 0.22, 27, 0),
    "oracle: true change": partial(FIFTH, by=lambda look: look.deviation[1:].mean(0), looks=False),
    "oracle: attention x true change": partial(FIFTH, by=lambda look: (look.mean * look.change.sqrt()).sum(0)),
    "oracle: roots x true change": partial(FIFTH, by=lambda look: (look.mean.sqrt() * look.change.sqrt()).sum(0)),
}
PARTS: dict[str, dict[str, Arm]] = {
    "Stale K/V only in some layers": {f"layers {a} to {b - 1}": partial(stale_in, a, b) for a, b in WINDOWS},
    "Which stored variant is taken": dict.fromkeys(PICKS, NOTHING),
    "Which moved tokens are computed again": CHOICES,
    "One stage, or one before the first token and one after it": {
        **{f"{ratio:.0%}": partial(stages, (ratio,)) for ratio in (0.2, 0.3, 0.5, 0.7)},
        **{f"20%, then {more:.0%} and the question": partial(stages, (0.2, more)) for more in (0.2, 0.4, 0.6)},
        "20%, then all of it: `progressive`": partial(stages, (0.2, math.inf)),
        "100%: a control": partial(stages, (1,)),
    },
}


def measure(target: Target, row: Row, look: Look, arm: Arm) -> Result:
    """How far an arm's answer is from plain: the first stage gives its first token, the last one the others."""
    logits, work = [], []
    for _ in arm(row, look):
        work.append(row.computed / (len(row.keys) * row.prompt))
        logits.append(row.compute(row.columns >= row.prompt - 1))
        row.computed -= NEW * len(row.keys)  # nor does plain count the answer
    found, plain = torch.cat([logits[0][:1], logits[-1][1:]]), target.plain.double().log_softmax(-1)
    kl = (plain.exp() * (plain - found.double().log_softmax(-1))).sum(-1)
    agreement = (found.argmax(-1) == plain.argmax(-1)).double().mean()
    figures: tuple[Any, ...] = (kl.mean(), kl[0], agreement, work[0], work[-1])
    return {name: float(figure) for name, figure in zip(FIGURES, figures, strict=True)}


def profile(look: Look) -> Result:
    """How the values of moved tokens differ from what they have to be. Those of layer 0 do not depend on history."""
    moved, found = look.row.moved, {}
    for a, b in pairwise((0, 1, 2, 4, 8, 16, 32, 64, 128, 10**6)):
        where = moved & (look.distance >= a) & (look.distance < b)
        found[f"squared difference over square, {a} tokens behind the seam or more"] = look.deviation[1:, where].mean()
    change = look.change[1:, moved]
    largest = change.topk(round(0.15 * change.shape[1])).values
    found["share of the squared difference in 15% of tokens"] = (largest.sum(1) / change.sum(1)).mean()
    explained, pairs = torch.zeros(len(change)), []
    for number, start, stop in look.target.documents:
        used, exact = look.row.values[1:, :, start:stop], look.target.exact.values[1:, :, start:stop]
        explained += (exact - used).mean(2).square().sum((1, 2)) * (stop - start)
        others = [v.values[1:] for v in look.target.stored[number] if not torch.equal(v.values[1:], used)]
        if moved[start] and others:
            pairs.append(correlation(*((each - used).square().sum((0, 1, 3)) for each in (others[0], exact))))
    found["share of it that the mean over a document explains"] = (explained / change.sum(1)).mean()
    for layer in (3, 6, 10, 15, 20, 25, 29):
        found[f"rank correlation of layer 1 with layer {layer}"] = correlation(*look.deviation[[1, layer]][:, moved])
    found["rank correlation of two variants' difference with the true one"] = torch.stack(pairs).mean()
    return {name: float(figure) for name, figure in found.items()}


def correlation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of ranks."""
    return torch.corrcoef(torch.stack([a, b]).argsort(1).argsort(1).double())[0, 1]


def add(result: Result, kind: str, prompts: Iterator[Target]) -> None:
    """Measure all ideas on the next prompt."""
    target = next(prompts)
    rows = {pick: target.assembled(pick) for pick in PICKS}
    usual = rows["most text before it"]
    look = Look(target, usual)
    result["profile"].append({"kind": kind, "prompt": usual.prompt, **profile(look)})
    for part, arms in PARTS.items():
        for name, arm in arms.items():
            figures = measure(target, rows.get(name, usual).copy(), look, arm)
            result["arms"].append({"kind": kind, "part": part, "arm": name, **figures})


def markdown(result: Result) -> str:
    """The tables: means over prompts."""
    lengths = sorted(row["prompt"] for row in result["profile"])
    lines = ["# Ideas for repairing moved K/V", "", f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens."]
    for part, arms in PARTS.items():
        lines += ["", f"## {part}", "", HEAD, "| --- |" + " ---: |" * 6]
        rows = [[row for row in result["arms"] if (row["part"], row["arm"]) == (part, arm)] for arm in arms]
        for arm, own in zip(arms, rows, strict=True):
            kl, first, same, before, computed = (statistics.fmean(row[figure] for row in own) for figure in FIGURES)
            closer = sum(a["kl"] < b["kl"] for a, b in zip(own, rows[0], strict=True))
            told = f"{kl:.4f} | " + (f"{closer} of {len(own)}" if own is not rows[0] else "")
            lines += [f"| {arm} | {told} | {first:.4f} | {same:.1%} | {before:.1%} | {computed:.1%} |"]
    lines += ["", "## How values differ", "", "| mean over prompts, and layers from 1 on | |", "| --- | ---: |"]
    for figure in list(result["profile"][0])[2:]:
        lines += [f"| {figure} | {statistics.fmean(row[figure] for row in result['profile']):.3f} |"]
    return "\n".join([*lines, "", result["provenance"], ""])


def main() -> None:
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, tokenizer = load()
    conditions = provenance("python benchmarks/repair_ideas.py --out benchmarks/results", "cpu")
    result: Result = {"provenance": str(conditions), "profile": [], "arms": []}
    record = Record("repair-ideas-cpu", options, result, markdown)
    found = {pool.title: targets(model, tokenizer, pool) for pool in (NOTES, SOURCES)}
    for number in range(ASKED):
        for kind, prompts in found.items():
            record.measure(f"{kind}, prompt {number + 1}", partial(add, result, kind, prompts))
    record.show()


if __name__ == "__main__":
    main()
