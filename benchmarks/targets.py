"""What is aimed at on a GPU, what is expected, and whether the result of a benchmark reaches it.

A target is a bound on a figure: a ratio to another way that was measured in the same run, or a count. `verdicts` reads
the figures from the JSON of a benchmark, so that whoever has the file, whole or cut short, has the targets. Those of
one step of `gpu.py` have its name, so that a target that no step has measured is told, too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

Result = dict[str, Any]
Found = float | tuple[float, str] | None  # a figure, with what else is worth knowing of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound on a figure.

    Args:
        step: The step of `gpu.py` that measures it.
        case: What is measured.
        base: What the figure is relative to; empty for counts.
        find: Reads the figure from the JSON of a benchmark; None or a KeyError if it is not there.
        least: The least figure that reaches the target.
        most: The greatest one.
        est: The figure that is expected, where somebody has worked it out.
    """

    step: str
    case: str
    base: str = ""
    find: Callable[[Result], Found]
    least: float | None = None
    most: float | None = None
    est: str = ""

    @property
    def bound(self) -> str:
        """The bound in characters."""
        sign, limit = (">=", self.least) if self.least is not None else ("<=", self.most)
        return f"{sign} {limit:.2f}" if self.base else f"{sign} {limit:g}"

    def __str__(self) -> str:
        against = f" of {self.base}" if self.base else ""
        return f"{self.case} {self.bound}{against}"


class Verdict(NamedTuple):
    """A target with what was found.

    Example:
        >>> aim = Target(step="decode", case="decode over 32k", base="copy", find=dict.get, least=0.7, est="0.9")
        >>> print(Verdict(aim, 0.88))
        PASS decode over 32k >= 0.70 of copy: 0.88 (est. 0.9)
    """

    target: Target
    found: float
    note: str = ""

    @property
    def reached(self) -> bool:
        """Whether the figure is within the bound."""
        least, most = self.target.least, self.target.most
        return (least is None or self.found >= least) and (most is None or self.found <= most)

    def __str__(self) -> str:
        found = f"{self.found:.2f}" if self.target.base else f"{self.found:g}"
        told = ", ".join(each for each in (self.note, f"est. {self.target.est}" if self.target.est else "") if each)
        return f"{'PASS' if self.reached else 'MISS'} {self.target}: {found}{f' ({told})' if told else ''}"


def verdicts(name: str, result: Result) -> list[Verdict]:
    """The targets of a benchmark that its result says something of.

    Args:
        name: The name of its files, with or without the device: `"attention-cuda"`.
        result: The result of its JSON.
    """
    found = []
    for target in targets_of_file(name):
        try:
            figure = target.find(result)
        except (KeyError, ZeroDivisionError):  # not measured, or nothing to count
            continue
        if figure is not None:
            found.append(Verdict(target, *(figure if isinstance(figure, tuple) else (figure,))))
    return found


def targets_of_file(name: str) -> list[Target]:
    """The targets that the JSON of a benchmark can say something of; none for an unknown name."""
    return next((aims for base, aims in TARGETS.items() if name == base or name.startswith(f"{base}-c")), [])


def targets_of(step: str) -> list[Target]:
    """The targets that a step of `gpu.py` measures."""
    return [target for aims in TARGETS.values() for target in aims if target.step == step]


def row_of(rows: Iterable[Result], /, **which: object) -> Result:
    """The first row with these values.

    Raises:
        KeyError: There is none.
    """
    for row in rows:
        if all(row.get(name) == value for name, value in which.items()):
            return row
    raise KeyError(which)


def worst(rows: Iterable[tuple[str, float]], choose: Callable[..., tuple[str, float]]) -> Found:
    """The least or the greatest of several figures, and the name of its row."""
    found = list(rows)
    if not found:
        return None
    name, figure = choose(found, key=lambda each: each[1])
    return figure, name if len(found) > 1 else ""


def _link() -> Iterator[Target]:
    def ratio(result: Result, way: str, base: str) -> Found:
        rates = result["rates"]
        return rates[way] / rates[base], f"{rates[way]:.1f} GB/s"

    step = "link"
    for memory in ("pinned", "registered"):
        find = partial(ratio, way=f"{memory}, pieces", base=f"{memory}, whole")
        case = f"link, {memory}, 32 MB pieces"
        yield Target(step=step, case=case, base="whole layers", find=find, least=0.97, est="1.0")
    find = partial(ratio, way="registered, whole", base="pinned, whole")
    yield Target(step=step, case="link, registered", base="pinned", find=find, least=0.97, est="1.0")


SHORT_QUERIES = {1: "0.93", 16: "0.93", 128: "0.8"}  # of a table of pieces of 2,048 columns: what is expected
CODED = {"int8": (1.5, "1.5-1.8"), "int4": (2.2, "2.3-2.8"), "turboquant 4": (1.0, "1.5")}


def _attention() -> Iterator[Target]:
    def ratio(result: Result, case: str, way: str) -> float:
        ratios = row_of([row for row in result["cases"] if row["name"].startswith(case)])["ratios"]
        return float(ratios["float32" if way == "bfloat16" and way not in ratios else way])  # the former on a CPU

    def target(step: str, case: str, way: str, least: float, est: str = "", name: str = "") -> Target:
        find = partial(ratio, case=case, way=way)
        return Target(step=step, case=name or case, base=way, find=find, least=least, est=est)

    for total in ("128k", "32k"):
        for name, (least, est) in CODED.items():
            likely = est if total == "128k" or name != "int8" else f"{est}, less at 32k"
            yield target("codes", f"{name}, 1 over {total}", "bfloat16", least, likely)
    for width in (2048, 128):
        for total in ("32k", "128k"):
            for queries, likely in SHORT_QUERIES.items():
                if width == 2048 or queries == 1:
                    case = f"pieces of {width}, {queries} over {total}"
                    yield target("pieces", case, "contiguous", 0.9, likely if width == 2048 else "0.5")
    for group in (4, 8, 1):
        yield target("decode", f"decode over 4k, GQA {group}", "sdpa", 0.95, "1.0")
        for total in ("32k", "128k"):
            case = f"decode over {total}, GQA {group}"
            yield target("decode", case, "sdpa", 0.95, "1.0")
            yield target("decode", case, "copy", 0.7, "0.8-1.0")
    for total, dim in (("4k", 64), ("16k", 64), ("4k", 96), ("16k", 96), ("4k", 128), ("16k", 128), ("32k", 128)):
        yield target("prompts", f"square of {total}, GQA 4, D {dim}", "sdpa flash", 1.0, "1.4-2.0")
    for group in (4, 8, 1):
        for total in ("32k", "128k"):
            for queries in (16, 128):
                case = f"suffix of {queries} over {total}, GQA {group}"
                yield target("prompts", case, "masked sdpa", 2.0, "3.9 or more")
    for total in ("4k", "16k"):
        yield target("prompts", f"sparse 15% of {total}", "full prefill", 4.0, "2.8" if total == "4k" else "4.0")


AWQ_LAYER = "32B"
AWQ_COPY_RATE = 0.65  # least share of it, for one row and all matrices of a layer
AWQ_SPEED = {4: (1.8, "2.0-2.6"), 16: (1.8, "2.0-2.6"), 64: (1.0, "1.2"), 256: (0.5, "0.5"), 1024: (0.75, "0.75")}


def _awq() -> Iterator[Target]:
    def layer(result: Result, rows: int, model: str = AWQ_LAYER) -> Result:
        return row_of(result["layers"], model=model, rows=rows)

    def one(result: Result, model: str) -> Found:
        row = layer(result, 1, model)
        rate = row["bytes"] / row["awq"] / 1e6
        return rate / result["rates"]["copy"], f"{row['dense'] / row['awq']:.2f}x fp16"

    def speed(result: Result, rows: int) -> float:
        row = layer(result, rows)
        return float(row["dense"] / row["awq"])

    def host(result: Result) -> Found:
        row = row_of(sorted(result["cases"], key=lambda row: -row["in"] * row["out"]), rows=1)
        return round(row["host_us"], 1), f"nn.Linear {row['host_us_dense']:.1f}"

    def dequantizing(result: Result) -> Found:
        row = layer(result, 1)
        return (row["dequantize_bytes"] / row["dequantize"] / 1e6) / result["rates"][
            "copy"
        ], f"{row['dequantize']:.3f} ms"

    def slowest(result: Result) -> Found:
        """The worst of all numbers of rows and shapes against the one that we could have taken instead."""
        rows = [row for row in result["cases"] if 1 < row["rows"] <= 64 and row["in"] * row["out"] > 2**24]
        return worst(((f"{r['in']} x {r['out']}, {r['rows']} rows", r["dense"] / r["awq"]) for r in rows), min)

    find: Callable[[Result], Found]
    for model, step in ((AWQ_LAYER, "awq"), ("70B", "awq-70B")):
        find = partial(one, model=model)
        case = f"AWQ, layer of {model}, one row"
        yield Target(step=step, case=case, base="the copy rate", find=find, least=AWQ_COPY_RATE, est="0.65-0.78")
    for rows, (least, est) in AWQ_SPEED.items():
        case = f"AWQ, layer of {AWQ_LAYER}, {rows} rows: speed"
        yield Target(step="awq", case=case, base="fp16", find=partial(speed, rows=rows), least=least, est=est)
    yield Target(step="awq", case="AWQ, each large matrix, 4 to 64 rows: speed", base="fp16", find=slowest, least=1.0)
    yield Target(step="awq", case="AWQ, dequantizing", base="the copy rate", find=dequantizing, least=0.7, est="0.9")
    yield Target(step="awq", case="AWQ, us of the host for a product", find=host, most=20, est="15")
    find = partial(speed, rows=4096)
    case = f"AWQ, layer of {AWQ_LAYER}, 4096 rows: speed"
    yield Target(step="awq-70B", case=case, base="fp16", find=find, least=0.9, est="0.92")


# Most time of a way over another one.
COLD, SETTLED = 1.05, 1.15
FIRST_TOKEN = {  # by length of the prompt, and attention, what is expected
    ("live", "floor", 1.1): {("short", "sdpa"): "1.13-1.25", ("short", "kvboost_fa2"): "1.2", ("long", "sdpa"): "1.2"},
    ("stored", "floor", 1.4): {("short", "sdpa"): "1.3", ("short", "kvboost_fa2"): "1.5", ("long", "sdpa"): "1.6"},
    ("cold", "plain", COLD): {},
}
NEXT_TOKEN = {
    ("max_cache_len", "DynamicCache, again", SETTLED): {"sdpa": "0.5", "kvboost_fa2": "0.3"},
    ("live", "DynamicCache", SETTLED): {},
    ("stored", "DynamicCache", SETTLED): {},
}


def _large() -> Iterator[Target]:
    def row(result: Result, kind: str, length: str, attention: str) -> Result:
        return row_of(result[kind], attention=attention, tokens=result["prompts"][0 if length == "short" else -1])

    def ratio(result: Result, way: str, base: str, **which: str) -> Found:
        found = row(result, **which)
        return found[way] / found[base], f"{found[way]:.1f} ms"

    def skips(result: Result, name: str = "graph_skips", **which: str) -> float:
        count: float = row(result, **which)[name]
        return count

    def against_sdpa(result: Result, length: str) -> Found:
        ours, stock = (row(result, "next", length, attention) for attention in ("kvboost_fa2", "sdpa"))
        return ours["DynamicCache"] / stock["DynamicCache"], f"{ours['DynamicCache']:.1f} ms"

    def counted(result: Result, kind: str, attention: str, way: str) -> Found:
        found = row(result, "launches", "short", attention)
        return found[way][kind] / found["DynamicCache"][kind], f"{found[way][kind]:g} a token"

    find: Callable[[Result], Found]
    for length, attention, step in (
        ("short", "sdpa", "first-sdpa"),
        ("short", "kvboost_fa2", "first-kvboost"),
        ("long", "sdpa", "large"),
        ("long", "kvboost_fa2", "large"),
    ):
        for (way, base, most), est in FIRST_TOKEN.items():
            find = partial(ratio, way=way, base=base, kind="first", length=length, attention=attention)
            case = f"first token, {attention}, {length} prompt: {way}"
            likely = est.get((length, attention), "")
            yield Target(step=step, case=case, base=base, find=find, most=most, est=likely)
    which: dict[str, Any] = {"kind": "first", "length": "short", "attention": "sdpa"}
    find = partial(ratio, way="live, in a graph", base="floor, again", **which)
    case, step = "first token, sdpa, short prompt: live, in a graph", "first-graph"
    yield Target(step=step, case=case, base="floor", find=find, most=0.7, est="0.4-0.6")
    find = partial(skips, name="suffix_skips", **which)
    yield Target(step=step, case="skipped graphs, ends of prompts", find=find, most=0, est="0")
    for length, attention, step in (
        ("short", "sdpa", "next-sdpa"),
        ("short", "kvboost_fa2", "next-kvboost"),
        ("long", "sdpa", "large"),
        ("long", "kvboost_fa2", "large"),
    ):
        for (way, base, most), expected in NEXT_TOKEN.items():
            find = partial(ratio, way=way, base=base, kind="next", length=length, attention=attention)
            case, likely = f"next token, {attention}, {length} prompt: {way}", expected.get(attention, "")
            told, likely = base.partition(",")[0], likely if length == "short" else ""
            yield Target(step=step, case=case, base=told, find=find, most=most, est=likely)
        find = partial(skips, kind="next", length=length, attention=attention)
        yield Target(step=step, case=f"skipped graphs, {attention}, {length} prompt", find=find, most=0, est="0")
    for length, step in (("short", "next-kvboost"), ("long", "large")):
        case, find = f"next token, kvboost_fa2, {length} prompt, DynamicCache", partial(against_sdpa, length=length)
        likely = "1.04-1.3" if length == "short" else ""
        yield Target(step=step, case=case, base="sdpa", find=find, most=1.1, est=likely)
    for length in ("short", "long"):
        which = {"kind": "next", "length": length}
        find = partial(ratio, way="max_cache_len", base="static cache", attention="sdpa", **which)
        case = f"next token, sdpa, {length} prompt: max_cache_len"
        yield Target(step="large", case=case, base="static cache", find=find, most=SETTLED)
        find = partial(ratio, way="pieces, 2 rows", base="DynamicCache, 2 rows", attention="kvboost_fa2", **which)
        case = f"next token, {length} prompt: pieces, 2 rows"
        yield Target(step="large", case=case, base="DynamicCache, 2 rows", find=find, most=SETTLED)
    for attention, way, step in (
        ("sdpa", "live", "profile"),
        ("sdpa", "stored", "large"),
        ("kvboost_fa2", "stored", "large"),
    ):
        find = partial(counted, kind="launches", attention=attention, way=way)
        case = f"launches of a token, {attention}: {way}"
        yield Target(step=step, case=case, base="DynamicCache", find=find, most=1.05, est="1.0")


def _streaming() -> Iterator[Target]:
    def share(result: Result) -> Found:
        return result["of the ceiling"], f"{result['ours']['tokens_per_s']:.1f} tokens/s"

    def memory(result: Result) -> Found:
        number, unit = result["budget"][:-2], result["budget"][-2:]
        budget, found = float(number) * {"GB": 1e9, "MB": 1e6}[unit], result["ours"]["peak_bytes"]
        return found / budget, f"{found / 1e9:.2f} GB"

    def pieces(result: Result) -> float:
        speed: float = result["pieces against whole layers"]
        return speed

    def copied(result: Result) -> Found:
        """The rate of the copies themselves, against that of a copy alone."""
        found = result["ours"]
        return found["copy_rate"] / found["link"], f"{found['copy_rate'] / 1e9:.1f} GB/s"

    def peer(result: Result) -> Found:
        return result["against cpu_offload"], f"{result['cpu_offload']['tokens_per_s']:.2f} tokens/s there"

    def misses(result: Result) -> float:
        count: float = result["ours"]["misses"]
        return count

    step = "streaming"
    yield Target(step=step, case="streamed decoding", base="the link", find=share, least=0.9, est="0.93")
    yield Target(step=step, case="streaming, memory", base="the budget", find=memory, most=1.0, est="1.0")
    yield Target(
        step=step, case="streaming, copies while computing", base="the link", find=copied, least=0.9, est="0.94"
    )
    yield Target(step=step, case="streaming, layers not there in time", find=misses, most=0, est="0")
    yield Target(step=step, case="streaming, 32 MB pieces: speed", base="whole layers", find=pieces, least=0.97)
    yield Target(
        step="streaming-peer", case="streamed decoding: speed", base="cpu_offload", find=peer, least=5.0, est="20"
    )


HOST_TIME, HOST_STEP = {"live": 1.1, "stored": 1.4}, 1.15  # at most, times a stock cache
US_PER_CHUNK_AND_LAYER = 3.0


def _host_time() -> Iterator[Target]:
    def first(result: Result, attention: str, way: str) -> float:
        ms = row_of(result["first"], attention=attention)["ms"]
        return float(ms[way] / ms["stock"])

    def chunks(result: Result, attention: str) -> float:
        us: float = row_of(result["first"], attention=attention)["us_per_chunk_and_layer"]
        return us

    def following(result: Result, attention: str, way: str) -> float:
        ours, stock = (row_of(result["next"], attention=name)["ms"] for name in (attention, "sdpa"))
        return float(ours[way] / stock["stock"])

    step = "host-time"
    for attention in ("sdpa", "kvboost_fa2"):
        for way, most in HOST_TIME.items():
            case, find = f"host, first token, {attention}: {way}", partial(first, attention=attention, way=way)
            yield Target(step=step, case=case, base="stock generate()", find=find, most=most)
        case, find = f"host, {attention}: us for each chunk and layer", partial(chunks, attention=attention)
        yield Target(step=step, case=case, find=find, most=US_PER_CHUNK_AND_LAYER)
    for attention in ("sdpa", "kvboost_fa2"):
        for way in HOST_TIME:
            case, find = f"host, next token, {attention}: {way}", partial(following, attention=attention, way=way)
            yield Target(step=step, case=case, base="DynamicCache with sdpa", find=find, most=HOST_STEP)


OF_BOUND = 0.95  # of the speed-up that drafts of their length and acceptance could have


def _others() -> Iterator[tuple[str, Target]]:
    """One target for each of the other benchmarks: what is worst of all that it has measured, by file."""

    def moved(result: Result) -> Found:
        found = (
            (f"{way}, {case['prompt_tokens']} tokens", row["plain"] / row["ms"])
            for case in result["by_case"].values()
            for way, row in case["ways"].items()
            if way != "exact"
        )
        return worst(found, min)

    def tier(result: Result) -> Found:
        rows = ((f"{r['name']}, {r['codec']}, {r['tokens']}", r["tier"] / r["plain"]) for r in result["rows"])
        return worst(rows, max)

    def riding(result: Result) -> Found:
        rows = {case["prompt_tokens"]: case["ways"]["riding"] for case in result["by_case"].values()}
        return worst(((f"{n} tokens", row["answer_ms"] / row["plain_answer"]) for n, row in rows.items()), max)

    def kind(result: Result) -> Found:
        return worst(((f"{r['layers']}, {r['tokens']}", r["plain"] / r["store"]) for r in result["kinds"]), min)

    def drafts(result: Result, figure: str) -> Found:
        arms = result["link"]["arms"].items()
        return worst(((name, row[figure]) for name, row in arms if name.startswith("adaptive")), min)

    def shared(result: Result) -> Found:
        rows = [row for row in result["rows"] if "batching_ms" in row]
        return worst(((f"{r['attention']}, {r['tokens']}", r["together_ms"] / r["batching_ms"]) for r in rows), max)

    def best_of_stock(result: Result) -> Found:
        rows = {(row["workload"], row["arm"]): row["ttft_ms"][1] for row in result["summaries"]}
        found = []
        for (workload, arm), ms in rows.items():
            others = {name: time for (where, name), time in rows.items() if where == workload and name[:3] == "hf-"}
            if arm == "exact" and others:
                best = min(others, key=lambda name: others[name])
                found.append((f"{workload}, {best}", ms / others[best]))
        return worst(found, max)

    yield (
        "repair-ttft",
        Target(step="repair", case="moved chunks, every way: speed", base="plain", find=moved, least=1.0),
    )
    yield (
        "repair-ttft",
        Target(step="riding", case="shuffled documents, 24 tokens", base="plain", find=riding, most=0.5),
    )
    yield "tiers", Target(step="tiers", case="first token from a tier", base="computing", find=tier, most=COLD)
    yield (
        "speculation-link",
        Target(
            step="speculation", case="drafts: speed", base="plain", find=partial(drafts, figure="speed_up"), least=1.0
        ),
    )
    yield (
        "speculation-link",
        Target(
            step="speculation",
            case="drafts",
            base="the bound",
            find=partial(drafts, figure="of_bound"),
            least=OF_BOUND,
        ),
    )
    yield (
        "server-shared",
        Target(step="server_shared", case="8 that begin alike", base="continuous batching", find=shared, most=1.0),
    )
    yield "kinds", Target(step="kinds", case="all kinds of layers: speed", base="plain", find=kind, least=1.0)
    for workload in ("chat", "rag"):
        step, case = f"bench-{workload}", f"bench, {workload}"
        yield step, Target(step=step, case=case, base="the best of stock", find=best_of_stock, most=1.05)


TARGETS: dict[str, list[Target]] = {
    "link": list(_link()),
    "attention": list(_attention()),
    "awq": list(_awq()),
    "large": list(_large()),
    "streaming": list(_streaming()),
    "host_time": list(_host_time()),
}
for _file, _target in _others():
    TARGETS.setdefault(_file, []).append(_target)
