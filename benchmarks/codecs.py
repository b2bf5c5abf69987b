"""What codecs take, what they lose, and what they cost beside a plain copy.

    PYTHONPATH=. python benchmarks/codecs.py --out benchmarks/results [--device cuda]

Bytes are those of a key and a value of 128 dimensions in a chunk of 128 tokens, means and scales included. Errors are
relative, of the data sets in `tests/codecs.py`, as keys and as values. Times are those of keys [28 layers,
2 heads, 128 tokens, 128 dims], all layers encoded at once and decoded one by one, as multiples of cloning them in the
same loop. The clone stays in the processor's cache: it is the strictest of yardsticks.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from reuse import Result, in_turn, measured_on, medians, provenance

from kvboost_hf.cache.codecs import Codec, Role, make_codec
from kvboost_hf.config import KVQuantConfig
from tests.codecs import HEAD_DIM, ROTATION, error, gaussian, heavy_tailed, outliers, through

SHAPE = (28, 2, 128, HEAD_DIM)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPECS: dict[str, str | KVQuantConfig] = {
    **{name: name for name in ("raw", "int8", "int4", "int2", "turboquant", "turboquant:3.5", "turboquant:3")},
    **{name: name for name in ("turboquant:4:2", "turboquant:2")},
    "turboquant:4 with qjl": KVQuantConfig(qjl=True),
    "turboquant:4, mean kept in": KVQuantConfig(remove_key_mean=False),
}
ROLES: tuple[Role, Role] = ("keys", "values")


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


def times(codec: Codec, x: torch.Tensor, rounds: int) -> dict[str, float]:
    device, rotations = x.device.type, [ROTATION] * len(x)
    planes = codec.encode(x, "keys", rotations)
    layers = [{name: plane[i] for name, plane in planes.items()} for i in range(len(x))]

    def decode() -> None:
        for layer in layers:
            codec.decode(layer, (x.shape[1], x.shape[2], x.shape[3]), x.dtype, "keys", ROTATION)

    arms = {
        "copy": lambda n: ms(x.clone, device),
        "encode": lambda n: ms(lambda: codec.encode(x, "keys", rotations), device),
        "decode": lambda n: ms(decode, device),
    }
    return medians(in_turn(arms, rounds))


def measure(spec: str | KVQuantConfig, device: str, rounds: int) -> Result:
    codec = make_codec(spec)
    taken = sum(codec.nbytes((1, 1, 128, HEAD_DIM), torch.bfloat16, role) for role in ROLES) / 128
    found: Result = {"name": codec.name, "bytes": taken, "bits": taken * 8 / (2 * HEAD_DIM), **losses(codec)}
    for name, dtype in DTYPES.items():
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        found[name] = times(codec, x, rounds)
    return found


def markdown(result: Result) -> str:
    lines = [
        f"A block of {SHAPE}; {measured_on(result['provenance'])}",
        "",
        "| codec | bits | bytes per token and head | gaussian | heavy-tailed | outliers "
        "| encode, float32 | decode, float32 | encode, bfloat16 | decode, bfloat16 |",
        "| --- " + "| ---: " * 9 + "|",
    ]
    for name, row in result["codecs"].items():
        ratios = [
            f"{row[dtype][arm]:.2f} ms ({row[dtype][arm] / row[dtype]['copy']:.0f}x)"
            for dtype in DTYPES
            for arm in ("encode", "decode")
        ]
        errors = [" / ".join(f"{lost:.2g}" for lost in row[data]) for data in ("gaussian", "heavy-tailed", "outliers")]
        lines.append(" | ".join([f"| {name}", f"{row['bits']:.2f}", f"{row['bytes']:.0f}", *errors, *ratios]) + " |")
    copies = next(iter(result["codecs"].values()))
    lines += [
        "",
        f"A copy: {copies['float32']['copy']:.3f} ms in float32, {copies['bfloat16']['copy']:.3f} in bfloat16.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    result: Result = {"provenance": provenance(sys.argv[1:], "codecs.py"), "codecs": {}}
    for name, spec in SPECS.items():
        result["codecs"][name] = measure(spec, options.device, options.rounds)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"codecs-{options.device}.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / f"codecs-{options.device}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
