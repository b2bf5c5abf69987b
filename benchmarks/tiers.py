"""The first prompt after a restart: its K/V from disk, or from a server, against host memory and against computing it.

    python benchmarks/tiers.py --out benchmarks/results [--device cuda] [--folder FOLDER]

One process stores a prompt of 2,000 tokens in every tier. For each round a new process makes the model anew, and times
its first long prompt, which ends in 32 tokens never seen, from a tier: from the call of generate() to the token on the
host, look-ups, reading and checking checksums included. Host memory is timed in the same process, from the same store,
once what was read has come back to it.

Before the clock starts the process has made the model and the store (which reads something of it to see how fast it
is), has run one short unrelated prompt without any tier, for PyTorch's own start, and one through the store, for the
checksum of the weights and the probe of the model, both done once; what these take is given apart. "disk, cold" asks
the kernel to forget the files first (posix_fadvise); otherwise it may have them in its page cache, as after a restart
of a program on a machine that stays up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from reuse import Ids, Result, make_model, measured_on, medians, provenance, rounded, ttft

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility

SHARED, UNSEEN, BUDGET = 2000, 32, "4GB"
CODECS = ("raw", "int8", "turboquant")


def address(tier: str, folder: Path, url: str | None) -> str:
    return f"disk:{folder}:{BUDGET}" if tier.startswith("disk") else str(url)


def forget(folder: Path) -> None:
    """Have the kernel drop what it remembers of the files."""
    os.sync()
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_here(tier: str, codec: str, device: str, folder: Path, url: str | None, seed: int) -> Result:
    """What one new process finds."""
    model, fresh = make_model(device), Ids(1)
    shared, ending = fresh(SHARED), Ids(100 + seed)
    ttft(model, ending(UNSEEN))
    store = ChunkStore(model, tiers=[address(tier, folder, url)], codec=codec)
    begin = time.perf_counter()
    check_model_compatibility(model)
    ttft(model, ending(UNSEEN), past_key_values=ChunkReuseCache(model, store))
    once = 1000 * (time.perf_counter() - begin)
    if tier == "disk, cold":
        forget(folder)
    found: Result = {"once": once}
    for name in ("tier", "ram", "ram again"):
        cache = ChunkReuseCache(model, store)
        found[name] = ttft(model, shared + ending(UNSEEN), past_key_values=cache)
        place = cache.report.tier_tokens
        expected = "ram" if name != "tier" else next(key for key in place if key not in ("live", "ram"))
        assert place[expected] >= SHARED // 128 * 128, cache.report
        store.flush()
    found["plain"] = ttft(model, shared + ending(UNSEEN))
    found["blob_bytes"] = store.stats()["tiers"][expected_name(tier)]["bytes"]
    store.close()
    return found


def expected_name(tier: str) -> str:
    return "disk" if tier.startswith("disk") else "valkey"


def fill(tier: str, codec: str, device: str, folder: Path, url: str | None) -> None:
    model = make_model(device)
    store = ChunkStore(model, tiers=[address(tier, folder, url)], codec=codec)
    store.warm(Ids(1)(SHARED))
    store.close()


def child(arguments: list[str]) -> Result:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(tier: str, codec: str, device: str, folder: Path, url: str | None, rounds: int) -> Result:
    rest = ["--tier", tier, "--codec", codec, "--device", device, "--folder", str(folder), "--url", url or ""]
    child([*rest, "--child", "fill"])
    runs = [child([*rest, "--child", "measure", "--seed", str(n)]) for n in range(rounds)]
    found = medians({name: [run[name] for run in runs] for name in runs[0]})
    ratios = [run["tier"] / min(run["ram"], run["ram again"]) for run in runs]
    return {**found, "ratio": statistics.median(ratios), "ratio_max": max(ratios), "ratio_min": min(ratios)}


def markdown(result: Result) -> str:
    lines = [
        f"{SHARED} tokens stored before the restart, {UNSEEN} never seen; random Llama, 8 layers of 512, float32; "
        f"{measured_on(result['provenance'])}",
        "",
        "| tier | codec | MB | computed | from the tier | from host memory | tier / host memory (least to most) |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        ram = min(row["ram"], row["ram again"])
        lines.append(
            f"| {row['name']} | {row['codec']} | {row['blob_bytes'] / 1e6:.0f} | {row['plain']:.0f} ms "
            f"| {row['tier']:.0f} ms ({row['plain'] / row['tier']:.1f}x) | {ram:.0f} ms ({row['plain'] / ram:.1f}x) "
            f"| {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}) |"
        )
    once = statistics.median(row["once"] for row in result["rows"])
    lines += ["", f"The first prompt through a store in a new process takes {once:.0f} ms for things done once."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="of the disk tier (default: a temporary one)")
    parser.add_argument("--url", default="", help="of a Valkey or Redis server to be measured, too")
    for name in ("--child", "--tier", "--codec"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        place = (options.tier, options.codec, options.device, options.folder, options.url)
        print(json.dumps(fill(*place) if options.child == "fill" else measure_here(*place, options.seed)))
        return
    result: Result = {"provenance": provenance(sys.argv[1:], "tiers.py"), "rows": []}
    tiers = ["disk", "disk, cold", *(["server on this machine"] if options.url else [])]
    for tier in tiers:
        for codec in CODECS if tier == "disk" else CODECS[:1]:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                row = measure(tier, codec, options.device, Path(folder), options.url, options.rounds)
            print(f"{tier}, {codec}: {rounded(row)}", flush=True)
            result["rows"].append({"name": tier, "codec": codec, **row})
    assert options.out is not None, "--out is missing"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"tiers-{options.device}.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / f"tiers-{options.device}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
