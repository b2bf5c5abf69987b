"""The attention of `kvboost_fa2` against PyTorch's own, operator by operator.

    python benchmarks/attention.py --out benchmarks/results [--device cuda] [--threads 2] [--only decode coded:int4]

Each case calls two or more ways to the same result in turn. A ratio is that of the medians of one run. Wall time is
from the call to the result. Device time (see clock.py) is that of one call for each of several inputs, which on a GPU
are larger than its L2 in all; decode is also timed as a CUDA graph of these calls. Each way has been called with each
input before these clocks start; what the first call with an input takes, except the first input of all, is said, too,
since prompts are of ever new lengths. A way or a case that fails is named, and the others go on.

On a GPU all is bfloat16: squares against PyTorch's flash and cuDNN kernels and FlexAttention; suffixes, trees and
sparse rows against `sdpa` as transformers calls it, with a mask and keys repeated for each head of a group, and
suffixes against PyTorch's bias for them, which needs neither; decode against `sdpa` without a mask, and as a share of
what a copy of as many bytes takes, except over 4k columns, where launches take longer than the bytes. A plain square
and one query without padding go to PyTorch's kernels: "own kernel" is that of padded rows.
On a CPU all is float32 against `sdpa` as transformers calls it, and codes against decoding all of them as a live cache
does. `--shape tiny` has the cases of a GPU with lengths 64 times shorter, on whatever device.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import count, cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

import clock
import torch
import torch.nn.functional as F
from record import Record, add_options, add_shape, reason
from reuse import measured_on, provenance
from targets import Result, verdicts
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvboost_hf.attention import active_tier, kernel_calls, ops
from kvboost_hf.attention.call import AttentionCall
from kvboost_hf.cache.codecs import Planes, Role, make_codec
from kvboost_hf.compat import LayerRotation
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.handles import CodePlanes, PieceTable
from kvboost_hf.visibility import Visibility

Inputs = tuple[Any, ...]
Way = Callable[..., object]

CLOCKS = ("first", "wall", "device", "graph")
WINDOW = 128  # tokens of a block of codes
WIDTHS = (2048, 128)  # tokens of a piece: as caches join chunks, and as chunks are
TINY = 64  # times as long are the lengths of the cases of a GPU
CODES = {
    "int8": KVQuantConfig(method="kivi", key_bits=8, value_bits=8),
    "int4": KVQuantConfig(method="kivi", key_bits=4, value_bits=4),
    **{f"turboquant {bits}": KVQuantConfig(key_bits=bits, value_bits=bits) for bits in (4, 3, 2)},
}


class Case:
    """Ways to one result.

    Args:
        name: What is computed.
        ways: By name, functions of the inputs; "kvboost_fa2" is what the others are compared with.
        make: Draws one set of inputs.
        device: Where.
        graph: Time a replayed CUDA graph of all calls, too.
        bytes_each: What a way reads of a set of inputs at least; by default all tensors of it.
    """

    def __init__(
        self,
        name: str,
        ways: dict[str, Way],
        make: Callable[[], Inputs],
        device: str,
        *,
        graph: bool = False,
        bytes_each: int = 0,
    ) -> None:
        self.name, self._ways, self._device, self._graph = name, ways, device, graph
        first = make()
        bytes_each = bytes_each or sum(each.nbytes for each in first if isinstance(each, torch.Tensor))
        self._inputs = [first, *(make() for _ in range(clock.inputs_for(bytes_each, device) - 1))]

    def measure(self, rounds: int) -> Result:
        """Milliseconds of each way, and the ratios to ours."""
        found: Result = {"name": self.name, **{each: {} for each in CLOCKS}, "failed": {}}
        works: dict[str, Iterator[Callable[[], object]]] = {}
        for name, way in self._ways.items():
            try:
                firsts = [clock.wall_ms(partial(way, *each), self._device) for each in self._inputs]
            except Exception as error:  # a kernel that this device or shape does not have: the others are measured
                found["failed"][name] = reason(error)
                continue
            found["first"][name] = statistics.median(firsts[1:])
            works[name] = cycle([partial(way, *each) for each in self._inputs])
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                times[name].append(clock.wall_ms(next(work), self._device))
        found["wall"] = {name: statistics.median(each) for name, each in times.items()}
        if self._device == "cuda":
            for name, work in works.items():
                calls = [next(work) for _ in self._inputs]
                found["device"][name] = clock.device_ms(calls, rounds, self._device)
                if self._graph:
                    try:
                        found["graph"][name] = clock.replayed_ms(calls, rounds, self._device)
                    except RuntimeError as error:
                        found["failed"][f"{name} in a graph"] = reason(error)
        shown = next((found[each] for each in reversed(CLOCKS) if "kvboost_fa2" in found[each]), {})  # type: ignore[var-annotated]
        ours = shown.get("kvboost_fa2")
        found["ratios"] = {name: each / ours for name, each in shown.items() if name != "kvboost_fa2"} if ours else {}
        return found


class Where(NamedTuple):
    """The device of a case, the dtype of its inputs, and how many times shorter than their names say its lengths are.

    Example:
        >>> Where("cpu", torch.float32, 64).length(32768)
        512
    """

    device: str
    dtype: torch.dtype
    part: int = 1

    def length(self, number: int) -> int:
        """Tokens in place of so many."""
        return number // self.part

    def heads(self, number: int) -> int:
        """Heads in place of so many."""
        return number if self.part == 1 else number // 4


def short(number: int) -> str:
    """4096 as 4k."""
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def draw(queries: int, total: int, heads: tuple[int, int], dim: int, where: Where) -> Callable[[], Inputs]:
    """Query, as models give it, key and value."""

    def make() -> Inputs:
        like: dict[str, Any] = {"device": where.device, "dtype": where.dtype}
        query = torch.randn(1, queries, heads[0], dim, **like).transpose(1, 2)
        return query, *(torch.randn(1, heads[1], total, dim, **like) for _ in range(2))

    return make


def ours(visibility: Visibility) -> Way:
    return lambda q, k, v: ops.attend(AttentionCall(q, q.shape[3] ** -0.5, visibility), k, v)


def stock(mask: torch.Tensor | None) -> Way:
    """`sdpa` as transformers calls it."""

    def way(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> object:
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True, training=False)
        return sdpa_attention_forward(module, query, key, value, mask, scaling=query.shape[3] ** -0.5)[0]  # type: ignore[arg-type]

    return way


def pinned(backend: SDPBackend) -> Way:
    """One kernel of PyTorch's, on a causal square."""

    def way(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> object:
        with sdpa_kernel(backend):
            grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    return way


def flex(queries: int, device: str) -> Way:
    compiled = torch.compile(flex_attention, dynamic=False)

    @cache
    def mask() -> object:
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, queries, queries, device=device)

    return lambda q, k, v: compiled(q, k, v, block_mask=mask(), enable_gqa=q.shape[1] != k.shape[1])  # type: ignore[arg-type]


def lower_right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> object:
    """PyTorch's flash kernel, told that the queries are the last columns."""
    bias, grouped = causal_lower_right(query.shape[2], key.shape[2]), query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=grouped)


def suffix(queries: int, total: int, heads: tuple[int, int], dim: int, where: Where) -> Case:
    name = f"suffix of {short(queries)} over {short(total)}, GQA {heads[0] // heads[1]}, D {dim}"
    total = where.length(total)
    queries = min(queries, total)
    mask = Visibility().dense(queries, total, torch.device(where.device))
    ways = {"kvboost_fa2": ours(Visibility()), "masked sdpa": stock(mask)}
    if where.device == "cuda":
        ways["sdpa, lower right"] = lower_right
    return Case(name, ways, draw(queries, total, heads, dim, where), where.device)


def tree(nodes: int, total: int, heads: tuple[int, int], dim: int, where: Where) -> Case:
    """Drafted tokens behind as many columns; each one's parent is any of those before it."""
    name = f"tree of {nodes} over {short(total)}, GQA {heads[0] // heads[1]}, D {dim}"
    device, total = where.device, where.length(total)
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[int(torch.randint(node, (1,)))]
    visibility = Visibility(tree=(seen.long() << torch.arange(nodes)).sum(dim=-1)[None].to(device))
    mask = visibility.dense(nodes, total + nodes, torch.device(device))
    ways = {"kvboost_fa2": ours(visibility), "masked sdpa": stock(mask)}
    return Case(name, ways, draw(nodes, total + nodes, heads, dim, where), device)


def sparse(total: int, heads: tuple[int, int], dim: int, where: Where) -> Case:
    """15% of the rows of a prompt, computed again: against a mask, and against attention of all rows."""
    name = f"sparse 15% of {short(total)}, GQA {heads[0] // heads[1]}, D {dim}"
    device, total = where.device, where.length(total)
    rows = torch.randperm(total, device=device)[: total * 15 // 100].sort().values
    visibility = Visibility(columns=rows[None].int())
    mask = visibility.dense(len(rows), total, torch.device(device))
    ways: dict[str, Way] = {
        "kvboost_fa2": lambda q, k, v: ours(visibility)(q[:, :, : len(rows)], k, v),
        "masked sdpa": lambda q, k, v: stock(mask)(q[:, :, : len(rows)], k, v),
        "full prefill": lambda q, k, v: stock(None)(q, k, v),
    }
    return Case(name, ways, draw(total, total, heads, dim, where), device)


def coded(name: str, queries: int, total: int, heads: tuple[int, int], dim: int, where: Where) -> Case:
    """Attention over codes: against ours over as many columns of the dtype, and against decoding them all first."""
    title = f"{name}, {queries} over {short(total)}, D {dim}"
    (device, dtype, _), total = where, where.length(total)
    codec, blocks = make_codec(CODES[name]), total // WINDOW
    turn = LayerRotation(1e6 ** -(torch.arange(dim // 2) / (dim // 2)), "half", 0)
    rotations: dict[Role, LayerRotation | None] = {"keys": turn, "values": None}
    lengths = torch.full((blocks,), WINDOW, dtype=torch.int32, device=device)
    held: dict[Role, Planes] = {}
    forms: dict[Role, CodePlanes] = {}
    for role, rotation in rotations.items():
        x = torch.randn(blocks, heads[1], WINDOW, dim, device=device, dtype=dtype)
        held[role] = codec.encode(x, role, [rotation] * blocks)
        found = codec.code_planes({name: each[None] for name, each in held[role].items()}, role, rotation, WINDOW, dim)
        assert found is not None
        forms[role] = found

    def make() -> Inputs:
        return *draw(queries, total, heads, dim, where)(), *map(copied, forms.values())

    def over_codes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *codes: CodePlanes) -> object:
        return ops.attend_codes(AttentionCall(q, dim**-0.5, Visibility()), *codes, lengths)  # type: ignore[arg-type, call-arg]

    def decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *codes: CodePlanes) -> object:
        shape = (blocks, heads[1], WINDOW, dim)
        columns = [
            codec.decode({name: getattr(own, name)[0] for name in held[role]}, shape, dtype, role, rotation)
            .transpose(0, 1)
            .flatten(1, 2)
            for (role, rotation), own in zip(rotations.items(), codes, strict=True)
        ]
        return ours(Visibility(causal=False))(q, *(each[None] for each in columns))

    ways: dict[str, Way] = {
        "kvboost_fa2": over_codes,
        str(dtype).removeprefix("torch."): lambda q, k, v, *codes: ours(Visibility(causal=False))(q, k, v),
        "decoded first": decoded,
    }
    size = sum(form.codes.nbytes for form in forms.values())
    return Case(title, ways, make, device, bytes_each=size)


def copied(codes: CodePlanes) -> CodePlanes:
    """The same elsewhere in memory."""
    planes = {name: getattr(codes, name) for name in ("codes", "least", "step", "scale", "mean")}
    return replace(codes, **{name: plane.clone() for name, plane in planes.items() if plane is not None})


def table(width: int, queries: int, total: int, heads: tuple[int, int], dim: int, where: Where) -> Case:
    """Pieces in any order in memory, against the same columns in order."""
    name = f"pieces of {width}, {queries} over {short(total)}, D {dim}"
    width, total = where.length(width), where.length(total)
    pieces = total // width

    def make() -> Inputs:
        query, key, value = draw(queries, total, heads, dim, where)()
        order = torch.randperm(pieces)
        rows = torch.stack([order, torch.arange(pieces) * width, torch.full((pieces,), -1)], dim=-1)
        parts = (tuple(each[0].split(width, dim=1)) for each in (key, value))
        return query, key, value, PieceTable(*parts, rows[None], total)  # type: ignore[arg-type, call-arg]

    scale, before, everything = dim**-0.5, Visibility(), Visibility(causal=False)
    ways: dict[str, Way] = {
        "kvboost_fa2": lambda q, k, v, pieces: ops.attend_pieces(
            AttentionCall(q, scale, before), pieces, total + queries
        ),
        "contiguous": lambda q, k, v, pieces: ops.attend(AttentionCall(q, scale, everything, partial=True), k, v),
    }
    return Case(name, ways, make, where.device)


def square(total: int, heads: tuple[int, int], dim: int, where: Where) -> Case:
    name = f"square of {short(total)}, GQA {heads[0] // heads[1]}, D {dim}"
    scale, device, total = dim**-0.5, where.device, where.length(total)
    ways: dict[str, Way] = {
        "kvboost_fa2": ours(Visibility()),
        "own kernel": lambda q, k, v: ops.attend(AttentionCall(q, scale, Visibility(), partial=True), k, v),
        "sdpa flash": pinned(SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": pinned(SDPBackend.CUDNN_ATTENTION),
    }
    if device == "cuda":
        ways["flex attention"] = flex(total, device)
    return Case(name, ways, draw(total, total, heads, dim, where), device)


def new_lengths(total: int, heads: tuple[int, int], dim: int, where: Where) -> Case:
    """Squares, each smaller than the one before it: what a kernel is prepared for is not there yet."""
    lengths = count(where.length(total), -24)
    ways = {"kvboost_fa2": ours(Visibility()), "sdpa flash": pinned(SDPBackend.FLASH_ATTENTION)}

    def make() -> Inputs:
        length = next(lengths)
        return draw(length, length, heads, dim, where)()

    return Case(f"new lengths below {short(total)}, GQA {heads[0] // heads[1]}, D {dim}", ways, make, where.device)


def decode(total: int, heads: tuple[int, int], dim: int, where: Where) -> Case:
    """One query; the copy, of the keys over the values, reads and writes as many bytes as there are of both."""
    scale = dim**-0.5
    ways: dict[str, Way] = {
        "kvboost_fa2": ours(Visibility()),
        "own kernel": lambda q, k, v: ops.attend(AttentionCall(q, scale, Visibility(), partial=True), k, v),
        "sdpa": stock(None),
        "copy": lambda q, k, v: v.copy_(k),
    }
    name = f"decode over {short(total)}, GQA {heads[0] // heads[1]}, D {dim}"
    make = draw(1, where.length(total), heads, dim, where)
    return Case(name, ways, make, where.device, graph=where.device == "cuda")


def cpu_cases() -> Iterator[partial[Case]]:
    on = (32, 8), 64, Where("cpu", torch.float32)
    for total in (2048, 8192):
        for queries in (8, 128, 512):
            yield partial(suffix, queries, total, *on)
    for total in (512, 8192):
        yield partial(decode, total, *on)
    yield partial(tree, 32, 4096, *on)
    yield partial(sparse, 4096, *on)
    for name in CODES:
        for queries in (1, 64):
            yield partial(coded, name, queries, 8192, *on)


def gpu_cases(where: Where) -> Iterator[partial[Case]]:
    """The cases of a GPU."""
    end, few, middle, long, longest = (128, where), 4096, 16384, 32768, 131072
    heads = where.heads(32)
    grouped = heads, where.heads(8)
    for total in (long, longest):
        for name in CODES:
            yield partial(coded, name, 1, total, grouped, *end)
        for width in WIDTHS:
            for queries in (1, 16, 128):
                yield partial(table, width, queries, total, grouped, *end)
    for kv_heads in (8, 4, 32):
        for total in (few, long, longest):
            yield partial(decode, total, (heads, where.heads(kv_heads)), *end)
    for kv_heads in (8, 4, 32):
        for total in (long, longest, few):
            for queries in (16, 128, 1024):
                yield partial(suffix, queries, total, (heads, where.heads(kv_heads)), *end)
    for dim in (128, 64, 96):
        for total in (few, middle):
            yield partial(square, total, grouped, dim, where)
    yield partial(square, long, grouped, *end)
    for total in (few, middle):
        yield partial(sparse, total, grouped, *end)
    for total in (few, long):
        yield partial(tree, 32, total, grouped, *end)
    for total in (few, long):
        yield partial(new_lengths, total, grouped, *end)


def chosen(case: partial[Case], wanted: str) -> bool:
    """Whether a case is of a kind that was asked for: `"table"`, or of certain ones: `"table:2048"`."""
    kind, _, firsts = wanted.partition(":")
    return case.func.__name__ == kind and (not firsts or str(case.args[0]) in firsts.split(","))


KINDS = tuple(kind.__name__ for kind in (square, new_lengths, suffix, decode, coded, table, tree, sparse))


def markdown(result: Result) -> str:
    lines = [
        f'{result["dtype"]}, batch of 1, 32 heads; tier "{result["tier"]}"; {measured_on(result["provenance"])}',
        "",
        "Times in ms: of first calls, then wall, then device, then in a CUDA graph, where these were taken. A ratio "
        "is how many times as long as `kvboost_fa2` a way takes, by the last of its times.",
        "",
        "| case | kvboost_fa2 | others | targets |",
        "| --- | ---: | --- | --- |",
    ]
    for row in result["cases"]:
        times = {
            way: " / ".join(f"{row[each][way]:.3g}" for each in CLOCKS if way in row[each]) for way in row["wall"]
        }
        others = [f"{way} {times[way]} ({ratio:.2f}x)" for way, ratio in row["ratios"].items()]
        others += [f"{way}: none" for way in row["failed"]]
        judged = verdicts("attention", {"cases": [row]}) if row["device"] else ()  # targets are for GPUs
        aims = [f"{aim.target.base} {aim.target.least}x: {'reached' if aim.reached else 'missed'}" for aim in judged]
        lines.append(
            f"| {row['name']} | {times.get('kvboost_fa2', 'none')} | {'; '.join(others)} | {'; '.join(aims)} |"
        )
    lines += ["", "Kernels called: " + ", ".join(f"{name} {calls}" for name, calls in result["calls"].items()) + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=7)
    parser.add_argument("--threads", type=int, default=2)
    add_shape(parser, "8b")
    parser.add_argument("--only", nargs="+", default=KINDS, help="kinds of cases, or some: coded:int8,int4")
    options = parser.parse_args()
    if unknown := {each.partition(":")[0] for each in options.only} - set(KINDS):
        parser.error(f"`--only` must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}.")
    torch.set_num_threads(1 if options.shape == "tiny" else options.threads)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    result: Result = {
        "provenance": provenance(sys.argv[1:], "attention.py"),
        "dtype": str(dtype).removeprefix("torch."),
        "tier": active_tier(options.device, dtype),
        "cases": [],
        "calls": {},
    }
    where = options.device if options.device != "cpu" else f"cpu-{options.threads}"
    record = Record(f"attention-{where}", options, result, markdown)

    def measure(make: partial[Case]) -> None:
        case = make()
        found = case.measure(options.rounds)
        ratios = ", ".join(f"{way} {ratio:.2f}x" for way, ratio in found["ratios"].items())
        print(f"{case.name}: {ratios}{''.join(f'; no {way}: {why}' for way, why in found['failed'].items())}")
        result["cases"].append(found)
        result["calls"] = dict(sorted(kernel_calls().items()))

    part = TINY if options.shape == "tiny" else 1
    of_gpu = gpu_cases(Where(options.device, dtype, part))
    for make in of_gpu if options.device == "cuda" or part > 1 else cpu_cases():
        if any(chosen(make, each) for each in options.only):
            record.measure(f"{make.func.__name__}{make.args[:-1]}", partial(measure, make))
    record.show()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
