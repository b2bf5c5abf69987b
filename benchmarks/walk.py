"""How far one call walks through the package: files entered, changes from one file to another, and calls.

    python benchmarks/walk.py --out benchmarks/results

The counts depend on no machine. A model of two layers answers a prompt of 100 tokens, in chunks of 16, with one token:

    kept          the cache that has answered the same prompt before
    attached      the same, after `attach(model)`
    memory        a new cache, over a store in host memory that has the prompt
    disk          the same, over a disk tier that was opened again
    moved         a new cache with mode "blend": the stored text comes behind another head
    step          each further token of the kept cache
    transformers  `generate()` with a stock cache, in the files of transformers

A call that has been made before is counted: probes, and what is found out once for a model, are over. `--files` lists
the files of each case. `--chat` counts the files that a chat request enters in all threads of a server, instead.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from record import write
from shapes import make_model
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import kvboost_hf
from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, detach
from kvboost_hf.bench.run import provenance

TOKENS, CHUNK, STEPS = 100, 16, 11  # no chunk ends within the steps
QUIET_S = 0.5
Call = Callable[[], object]
Result = dict[str, Any]


@dataclass(slots=True)
class Walk:
    """What one call has entered.

    Args:
        root: The folder whose files count, with a slash at its end.
    """

    root: str
    functions: Counter[tuple[str, str]] = field(default_factory=Counter)
    changes: int = 0
    _last: str | None = None

    @property
    def files(self) -> Counter[str]:
        """How many functions of each file were entered."""
        found = Counter[str]()
        for (file, _), count in self.functions.items():
            found[file] += count
        return found

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """What `sys.setprofile` calls."""
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(self.root):
            self.functions[file.removeprefix(self.root), frame.f_code.co_qualname] += 1
            self.changes += file != self._last
            self._last = file

    def counts(self) -> dict[str, int]:
        """The row of the table."""
        return {"files": len(self.files), "changes": self.changes, "calls": self.functions.total()}


@contextmanager
def noting(found: Walk) -> Iterator[None]:
    """Note what this thread enters. Garbage of earlier calls is collected before, for its finalizers are code, too."""
    gc.collect()
    gc.disable()
    sys.setprofile(found.note)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


def walk(call: Call, package: Any = kvboost_hf) -> Walk:
    """What a call enters, in this thread, of the files of a package."""
    found = Walk(f"{Path(package.__file__).parent}/")
    with noting(found):
        call()
    return found


def prompt_of(model: PreTrainedModel) -> torch.Tensor:
    """[1, TOKENS]."""
    return torch.arange(TOKENS)[None] % (model.config.vocab_size - 8) + 8


def walks(model: PreTrainedModel) -> dict[str, Walk]:
    """The walk of each case but `step`."""
    ids = prompt_of(model)

    def answer(cache: Any = None, ids: torch.Tensor = ids) -> None:
        model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)

    def twice(call: Call, package: Any = kvboost_hf) -> Walk:
        call()
        return walk(call, package)

    store, kept = ChunkStore(model, chunk_size=CHUNK), ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    answer(ChunkReuseCache(model, store))
    answer(kept)
    found = {"kept": twice(lambda: answer(kept))}
    attach(model, ChunkStore(model, chunk_size=CHUNK))
    answer()
    found["attached"] = twice(answer)
    detach(model)
    found["memory"] = twice(lambda: answer(ChunkReuseCache(model, store)))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):  # it is stored, read for the first time, and read as it is every time
            with ChunkStore(model, chunk_size=CHUNK, tiers=[f"disk:{folder}"]) as opened:
                cache = ChunkReuseCache(model, opened)
                found["disk"] = walk(lambda cache=cache: answer(cache))
    blend = ReusePolicy(mode="blend", repair="none", progressive=False)
    for places in range(1, 3):  # another head each time: what was moved once is stored
        moved = torch.cat([ids[:, :CHUNK].roll(places), ids[:, CHUNK:]], 1)
        cache = ChunkReuseCache(model, store, policy=blend)
        found["moved"] = walk(lambda cache=cache, moved=moved: answer(cache, moved))
        assert cache.report.moved_tokens
    found["transformers"] = twice(answer, transformers)
    return found


class Steps(BaseStreamer):
    """Notes the walk of each token.

    Args:
        walk: What has been entered so far. Begins anew behind each token.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.walks: list[Walk] = []

    def put(self, value: torch.Tensor) -> None:
        now = self._walk
        self.walks.append(Walk(now.root, now.functions.copy(), now.changes))
        now.functions.clear()
        now.changes, now._last = 0, None

    def end(self) -> None:
        pass


def step(model: PreTrainedModel) -> Walk:
    """The walk of the median of further tokens of a kept cache; the first step settles the prompt."""
    kept = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))

    def call(**more: Any) -> None:
        given = {"past_key_values": kept, "max_new_tokens": STEPS, "do_sample": False, **more}
        model.generate(prompt_of(model), **given)

    call()
    found = Walk(f"{Path(kvboost_hf.__file__).parent}/")
    steps = Steps(found)
    with noting(found):
        call(streamer=steps)
    return sorted(steps.walks[3:], key=lambda one: one.changes)[(STEPS - 3) // 2]


def chat() -> Walk:
    """What a chat that goes on enters, from its arrival at the app to its answer, in all threads."""
    import httpx

    from kvboost_hf.assets import load_embedded
    from kvboost_hf.server.app import make_app
    from kvboost_hf.server.engine.worker import ModelEngine
    from kvboost_hf.server.settings import ServerSettings

    found, all_of_it = (Walk(f"{Path(kvboost_hf.__file__).parent}/") for _ in range(2))
    noted = all_of_it
    threading.setprofile(lambda *told: noted.note(*told))  # of the engine's thread and those of the front
    model, tokenizer = load_embedded()
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=CHUNK))
    transport = httpx.ASGITransport(make_app(engine, tokenizer, ServerSettings(model_name="reader")))

    async def ask() -> None:
        nonlocal noted
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            messages = [{"role": "user", "content": "Maria lives in Rome. The lamp is red. " * 12 + "Who?"}]
            for number in range(3):
                await asyncio.sleep(QUIET_S)  # what is left of the request before is done
                noted = found if number == 2 else all_of_it
                sys.setprofile(noted.note)
                body = {"model": "reader", "messages": messages, "max_tokens": 3}
                answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
                sys.setprofile(None)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": f"And {number}?"}]
            await asyncio.sleep(QUIET_S)
            noted = all_of_it

    asyncio.run(ask())
    threading.setprofile(None)
    engine.close()
    return found


def measure(model: PreTrainedModel) -> Result:
    """The row of each case, and the files of each."""
    found = walks(model) | {"step": step(model)}
    rows = {name: one.counts() for name, one in found.items()}
    return {"rows": rows, "files": {name: dict(one.files) for name, one in found.items()}}


def markdown(result: Result) -> str:
    lines = [result["provenance"], "", "| case | files | changes of file | calls |", "| --- | ---: | ---: | ---: |"]
    for name, row in result["rows"].items():
        lines.append(f"| {name} | {row['files']} | {row['changes']} | {row['calls']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--files", action="store_true", help="list the files of each case, with calls into each")
    parser.add_argument("--chat", action="store_true", help="only the files of a chat request")
    options = parser.parse_args()
    if options.chat:
        files = chat().files
        folders = Counter(file.partition("/")[0] for file in files)
        print("\n".join(sorted(files)) if options.files else "", end="\n" if options.files else "")
        print(f"{len(files)} files: {', '.join(f'{count} {folder}' for folder, count in folders.most_common())}")
        return
    model = make_model("cpu", "tiny", num_hidden_layers=2)
    result = measure(model)
    result["provenance"] = str(provenance(f"`python benchmarks/walk.py {' '.join(sys.argv[1:])}`", "cpu"))
    if options.files:
        for name, files in result["files"].items():
            print(f"\n{name}")
            for file, count in sorted(files.items(), key=lambda item: -item[1]):
                print(f"{count:6} {file}")
    write(options.out, "walk", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
