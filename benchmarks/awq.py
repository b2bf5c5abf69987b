"""Products with AWQ weights on a GPU, of the shapes of models of 32 and 70 billion parameters.

    python benchmarks/awq.py --device cuda --out benchmarks/results [--models 32B] [--rows 1 4 16] [--tilings] \
        [--dtype bfloat16]

One row is bound by reading the weights: the rate is that of their bytes, beside what a large copy on the device reads
and writes, and beside a copy from pinned host memory, which is how streamed layers come. All are measured in this run.
Dense is PyTorch's linear layer with weights of 16 bits. Times are medians of device time (see clock.py) of one call
for each of several weights, which are larger than the second-level cache in all.

AWQ is `awq_matmul`, which chooses its kernel by the number of rows. Several rows are measured with weights that become
numbers in memory for PyTorch's product, too, which AWQ takes for many rows; and so is what dequantizing alone takes.
One row, which has a kernel of its own, is measured with that for up to 16 rows, too: it takes fewer instructions.
What a call of one row takes the host, and one of PyTorch's linear layer, is told: where a model is not compiled, the
GPU waits for it.

`--tilings` tries other tilings than the planned one, too, and names the fastest. `--shape tiny` has matrices an eighth
as wide, on whatever device.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import clock
import torch
import torch.nn.functional as F
from record import Record, add_options, add_shape
from reuse import measured_on, provenance
from targets import AWQ_COPY_RATE, Result

from kvboost_hf.config import QuantKernel
from kvboost_hf.offload.awq import layout
from kvboost_hf.offload.awq.matmul import awq_matmul

Way = Callable[..., object]  # of the tensors of `Drawn`
Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # codes, zeros, scales, and the weight as it is

GROUP = 128
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
# Layers of each model: in_features and out_features, and how many of them a layer has.
LAYERS = {
    "32B": {(5120, 5120): 2, (5120, 1024): 2, (5120, 27648): 2, (27648, 5120): 1},
    "70B": {(8192, 8192): 2, (8192, 1024): 2, (8192, 28672): 2, (28672, 8192): 1},
}
TINY = 8  # times as wide are the matrices otherwise
HOST_CALLS = 200
COPY_BYTES, LINK_BYTES = 1 << 30, 1 << 28  # of the copies that rates are of


def rates(options: argparse.Namespace) -> dict[str, float]:
    """GB/s of a copy on the device, which reads and writes, and of one from pinned host memory."""
    part = TINY**2 if options.shape == "tiny" else 1
    host = torch.ones(LINK_BYTES // part, dtype=torch.uint8, pin_memory=options.device == "cuda")
    copy = clock.copy_rate(COPY_BYTES // part, options.rounds, options.device)
    return {"copy": copy, "link": clock.link_rate(host, options.rounds, options.device)}


def draw(in_features: int, out_features: int, dtype: torch.dtype, device: str) -> Drawn:
    """qweight, qzeros, scales, and dense weights, which are others: their numbers take no time."""
    groups, words = in_features // GROUP, out_features // 8
    qweight, qzeros = (
        torch.randint(-(2**31), 2**31, (size, words), dtype=torch.int32, device=device)
        for size in (in_features, groups)
    )
    scales = torch.rand(groups, out_features, dtype=torch.float16, device=device) / 100
    return qweight, qzeros, scales, torch.randn(out_features, in_features, dtype=dtype, device=device)


def measure(in_features: int, out_features: int, options: argparse.Namespace) -> Iterator[Result]:
    """A product of each number of rows; the matrices are smaller where a tiny shape is asked for."""
    device, part = options.device, TINY if options.shape == "tiny" else 1
    inner, outer = in_features // part, out_features // part
    dtype = getattr(torch, options.dtype)
    first = draw(inner, outer, dtype, device)
    nbytes = sum(each.nbytes for each in first[:3])
    weights = [first, *(draw(inner, outer, dtype, device) for _ in range(clock.inputs_for(nbytes, device) - 1))]
    kernel: QuantKernel = "triton" if device == "cuda" else "torch"

    def ms(way: Way) -> float:
        calls = [partial(way, *each) for each in weights]
        for call in calls:
            call()
        return clock.device_ms(calls, options.rounds, device)

    for rows in options.rows:
        x = torch.randn(rows, inner, dtype=dtype, device=device)
        found = {"in": in_features, "out": out_features, "rows": rows, "bytes": nbytes}
        found["awq"] = ms(lambda *w, x=x: awq_matmul(x, w[0], w[1], w[2], kernel))
        found["dense"] = ms(lambda *w, x=x: F.linear(x, w[3]))
        if rows > 1 and device == "cuda":
            from kvboost_hf.offload.awq.triton_launch import awq_matmul_dense

            found["memory"] = ms(lambda *w, x=x: awq_matmul_dense(x, *w[:3]))
        if rows == 1 and device == "cuda":
            from kvboost_hf.offload.awq.triton_launch import awq_matmul_triton

            tiling = planned(x, outer)
            found["registers"] = ms(lambda *w, x=x, tiling=tiling: awq_matmul_triton(x, w[0], w[1], w[2], tiling))
        if rows == 1:
            found["dequantize"] = ms(lambda *w: dequantized(w[0], w[1], w[2], device))
            found["dequantize_bytes"] = nbytes + 2 * inner * outer
            calls = HOST_CALLS if part == 1 else 1
            found["host_us"] = clock.host_us(partial(awq_matmul, x, *first[:3], kernel), device, calls)
            found["host_us_dense"] = clock.host_us(partial(F.linear, x, first[3]), device, calls)
        yield {**found, "fastest": fastest(x, weights, options.rounds) if options.tilings else None}


def dequantized(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, device: str) -> torch.Tensor:
    """The numbers of a weight, as many rows are multiplied with them; all columns at once."""
    (in_features, _), (groups, out_features) = qweight.shape, scales.shape
    if device != "cuda":
        return layout.dequantize(qweight, qzeros, scales)
    from kvboost_hf.offload.awq.triton_launch import plan_dequantizing

    weight = scales.new_empty(in_features * out_features)
    plan = plan_dequantizing(in_features, groups, out_features, out_features, scales.dtype, scales.device)
    plan(scales.device, (qweight, qzeros, scales, weight), 0)
    return weight


def planned(x: torch.Tensor, out_features: int) -> Any:
    """The tiling of a product in registers by the kernel for several rows, also where another way is taken."""
    from kvboost_hf.offload.awq.tiling import plan_tiling
    from kvboost_hf.offload.awq.triton_launch import traits_of

    device = torch.cuda.get_device_properties(0)
    traits = traits_of(device.major, device.multi_processor_count)
    rows, in_features = x.shape
    shape = max(rows, 2), in_features, out_features, GROUP
    return plan_tiling(*shape, processors=traits.processors, tile_rows=traits.tile_rows)


def fastest(x: torch.Tensor, weights: list[Drawn], rounds: int) -> Result | None:
    """The best of some tilings; those that a GPU has no room for are left out."""
    from triton import OutOfResources

    from kvboost_hf.offload.awq.tiling import ProductTiling
    from kvboost_hf.offload.awq.triton_launch import awq_matmul_triton

    first = planned(x, weights[0][2].shape[1])
    if len(x) == 1:
        blocks = [(1, block_n, block_k, 1, False) for block_n in (128, 256, 512) for block_k in (8, 16, 32)]
    else:
        blocks = list(product((first.block_m,), (128, 256, 512), (32, 64), (2, 3, 4), (False, True)))
    found = []
    for (block_m, block_n, block_k, stages, scaled), warps, parts in product(
        blocks, (2, 4, 8), {1, 2, 4, 8, first.parts}
    ):
        tiling = ProductTiling(
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            warps=warps,
            stages=stages,
            parts=parts,
            scaled=scaled,
        )
        try:
            calls = [partial(awq_matmul_triton, x, *each[:3], tiling) for each in weights]
            for call in calls:
                call()
            ms = clock.device_ms(calls, rounds, "cuda")
        except OutOfResources:
            continue
        found.append({"ms": ms, **asdict(tiling)})
    return min(found, key=lambda each: each["ms"], default=None)


def layers(result: Result) -> Iterator[Result]:
    """All products of a decoder layer, as far as they were measured."""
    cases = {(each["in"], each["out"], each["rows"]): each for each in result["cases"]}
    measured = sorted({each["rows"] for each in result["cases"]})
    for (model, shapes), rows in product(LAYERS.items(), measured):
        if all((*shape, rows) in cases for shape in shapes):
            parts = [(cases[*shape, rows], count) for shape, count in shapes.items()]
            told = set.intersection(*(set(case) for case, _ in parts)) - {"in", "out", "rows", "fastest"}
            yield {"model": model, "rows": rows, **{key: sum(case[key] * n for case, n in parts) for key in told}}


def row_of(name: str, case: Result, result: Result) -> str:
    """A line of the table."""
    rate = case["bytes"] / case["awq"] / 1e6
    share, link = rate / result["rates"]["copy"], rate / result["rates"]["link"]
    judged = case["rows"] == 1 and "model" in case  # small matrices are bound by their launch
    aim = f" ({'reached' if share >= AWQ_COPY_RATE else 'missed'})" if judged else ""
    best = case.get("fastest")
    tried = f"{best['ms']:.4f}: {', '.join(f'{k} {v}' for k, v in best.items() if k != 'ms')}" if best else ""
    ways = [f"{case[way]:.4f}" if way in case else "" for way in ("registers", "memory", "dequantize")]
    hosts = [f"{case[each]:.0f}" if each in case else "" for each in ("host_us", "host_us_dense")]
    return (
        f"| {name} | {case['rows']} | {case['awq']:.4f} | {rate:.0f} | {share:.0%}{aim} | {link:.1f}x "
        f"| {case['dense']:.4f} | {case['dense'] / case['awq']:.2f}x | {' | '.join([*ways, *hosts])} | {tried} |"
    )


def markdown(result: Result) -> str:
    copy, link = (result["rates"].get(name, float("nan")) for name in ("copy", "link"))
    lines = [
        f"{result['dtype']}, groups of {GROUP}; {measured_on(result['provenance'])}",
        "",
        f"A copy on the device reads and writes {copy:.0f} GB/s; one from pinned host memory takes {link:.1f} GB/s. "
        f"For one row, {AWQ_COPY_RATE:.0%} of the former is aimed at. Times in ms, those of the host in µs; "
        "in memory is the way for many rows, and 16 rows the kernel for up to 16 of them.",
        "",
        "| in x out | rows | AWQ | weights, GB/s | of a copy | of the link | dense | dense / AWQ | 16 rows "
        "| in memory | dequantizing | host | host, dense | best tiling |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [row_of(f"{each['in']} x {each['out']}", each, result) for each in result["cases"]]
    lines += [row_of(f"layer of {each['model']}", each, result) for each in result["layers"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=7)
    add_shape(parser, "8b")
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=LAYERS, help="whose layers are measured")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of a product")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of rows and weights")
    parser.add_argument("--tilings", action="store_true", help="try other tilings, too; takes its time")
    options = parser.parse_args()
    if options.shape != "tiny" and (options.device != "cuda" or not torch.cuda.is_available()):
        print("Nothing is measured: these kernels are for GPUs; pass --device cuda where there is one.")
        return
    torch.manual_seed(0)
    result: Result = {
        "provenance": provenance(sys.argv[1:], "awq.py"),
        "dtype": options.dtype,
        "rates": {},
        "cases": [],
        "layers": [],
    }
    name = "awq" if options.dtype == "float16" else "awq-bfloat16"
    record = Record(f"{name}-{options.device}", options, result, markdown)

    def add(in_features: int, out_features: int) -> None:
        for found in measure(in_features, out_features, options):
            result["cases"].append(found)
            print(row_of(f"{in_features} x {out_features}", found, result), flush=True)
            result["layers"] = list(layers(result))

    record.measure("rates", lambda: result["rates"].update(rates(options)))
    for shape in (shape for model in options.models for shape in LAYERS[model]):
        record.measure(" x ".join(map(str, shape)), partial(add, *shape))
    record.show()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
