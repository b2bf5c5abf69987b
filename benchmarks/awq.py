"""Products with AWQ weights on a GPU, of the shapes of models of 32 and 70 billion parameters.

    python benchmarks/awq.py --device cuda --out benchmarks/results [--only "5120 x 27648"] [--tilings] \
        [--dtype bfloat16]

One row is bound by reading the weights: the rate is that of their bytes, beside what a large copy on the device reads
and writes, and beside a copy from pinned host memory, which is how streamed layers come. All are measured in this run.
Dense is PyTorch's linear layer with weights of 16 bits. Times are medians of device time between two CUDA events
around one call for each of several weights, which are larger than the second-level cache in all; the first one waits
for the host to launch all of them. Each way has been called with each weight before, which compiles it.

Each number of rows is measured in two ways: with weights that become numbers in registers, and with ones that do so in
memory for PyTorch's product, of which the first half, without the product, is told, too. One row has a kernel of its
own; "in registers" is then the one for several rows, which takes fewer instructions and computes 15 rows for nothing.
AWQ takes registers up to `MOST_ROWS` in kvboost_hf/offload/awq/triton/tiling.py, and memory for more. What a call
takes the host, and one of PyTorch's linear layer, is told, too: where a model is not compiled, the GPU waits for it.

`--tilings` tries other tilings than the planned one, too, and names the fastest.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from record import Record, add_options
from reuse import measured_on, provenance
from targets import AWQ_COPY_RATE, Result

from kvboost_hf.offload.awq.matmul import awq_matmul

Call = Callable[[], object]
Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # codes, zeros, scales, and the weight as it is

GROUP = 128
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
# Layers of each model: in_features and out_features, and how many of them a layer has.
LAYERS = {
    "32B": {(5120, 5120): 2, (5120, 1024): 2, (5120, 27648): 2, (27648, 5120): 1},
    "70B": {(8192, 8192): 2, (8192, 1024): 2, (8192, 28672): 2, (28672, 8192): 1},
}
L2_BYTES = 128 << 20  # weights of a case take at least twice as much
MOST_WEIGHTS = 64
LAUNCH_CYCLES = 1 << 20  # of a GPU, about half a millisecond: in which the host launches one call


def device_ms(calls: Sequence[Call], rounds: int) -> float:
    """Milliseconds of a call on the device."""
    times = []
    for each in calls:
        each()
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(LAUNCH_CYCLES * len(calls))
        begin.record()
        for each in calls:
            each()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def host_us(call: Call, count: int = 200) -> float:
    """Microseconds of a call on the host, which does not wait for the device."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        times.append(1e6 * (time.perf_counter() - begin) / count)
    torch.cuda.synchronize()
    return min(times)


def rates(rounds: int) -> dict[str, float]:
    """GB/s of a copy on the device, which reads and writes, and of one from pinned host memory."""
    here, there = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    copy = device_ms([lambda: here.copy_(there)], rounds)
    link = device_ms([lambda: here[: 1 << 28].copy_(host, non_blocking=True)], rounds)
    return {"copy": 2 * here.nbytes / copy / 1e6, "link": host.nbytes / link / 1e6}


def draw(in_features: int, out_features: int, dtype: torch.dtype) -> Drawn:
    """qweight, qzeros, scales, and dense weights, which are others: their numbers take no time."""
    groups, words = in_features // GROUP, out_features // 8
    qweight, qzeros = (
        torch.randint(-(2**31), 2**31, (size, words), dtype=torch.int32, device="cuda")
        for size in (in_features, groups)
    )
    scales = torch.rand(groups, out_features, dtype=torch.float16, device="cuda") / 100
    return qweight, qzeros, scales, torch.randn(out_features, in_features, dtype=dtype, device="cuda")


def measure(in_features: int, out_features: int, dtype: torch.dtype, tilings: bool, rounds: int) -> Iterator[Result]:
    """A product of each number of rows."""
    from kvboost_hf.offload.awq.triton.launch import awq_matmul_dense, awq_matmul_triton

    first = draw(in_features, out_features, dtype)
    nbytes = sum(each.nbytes for each in first[:3])
    count = max(2, min(-(-2 * L2_BYTES // nbytes), MOST_WEIGHTS))
    weights = [first, *(draw(in_features, out_features, dtype) for _ in range(count - 1))]
    dequantize = device_ms([partial(dequantize_all, *each[:3], dtype) for each in weights], rounds)
    for rows in ROWS:
        x = torch.randn(rows, in_features, dtype=dtype, device="cuda")
        tiling = planned(x, out_features)
        ways = {
            "awq": [partial(awq_matmul, x, *each[:3], "triton") for each in weights],
            "dense": [partial(F.linear, x, each[3]) for each in weights],
            "registers": [partial(awq_matmul_triton, x, *each[:3], tiling) for each in weights],
            "memory": [partial(awq_matmul_dense, x, *each[:3]) for each in weights],
        }
        found = {"in": in_features, "out": out_features, "rows": rows, "bytes": nbytes, "dequantize": dequantize}
        found |= {name: device_ms(calls, rounds) for name, calls in ways.items()}
        found |= {"host_us": host_us(ways["awq"][0]), "host_us_dense": host_us(ways["dense"][0])}
        yield {**found, "fastest": fastest(x, weights, rounds) if tilings else None}


def dequantize_all(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
    """Dequantize to memory, without the product."""
    from kvboost_hf.offload.awq.triton.launch import dequantized

    for _ in dequantized(qweight, qzeros, scales, dtype):
        pass


def planned(x: torch.Tensor, out_features: int) -> Any:
    """The tiling of a product in registers by the kernel for several rows, also where another way is taken."""
    from kvboost_hf.offload.awq.triton.launch import traits_of
    from kvboost_hf.offload.awq.triton.tiling import plan_tiling

    device = torch.cuda.get_device_properties(0)
    traits = traits_of(device.major, device.multi_processor_count)
    rows, in_features = x.shape
    shape = max(rows, 2), in_features, out_features, GROUP
    return plan_tiling(*shape, processors=traits.processors, tile_rows=traits.tile_rows)


def fastest(x: torch.Tensor, weights: list[Drawn], rounds: int) -> Result | None:
    """The best of some tilings; those that a GPU has no room for are left out."""
    from triton import OutOfResources

    from kvboost_hf.offload.awq.triton.launch import awq_matmul_triton
    from kvboost_hf.offload.awq.triton.tiling import Tiling

    first = planned(x, weights[0][2].shape[1])
    if len(x) == 1:
        blocks = [(1, block_n, block_k, 1, False) for block_n in (128, 256, 512) for block_k in (8, 16, 32)]
    else:
        blocks = list(product((first.block_m,), (128, 256, 512), (32, 64), (2, 3, 4), (False, True)))
    found = []
    for (block_m, block_n, block_k, stages, scaled), warps, parts in product(
        blocks, (2, 4, 8), {1, 2, 4, 8, first.parts}
    ):
        tiling = Tiling(
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            warps=warps,
            stages=stages,
            parts=parts,
            scaled=scaled,
        )
        try:
            ms = device_ms([partial(awq_matmul_triton, x, *each[:3], tiling) for each in weights], rounds)
        except OutOfResources:
            continue
        found.append({"ms": ms, **asdict(tiling)})
    return min(found, key=lambda each: each["ms"], default=None)


def layers(result: Result) -> Iterator[Result]:
    """All products of a decoder layer, as far as they were measured."""
    cases = {(each["in"], each["out"], each["rows"]): each for each in result["cases"]}
    for (model, shapes), rows in product(LAYERS.items(), ROWS):
        if all((*shape, rows) in cases for shape in shapes):
            parts = [(cases[*shape, rows], count) for shape, count in shapes.items()]
            told = set.intersection(*(set(case) for case, _ in parts)) - {"in", "out", "rows", "fastest"}
            yield {"model": model, "rows": rows, **{key: sum(case[key] * n for case, n in parts) for key in told}}


def row_of(name: str, case: Result, result: Result) -> str:
    """A line of the table."""
    rate = case["bytes"] / case["awq"] / 1e6
    share, link = rate / result["rates"]["copy"], rate / result["rates"]["link"]
    aim = f" ({'reached' if share >= AWQ_COPY_RATE else 'missed'})" if case["rows"] == 1 else ""
    best = case.get("fastest")
    tried = f"{best['ms']:.4f}: {', '.join(f'{k} {v}' for k, v in best.items() if k != 'ms')}" if best else ""
    ways = [f"{case[way]:.4f}" for way in ("registers", "memory", "dequantize")]
    hosts = [f"{case[each]:.0f}" for each in ("host_us", "host_us_dense")]
    return (
        f"| {name} | {case['rows']} | {case['awq']:.4f} | {rate:.0f} | {share:.0%}{aim} | {link:.1f}x "
        f"| {case['dense']:.4f} | {case['dense'] / case['awq']:.2f}x | {' | '.join([*ways, *hosts])} | {tried} |"
    )


def markdown(result: Result) -> str:
    copy, link = result["rates"]["copy"], result["rates"]["link"]
    lines = [
        f"{result['dtype']}, groups of {GROUP}; {measured_on(result['provenance'])}",
        "",
        f"A copy on the device reads and writes {copy:.0f} GB/s; one from pinned host memory takes {link:.1f} GB/s. "
        f"For one row, {AWQ_COPY_RATE:.0%} of the former is aimed at. Times in ms, those of the host in µs; in "
        "registers and in memory are the two ways; dequantize is the first half of the latter.",
        "",
        "| in x out | rows | AWQ | weights, GB/s | of a copy | of the link | dense | dense / AWQ | in registers "
        "| in memory | dequantize | host | host, dense | best tiling |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [row_of(f"{each['in']} x {each['out']}", each, result) for each in result["cases"]]
    lines += [row_of(f"layer of {each['model']}", each, result) for each in result["layers"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=7)
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16"), default="float16", help="of rows and dense weights"
    )
    parser.add_argument("--tilings", action="store_true", help="try other tilings, too; takes its time")
    options = parser.parse_args()
    if options.device != "cuda" or not torch.cuda.is_available():
        print("Nothing is measured: these kernels are for GPUs; pass --device cuda where there is one.")
        return
    torch.manual_seed(0)
    result: Result = {
        "provenance": provenance(sys.argv[1:], "awq.py"),
        "dtype": options.dtype,
        "rates": rates(options.rounds),
        "cases": [],
        "layers": [],
    }
    record = Record("awq-cuda" if options.dtype == "float16" else "awq-bfloat16-cuda", options, result, markdown)

    def add(in_features: int, out_features: int) -> None:
        for found in measure(
            in_features, out_features, getattr(torch, options.dtype), options.tilings, options.rounds
        ):
            result["cases"].append(found)
            print(row_of(f"{in_features} x {out_features}", found, result), flush=True)
        result["layers"] = list(layers(result))

    for shape in (shape for shapes in LAYERS.values() for shape in shapes):
        name = " x ".join(map(str, shape))
        if name.startswith(options.only):
            record.measure(name, partial(add, *shape))
    record.show()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
