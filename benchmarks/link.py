"""How fast layers come over the link of a GPU: in pieces or whole, from allocated or from registered memory.

    python benchmarks/link.py --device cuda --out benchmarks/results

A layer is one of Qwen2.5-32B with weights of 4 bits, 253 MB. Streaming copies it in pieces of 32 MB, between which
small copies may go, from memory that it registers, because PyTorch allocates powers of two. Each way is taken in turn;
rates are of medians of device time. `--shape tiny` copies layers a thousandth as large, on whatever device.
"""

import argparse
import statistics
import sys

import clock
import torch
from record import Record, add_options, add_shape
from reuse import measured_on, provenance
from targets import Result

from kvboost_hf.offload.cuda import PIECE_BYTES
from kvboost_hf.offload.host import LayerMemory, cuda_pinning

LAYER_BYTES, COPY_BYTES = 253_351_936, 1 << 30
TINY = 1000


def measure(options: argparse.Namespace) -> Result:
    """GB/s of each way, and of a copy on the device, which reads and writes."""
    part = TINY if options.shape == "tiny" else 1
    nbytes = LAYER_BYTES // part
    on_gpu = options.device == "cuda"
    registering = LayerMemory(cuda_pinning(torch.device("cuda")) if on_gpu else None)
    hosts = {
        "pinned": torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu),
        "registered": registering.allocate(nbytes),
    }
    pieces = {"pieces": PIECE_BYTES // part, "whole": nbytes}
    found: dict[str, list[float]] = {f"{memory}, {size}": [] for memory in hosts for size in pieces}
    for host in hosts.values():
        host.random_(256)
    for _ in range(options.rounds):
        for memory, host in hosts.items():
            for size, piece in pieces.items():
                rate = clock.link_rate(host, 3, options.device, piece)
                found[f"{memory}, {size}"].append(rate)
    rates = {way: statistics.median(each) for way, each in found.items()}
    return {**rates, "on the device": clock.copy_rate(COPY_BYTES // part, options.rounds, options.device)}


def markdown(result: Result) -> str:
    lines = [measured_on(result["provenance"]), "", "| copies | GB/s |", "| --- | ---: |"]
    return "\n".join([*lines, *(f"| {way} | {rate:.1f} |" for way, rate in result["rates"].items())]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=5)
    add_shape(parser, "8b")
    options = parser.parse_args()
    result: Result = {"provenance": provenance(sys.argv[1:], "link.py"), "rates": {}}
    record = Record(f"link-{options.device}", options, result, markdown)
    record.measure("rates", lambda: result["rates"].update(measure(options)))
    record.show()


if __name__ == "__main__":
    main()
