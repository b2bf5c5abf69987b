"""How good answers are when documents have moved: every repair at every share of recomputation, on the trained reader.

Documents make sense in one order only (`leaderboard/facts.py`). A store has seen them in another one, or each of them
alone; then questions are asked in the right order.

The same store serves all arms and questions: it is frozen after it was primed, so that nothing that is computed for
one answer can be reused for the next. The right answer is fed token by token behind each prompt, which it is no part
of. A question counts as right if every token of its answer, end included, is the model's first choice; exactly then
does greedy generate() give that answer.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reuse import Result
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.leaderboard.changes import damaged, keys_not_rotated
from benchmarks.leaderboard.facts import Facts, draw_facts
from benchmarks.leaderboard.measure import FreezableStore
from benchmarks.leaderboard.method import Change
from kvboost_hf import ChunkReuseCache, ContentChunker, ReusePolicy
from kvboost_hf.assets import load_embedded
from kvboost_hf.assets.world import SYSTEM_PROMPT

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
SEAMS = (2, 4, 8, 16, 24)  # tokens
DEFAULT_RATIO, DEFAULT_SEAM = 0.15, 16
SETTINGS = {"other order": "stored in another order", "alone": "each document stored alone"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to use what is stored."""

    name: str
    strategy: str  # its line in the figure
    policy: ReusePolicy
    change: Change = nullcontext  # of the store, or of what a model does with it: a control


def blend(**settings: Any) -> ReusePolicy:
    """A policy that moves all that is stored."""
    return ReusePolicy(mode="blend", sink_tokens=0, min_prefill_saving=0, progressive=False, **settings)


def make_arms(setting: str) -> list[Arm]:
    """All of them; for documents that are stored alone, the repairs at their defaults."""
    swept = setting == "other order"
    none = blend(repair="none")
    arms = [
        Arm(name="exact", strategy="exact", policy=ReusePolicy(min_prefill_saving=0)),
        Arm(name="naive", strategy="naive", policy=none),
        # Not before the first of the others, in which the model is probed for how its keys rotate.
        Arm(name="naive, keys not rotated", strategy="naive, keys not rotated", policy=none, change=keys_not_rotated),
    ]
    for seam in SEAMS if swept else (DEFAULT_SEAM,):
        policy = blend(repair="selective", seam_tokens=seam)
        arms.append(Arm(name=f"selective, {seam} tokens", strategy="selective", policy=policy))
    for repair in ("first_k", "cacheblend", "query"):
        for ratio in RATIOS if swept else (DEFAULT_RATIO,):
            policy = blend(repair=repair, recompute_ratio=ratio)
            arms.append(Arm(name=f"{repair}, {ratio:.0%}", strategy=repair, policy=policy))
    for damage in ("zeroed", "shuffled") if swept else ():
        policy = blend(repair="query", recompute_ratio=DEFAULT_RATIO)
        for name, arm in (("naive", none), (f"query, {DEFAULT_RATIO:.0%}", policy)):
            name = f"{name}, {damage} K/V"
            arms.append(Arm(name=name, strategy="control", policy=arm, change=damaged(damage)))
    return arms


def primed_store(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, case: Facts, setting: str
) -> FreezableStore:
    """A frozen store that has seen the documents of a case as `setting` says."""
    store = FreezableStore(model, chunker=ContentChunker.for_tokenizer(tokenizer))
    if setting == "alone":
        prefix = tokenizer.apply_chat_template([{"role": "system", "content": SYSTEM_PROMPT}], tokenize=False)
        store.warm(documents=[document.text for document in case.documents], prefix=prefix, tokenizer=tokenizer)  # type: ignore[arg-type]
    else:
        store.warm(case.seen_ids(tokenizer))
    store.frozen = True
    return store


class LayerCount:
    """Counts the tokens that pass the MLPs of a model, whoever calls it and whatever a report says."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tokens = 0
        self._layers = [m for name, m in model.named_modules() if name.endswith(".mlp")]
        for mlp in self._layers:
            mlp.register_forward_pre_hook(self)

    def __call__(self, _module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.tokens += args[0].shape[:-1].numel()

    def take(self) -> float:
        """Tokens since the last call, mean over the layers."""
        tokens, self.tokens = self.tokens, 0
        return tokens / len(self._layers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question by one arm, against full prefill."""

    right: bool
    kl_first: float  # KL(full || arm) of the first token of the answer
    kl: float  # the same, mean over the answer
    agreement: float  # share of the answer's tokens with the same first choice
    computed: float  # tokens through the layers, mean over the layers, as a share of the prompt
    moved: float  # share of the prompt


@torch.no_grad()
def read(
    model: PreTrainedModel, ids: Sequence[int], answer: Sequence[int], cache: Cache, count: LayerCount
) -> tuple[torch.Tensor, float]:
    """Log-probabilities at each token of the answer, [answer, vocabulary], and tokens computed for the prompt."""
    count.take()
    prompt_1T = torch.tensor([list(ids)], device=model.device)
    forced_1A = torch.tensor([list(answer[:-1])], device=model.device)
    first_1V = model(input_ids=prompt_1T, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0]
    computed = count.take()
    rest_AV = model(input_ids=forced_1A, past_key_values=cache, use_cache=True).logits[0]
    return torch.cat([first_1V, rest_AV]).double().log_softmax(-1), computed


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    case: Facts,
    setting: str,
    arms: Sequence[Arm],
    count: LayerCount,
) -> Iterator[tuple[str, bool, Outcome]]:
    """The outcome of every question by every arm and by full prefill: (arm, asks for a start, outcome)."""
    store = primed_store(model, tokenizer, case, setting)
    for fact in (*case.starts, *case.others):
        is_start = fact in case.starts
        ids = case.ids(tokenizer, fact)
        answer = [*tokenizer.encode(fact.answer, add_special_tokens=False), tokenizer.eos_token_id]
        target = torch.tensor(answer, device=model.device)
        full, computed = read(model, ids, answer, DynamicCache(config=model.config), count)
        choice = full.argmax(-1)
        yield "full prefill", is_start, Outcome(bool((choice == target).all()), 0.0, 0.0, 1.0, computed / len(ids), 0)
        for arm in arms:
            with arm.change(store):
                cache = ChunkReuseCache(model, store, arm.policy)
                found, computed = read(model, ids, answer, cache, count)
            divergence = (full.exp() * (full - found)).sum(-1)
            yield (
                arm.name,
                is_start,
                Outcome(
                    right=bool((found.argmax(-1) == target).all()),
                    kl_first=float(divergence[0]),
                    kl=float(divergence.mean()),
                    agreement=float((found.argmax(-1) == choice).double().mean()),
                    computed=computed / len(ids),
                    moved=cache.report.moved_tokens / len(ids),
                ),
            )


def measure_quality(device: str, num_cases: int, num_documents: int, questions: int) -> Result:
    """Every setting: rows of figures, one for each arm."""
    model, tokenizer = load_embedded()
    model.to(device)  # type: ignore[arg-type]
    count = LayerCount(model)
    cases = [draw_facts(f"repair/{n}", num_documents, questions) for n in range(num_cases)]
    starts, others = (sum(case.num_facts[kind] for case in cases) for kind in (0, 1))
    result: Result = {
        "questions": 2 * questions * num_cases,
        "documents": num_documents,
        "start_share": starts / (starts + others),
    }
    for setting in SETTINGS:
        arms = make_arms(setting)
        # Not counted: in the first round of all, the model is probed, and that takes tokens, too.
        list(ask(model, tokenizer, draw_facts("repair/first", num_documents, 1), setting, arms, count))
        outcomes: dict[str, dict[bool, list[Outcome]]] = {}
        for n, case in enumerate(cases):
            for name, is_start, outcome in ask(model, tokenizer, case, setting, arms, count):
                outcomes.setdefault(name, {True: [], False: []})[is_start].append(outcome)
            print(f"quality, {SETTINGS[setting]}: {n + 1} of {num_cases} cases", end="\r", flush=True)
        strategies = {arm.name: arm.strategy for arm in arms}
        result[setting] = [
            {"arm": name, "strategy": strategies.get(name, name), **summary(found, result["start_share"])}
            for name, found in outcomes.items()
        ]
        print()
    return result


def summary(outcomes: dict[bool, list[Outcome]], start_share: float) -> Result:
    """Means over the questions; `overall` counts either kind of fact as often as documents tell it."""

    def mean(field: str, is_start: bool) -> float:
        return statistics.fmean(getattr(outcome, field) for outcome in outcomes[is_start])

    def overall(field: str) -> float:
        return start_share * mean(field, True) + (1 - start_share) * mean(field, False)

    fields = ("kl_first", "kl", "agreement", "computed", "moved")
    return {"overall": overall("right"), "starts": mean("right", True)} | {field: overall(field) for field in fields}


def quality_markdown(result: Result) -> list[str]:
    lines = [
        f"{result['questions']} questions in either setting, each about one of {result['documents']} documents, half "
        "of them about pronouns at the starts of documents; *overall* counts these as often as documents have them "
        f"({result['start_share']:.0%}).",
    ]
    for setting, title in SETTINGS.items():
        lines += [
            "",
            f"| {title} | computed | right, overall | right, pronouns at starts | KL, first token | KL, answer "
            "| same first choice |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {row['arm']} | {row['computed']:.1%} | {row['overall']:.1%} | {row['starts']:.1%} "
            f"| {row['kl_first']:.1e} | {row['kl']:.1e} | {row['agreement']:.1%} |"
            for row in result[setting]
        ]
    return lines


_COLOURS = {
    "query": "#1f6fb2",
    "cacheblend": "#d9822b",
    "first_k": "#3a9d5d",
    "selective": "#8a5fbf",
}


def quality_figure(result: Result, path: Path) -> None:
    """Write a PNG for the first setting: all facts, and pronouns at the starts of documents."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {row["arm"]: row for row in result["other order"]}
    drawn, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), sharex=True, layout="constrained")
    panels = (("overall", "All facts"), ("starts", "Pronouns at the starts of documents"))
    for axis, (field, what) in zip(axes, panels, strict=True):
        full = rows["full prefill"][field]
        axis.axhline(100 * full, color="#555555", linestyle="--", linewidth=1, label="full prefill")
        for strategy, colour in _COLOURS.items():
            line = [rows["naive"], *(row for row in rows.values() if row["strategy"] == strategy)]
            at, right = ([100 * row[name] for row in line] for name in ("computed", field))
            axis.plot(at, right, "o-", color=colour, markersize=4, label=strategy)
        for name, marker in (("naive", "s"), ("naive, keys not rotated", "x")):
            row = rows[name]
            axis.plot(100 * row["computed"], 100 * row[field], marker, color="#222222", label=name)
        axis.set_title(what, fontsize=11)
        axis.set_xlabel("computed (% of prompt tokens, mean over layers)")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("answers right (%)")
    axes[1].legend(frameon=False, fontsize=9, loc="lower right")
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)
