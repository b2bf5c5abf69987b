"""What codecs take, what they lose, and what they cost beside a plain copy.

    PYTHONPATH=. python benchmarks/codecs.py --out benchmarks/results [--threads 2] [--device cuda]

Bytes are those of a key and a value of 128 dimensions in a chunk of 128 tokens, means and scales included. Errors are
relative, of the data sets in `tests/codecs.py`, as keys and as values.

Times are those of the keys and values of many distinct chunks, as multiples of three plain copies of the same bytes in
the same loop: "memory" copies them to memory that is in use already, "new" to memory that is asked of the system for
it, as a store does that grows, and "cache" clones one chunk over and over, which never leaves the processor. Keys
rotate with their positions. What is encoded is kept until all is; what is decoded is let go, as in a forward.
"""

import argparse
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from record import write
from reuse import Result, in_turn, measured_on, medians, provenance

from kvboost_hf.cache.codecs import Codec, Planes, Role, make_codec
from kvboost_hf.compat import LayerRotation
from kvboost_hf.config import KVQuantConfig
from tests.codecs import HEAD_DIM, ROTATION, error, gaussian, heavy_tailed, outliers, through

# Layers, heads, tokens and dimensions of a chunk.
SHAPES = {"8 layers of 8 x 64": (8, 8, 128, 64), "28 layers of 2 x 128": (28, 2, 128, 128)}
WORKING_SET = 64 << 20  # bytes of keys and values together: more than the caches of most processors
RUN = 1 << 17  # numbers that are decoded at once, as by `cache.kv`
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPECS: dict[str, str | KVQuantConfig] = {
    **{name: name for name in ("raw", "int8", "int4", "int2", "turboquant", "turboquant:3.5", "turboquant:3")},
    **{name: name for name in ("turboquant:4:2", "turboquant:2")},
    "turboquant:4, haar": KVQuantConfig(rotation="haar"),
    "turboquant:4 with qjl": KVQuantConfig(qjl=True),
    "turboquant:4, mean kept in": KVQuantConfig(remove_key_mean=False),
}
ROLES: tuple[Role, Role] = ("keys", "values")
COPIES = ("memory", "new", "cache")


def ms(work: Callable[[], object], device: str) -> float:
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin)


def losses(codec: Codec) -> dict[str, list[float]]:
    """Keys of outliers are rotated by their positions; values never are."""
    sets = {"gaussian": (gaussian(), None), "heavy-tailed": (heavy_tailed(), None), "outliers": (outliers(), ROTATION)}
    return {
        name: [error(through(codec, x, role, rotation), x) for role in ROLES] for name, (x, rotation) in sets.items()
    }


def times(codec: Codec, chunks: torch.Tensor, rounds: int) -> dict[str, float]:
    """Of chunks [2, count, layers, heads, tokens, head_dim], keys and then values."""
    device, layers, shape = chunks.device.type, chunks.shape[2], chunks.shape[3:]
    turn = LayerRotation(1e6 ** -(torch.arange(shape[-1] // 2) / (shape[-1] // 2)), "half", 0)
    rotations: dict[Role, LayerRotation | None] = {"keys": turn, "values": None}
    count, step = chunks.shape[1], max(1, RUN // shape.numel())

    def encode() -> list[tuple[Role, Planes]]:
        return [
            (role, codec.encode(x, role, [rotations[role]] * layers))
            for role, part in zip(ROLES, chunks, strict=True)
            for x in part
        ]

    def decode() -> None:
        for role, planes in encoded:
            for at in range(0, layers, step):
                own = {name: plane[at : at + step] for name, plane in planes.items()}
                codec.decode(own, (min(step, layers - at), *shape), chunks.dtype, role, rotations[role])

    def clone() -> None:
        for _ in range(2 * count):
            chunks[0, 0].clone()

    encoded, target = encode(), torch.zeros_like(chunks)
    arms = {
        "memory": lambda n: ms(lambda: target.copy_(chunks), device),
        "new": lambda n: ms(lambda: torch.empty_like(chunks).copy_(chunks), device),
        "cache": lambda n: ms(clone, device),
        "encode": lambda n: ms(encode, device),
        "decode": lambda n: ms(decode, device),
    }
    return medians(in_turn(arms, rounds))


def measure(spec: str | KVQuantConfig, device: str, rounds: int) -> Result:
    codec = make_codec(spec)
    taken = sum(codec.nbytes((1, 1, 128, HEAD_DIM), torch.bfloat16, role) for role in ROLES) / 128
    found: Result = {"name": codec.name, "bytes": taken, "bits": taken * 8 / (2 * HEAD_DIM), **losses(codec)}
    for model, shape in SHAPES.items():
        found[model] = {}
        for name, dtype in DTYPES.items():
            count = WORKING_SET // (2 * prod(shape) * dtype.itemsize)
            x = torch.randn((2, 1, *shape), generator=torch.Generator().manual_seed(0)).to(device, dtype)
            found[model][name] = times(codec, x.repeat(1, count, 1, 1, 1, 1), rounds)
    return found


def markdown(result: Result) -> str:
    lines = [
        f"Chunks of 128 tokens, {WORKING_SET >> 20} MB in all; {measured_on(result['provenance'])}",
        "",
        "| codec | bits | bytes per token and head | gaussian | heavy-tailed | outliers |",
        "| --- " + "| ---: " * 5 + "|",
    ]
    for name, row in result["codecs"].items():
        errors = [" / ".join(f"{lost:.2g}" for lost in row[data]) for data in ("gaussian", "heavy-tailed", "outliers")]
        lines.append(" | ".join([f"| {name}", f"{row['bits']:.2f}", f"{row['bytes']:.0f}", *errors]) + " |")
    for model in SHAPES:
        columns = [f"{arm}, {dtype}" for dtype in DTYPES for arm in ("encode", "decode")]
        lines += [
            "",
            f"{model}, multiples of a copy to memory / to new memory / within the cache:",
            "",
            "| codec | " + " | ".join(columns) + " |",
            "| --- " + "| ---: " * len(columns) + "|",
        ]
        for name, row in result["codecs"].items():
            cells = [
                " / ".join(f"{row[model][dtype][arm] / row[model][dtype][copy]:.1f}x" for copy in COPIES)
                for dtype in DTYPES
                for arm in ("encode", "decode")
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        copies = next(iter(result["codecs"].values()))[model]
        told = (f"{dtype} " + " / ".join(f"{copies[dtype][copy]:.1f}" for copy in COPIES) for dtype in DTYPES)
        lines += ["", "The copies, in ms: " + ", ".join(told) + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: Result = {"provenance": provenance(sys.argv[1:], "codecs.py"), "codecs": {}}
    for name, spec in SPECS.items():
        result["codecs"][name] = measure(spec, options.device, options.rounds)
    if options.out is not None:
        where = options.device if options.device != "cpu" else f"cpu-{options.threads}"
        write(options.out, f"codecs-{where}", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
