"""What is aimed at on a GPU, and whether the result of a benchmark reaches it.

A target is a bound on a figure: a ratio to another way that was measured in the same run, or a count. `verdicts` reads
them from the JSON of a benchmark, so that whoever has the file, whole or cut short, has the targets.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Result = dict[str, Any]


class Verdict(NamedTuple):
    """A target with what was found.

    Example:
        >>> print(Verdict("decode over 32k", "copy", 0.88, least=0.7))
        PASS decode over 32k >= 0.70 of copy: 0.88
    """

    case: str
    base: str  # what the figure is relative to; empty for counts
    found: float
    least: float | None = None
    most: float | None = None

    @property
    def reached(self) -> bool:
        """Whether the figure is within the bound."""
        return (self.least is None or self.found >= self.least) and (self.most is None or self.found <= self.most)

    @property
    def bound(self) -> str:
        """The bound in characters."""
        sign, limit = (">=", self.least) if self.least is not None else ("<=", self.most)
        return f"{sign} {limit:.2f}" if self.base else f"{sign} {limit:g}"

    def __str__(self) -> str:
        found = f" of {self.base}: {self.found:.2f}" if self.base else f": {self.found:g}"
        return f"{'PASS' if self.reached else 'MISS'} {self.case} {self.bound}{found}"


# Least speed of `kvboost_fa2` over another way, by the words that the name of a case and of its way begin with.
ATTENTION = {
    ("square", "sdpa flash"): 1.0,
    ("suffix of 16 over 32k", "masked sdpa"): 2.0,
    ("suffix of 16 over 128k", "masked sdpa"): 2.0,
    ("suffix of 128 over 32k", "masked sdpa"): 2.0,
    ("suffix of 128 over 128k", "masked sdpa"): 2.0,
    ("decode over 4k", "sdpa"): 0.95,  # a copy of so few bytes is sooner than any two launches
    ("decode over 32k", "copy"): 0.7,
    ("decode over 128k", "copy"): 0.7,
    ("int8", "bfloat16"): 1.5,
    ("int4", "bfloat16"): 2.2,
    ("sparse 15%", "full prefill"): 4.0,
    ("table of 2k", "contiguous"): 0.9,
}
AWQ_COPY_RATE = 0.6  # least share of it, for one row
STREAMING = {"of the ceiling": 0.9, "against cpu_offload": 5.0}  # at least
# Most time of a way over another one.
COLD = 1.05
FIRST_TOKEN = (("cold", "plain", COLD), ("live", "floor", 1.1), ("stored", "floor", 1.4))
SETTLED = 1.15
NEXT_TOKEN = (
    *((way, "DynamicCache", SETTLED) for way in ("live", "stored", "max_cache_len")),
    ("max_cache_len", "static cache", SETTLED),
    ("pieces, 2 rows", "DynamicCache, 2 rows", SETTLED),
)
HOST_TIME, HOST_STEP = {"live": 1.1, "stored": 1.4}, 1.15  # at most, times a stock cache
US_PER_CHUNK_AND_LAYER = 3.0
OF_BOUND = 0.95  # of the speed-up that drafts of their length and acceptance could have


def verdicts(name: str, result: Result) -> list[Verdict]:
    """The targets of a benchmark with what it has found so far.

    Args:
        name: Of its files, with or without the device: `"attention-cuda"`.
        result: Of its JSON.
    """
    found = next((read for base, read in READERS.items() if name == base or name.startswith(f"{base}-c")), None)
    return list(found(result)) if found is not None else []


def attention(result: Result) -> Iterator[Verdict]:
    """Those of one operator."""
    for row in result["cases"]:
        yield from attention_case(row)


def attention_case(row: Result) -> Iterator[Verdict]:
    """Those of one case."""
    for (case, way), least in ATTENTION.items():
        if row["name"].startswith(case) and way in row["ratios"]:
            yield Verdict(row["name"], way, row["ratios"][way], least=least)


def awq(result: Result) -> Iterator[Verdict]:
    """One row, by one matrix and by all of a layer."""
    for row in (*result["cases"], *result["layers"]):
        if row["rows"] == 1:
            rate = row["bytes"] / row["awq"] / 1e6
            name = f"layer of {row['model']}" if "model" in row else f"{row['in']} x {row['out']}"
            yield Verdict(f"AWQ {name}, one row", "copy rate", rate / result["rates"]["copy"], least=AWQ_COPY_RATE)


def streaming(result: Result) -> Iterator[Verdict]:
    """Decoding, and what it takes of the device."""
    for (name, least), base in zip(STREAMING.items(), ("the link", "cpu_offload"), strict=True):
        if name in result:
            yield Verdict("streamed decoding", base, result[name], least=least)
    if "ours" in result:
        budget = float(result["budget"].removesuffix("GB")) * 1e9
        yield Verdict("streaming, memory", "budget", result["ours"]["peak_bytes"] / budget, most=1.0)


def large(result: Result) -> Iterator[Verdict]:
    """Tokens of a large model, and whether CUDA graphs were used."""
    for name, ways in (("first", FIRST_TOKEN), ("next", NEXT_TOKEN)):
        for row in result[name]:
            for way, base, most in ways:
                if way in row and base in row:
                    case = f"{name} token, {row['attention']}, {row['tokens']} held: {way}"
                    yield Verdict(case, base, row[way] / row[base], most=most)
            if "graph_skips" in row:
                yield Verdict(f"graph skips, {row['attention']}, {row['tokens']} held", "", row["graph_skips"], most=0)
    stock = {row["tokens"]: row["DynamicCache"] for row in result["next"] if row["attention"] == "sdpa"}
    for row in result["next"]:
        if row["attention"] != "sdpa" and row["tokens"] in stock:
            case = f"next token, {row['attention']}, {row['tokens']} held"
            yield Verdict(case, "sdpa", row["DynamicCache"] / stock[row["tokens"]], most=SETTLED)


def host_time(result: Result) -> Iterator[Verdict]:
    """What the host does, where arithmetic takes no time."""
    stock = next(row["ms"]["stock"] for row in result["next"] if row["attention"] == "sdpa")
    for row in result["first"]:
        for way, most in HOST_TIME.items():
            case = f"host, first token, {row['attention']}: {way}"
            yield Verdict(case, "stock generate()", row["ms"][way] / row["ms"]["stock"], most=most)
        case = f"host, {row['attention']}: us for each chunk and layer"
        yield Verdict(case, "", row["us_per_chunk_and_layer"], most=US_PER_CHUNK_AND_LAYER)
    for row in result["next"]:
        for way in HOST_TIME:
            case = f"host, next token, {row['attention']}: {way}"
            yield Verdict(case, "DynamicCache with sdpa", row["ms"][way] / stock, most=HOST_STEP)


def repair(result: Result) -> Iterator[Verdict]:
    """Moved chunks pay at all."""
    for found in result["by_case"].values():
        for way, row in found["ways"].items():
            if way != "exact":
                case = f"moved, {way}, {found['prompt_tokens']} tokens: speed"
                yield Verdict(case, "plain", row["plain"] / row["ms"], least=1.0)


def tiers(result: Result) -> Iterator[Verdict]:
    """A tier from which it does not pay to read costs little."""
    for row in result["rows"]:
        case = f"{row['name']}, {row['codec']}, {row['tokens']} tokens"
        yield Verdict(case, "computing", row["tier"] / row["plain"], most=COLD)


def kinds(result: Result) -> Iterator[Verdict]:
    """Reuse pays at all."""
    for row in result["kinds"]:
        case = f"{row['layers']}, {row['tokens']} tokens: speed"
        yield Verdict(case, "plain", row["plain"] / row["store"], least=1.0)


def speculation(result: Result) -> Iterator[Verdict]:
    """Drafts of the adaptive length."""
    for name, row in result["link"]["arms"].items():
        if name.startswith("adaptive"):
            yield Verdict(f"drafts, {name}: speed", "plain", row["speed_up"], least=1.0)
            yield Verdict(f"drafts, {name}", "bound", row["of_bound"], least=OF_BOUND)


def server_shared(result: Result) -> Iterator[Verdict]:
    """Requests that begin alike, against transformers' continuous batching."""
    for row in result["rows"]:
        if "batching_ms" in row:
            case = f"{row['tokens']} tokens shared by {row['together']}, {row['attention']}"
            yield Verdict(case, "continuous batching", row["together_ms"] / row["batching_ms"], most=1.0)


def bench(result: Result) -> Iterator[Verdict]:
    """Exact reuse against the best of transformers' ways that ran."""
    rows = {(row["workload"], row["arm"]): row for row in result["summaries"]}
    for (workload, arm), row in rows.items():
        others = [row for (where, name), row in rows.items() if where == workload and name.startswith("hf-")]
        if arm == "exact" and others:
            best = min(others, key=lambda other: other["ttft_ms"][1])
            yield Verdict(f"bench, {workload}", best["arm"], row["ttft_ms"][1] / best["ttft_ms"][1], most=1.05)


READERS: dict[str, Callable[[Result], Iterator[Verdict]]] = {
    "attention": attention,
    "awq": awq,
    "bench": bench,
    "host_time": host_time,
    "kinds": kinds,
    "large": large,
    "repair-ttft": repair,
    "server-shared": server_shared,
    "speculation-link": speculation,
    "streaming": streaming,
    "tiers": tiers,
}
