"""A process that runs one benchmark after another, so that imports and the start of a GPU are paid once.

Its first line on the standard output says that it is ready. `gpu.py` writes a line of JSON for each benchmark:
`{"command": [script, argument, ...], "log": path}`. The answer is another line: the exit code, and whether the process
ends now, because its device does not answer any more, or is not empty after all was freed. The next benchmark then has
a new process. When its standard input ends, so does it, whatever it does.
"""

import importlib
import json
import os
import queue
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence

WARMED = ("torch", "transformers", "triton", "kvboost_hf", "record", "reuse", "torch._dynamo", "torch._inductor")
MOST_LEFT_BYTES = 1 << 30  # of the device, that a benchmark may leave in use


def main() -> None:
    jobs: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    answers, own_log = (os.fdopen(os.dup(stream), "w") for stream in (1, 2))
    os.dup2(2, 1)  # what benchmarks print does not go among the answers
    for name in WARMED:
        try:
            importlib.import_module(name)
        except ImportError:  # the benchmarks that need it say so
            continue
    print("ready", file=answers, flush=True)
    threads = importlib.import_module("torch").get_num_threads()
    while job := jobs.get():
        asked = json.loads(job)
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        code = run(asked["command"])
        left = clean(asked["command"], threads)
        print(f"{asked['log']}: exit code {code}, bytes still in use: {left}", file=own_log, flush=True)
        ends = left is None or left > MOST_LEFT_BYTES
        print(json.dumps({"code": code, "ends": ends}), file=answers, flush=True)
        if ends:
            os._exit(0)


def run(command: Sequence[str]) -> int:
    """Run a script as `python` does; returns its exit code."""
    record = importlib.import_module("record")
    sys.argv = list(command)
    record.begin()
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:  # its time is over
        traceback.print_exc()
        os._exit(130)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def clean(command: Sequence[str], threads: int) -> int | None:
    """Free what a benchmark has left; returns the bytes of the device still in use, None if it does not answer."""
    import clock
    import torch

    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)
    device = "cuda" if "cuda" in command else "cpu"
    try:
        torch._dynamo.reset()
        left = clock.free(device)
        if device == "cuda":
            torch.ones(1, device=device).item()  # fails where a kernel has written out of bounds
    except Exception:
        traceback.print_exc()
        return None
    return left


def _listen(jobs: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(1)


if __name__ == "__main__":
    main()
