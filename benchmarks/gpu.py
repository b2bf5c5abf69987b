"""All that needs a GPU, in four parts for commands of ten minutes: `make gpu-1` to `make gpu-4`.

    python benchmarks/gpu.py 1 --out OUT [--minutes 9] [--device cuda] [--shape 8b]

The steps of a part share its minutes by weight, and what one leaves belongs to those after it. A step is told how many
minutes it has, writes what it finds as it comes, and is ended when they are over; the others run all the same. While
steps run, all that they have written is kept in one archive, OUT/gpu-PART.tar.gz, and the lines below in
OUT/gpu-PART.txt: a command that is killed leaves both.

The last lines are one for each step that failed, for each case that was left out, and for each target: PASS or MISS,
and what was found. They are bounded. The exit code is 2 if something failed, 1 if a target was missed or something was
left out for want of time, else 0. Another device than a GPU, and a tiny shape, try all this in minutes.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import FrameType

from targets import verdicts

Lines = dict[str, list[str]]  # by how they begin

ROOT = Path(__file__).parents[1]
KEPT_LOG_BYTES, MOST_LOG_BYTES = 200_000, 50_000_000  # in the archive; of a step, which is ended if it prints more
LINE = 160  # characters
CHARACTERS = {"1": 1900, "2": 2400, "3": 4000, "4": 1700}  # of all that a part says at its end: 10,000
ROOM = {"SKIPPED": 300, "FAILED": 700, "MISS": 10_000, "PASS": 10_000}  # of these, in order
PACK_S, END_S = 2.0, 4.0  # between archives; that a step has to end by itself
TOLD = 0.9  # of the time that it has, so that a step ends by itself
SANITIZED = "test_pieces or test_codes or test_parity"  # kernels that compute-sanitizer looks at
LEAST_S = 3.0  # a step that has less is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command of a part.

    Args:
        name: Of the step and its log.
        command: Its arguments; `{out}` and `{minutes}` stand for its folder and its time.
        weight: Its share of the time.
        judged: Whether it is of tests, which are a target: some have to pass, and none to fail.
    """

    name: str
    command: Sequence[str]
    weight: float = 1.0
    judged: bool = False


@dataclass(slots=True)
class Part:
    """What is run, and what has come of it.

    Args:
        name: Of its files.
        steps: In order.
        out: Where the archive and the lines go.
        minutes: For all of it.
        characters: Of what it says at its end, at most.
    """

    name: str
    steps: Sequence[Step]
    out: Path
    minutes: float
    characters: int = CHARACTERS["2"]
    _lines: Lines = field(default_factory=dict)  # of steps that have ended
    _packed: object = None

    def run(self) -> int:
        """Run it; returns the exit code."""
        self._lines = {"FAILED": [], "SKIPPED": [], "MISS": [], "PASS": []}
        self.out.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + 60 * self.minutes - min(PACK_S, 6 * self.minutes)
        folder = Path(tempfile.mkdtemp(prefix="kvboost-gpu-"))
        try:
            for at, step in enumerate(self.steps):
                left = end - time.monotonic()
                share = left * step.weight / sum(each.weight for each in self.steps[at:])
                if share < LEAST_S * min(1.0, self.minutes):
                    self._lines["SKIPPED"].append(f"{step.name}: no time is left for it")
                else:
                    self._run(step, folder, share)
        finally:  # if it is ended from outside, too
            lines = self._pack(folder)
            shutil.rmtree(folder, ignore_errors=True)
            print(self._text(lines), end="", flush=True)
        return 2 if lines["FAILED"] else 1 if lines["MISS"] or lines["SKIPPED"] else 0

    def _run(self, step: Step, folder: Path, seconds: float) -> None:
        log, scratch = folder / f"{step.name}.log", folder / "scratch"
        scratch.mkdir()
        told = {"{out}": str(folder), "{minutes}": f"{TOLD * seconds / 60:.3f}"}
        command = [_filled(argument, told) for argument in step.command]
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(ROOT), *([before] if before else [])])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": str(scratch)}
        begin = time.monotonic()
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell's background jobs begin, and steps would
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("wb") as written:
            child = subprocess.Popen(
                command, stdout=written, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, process_group=0
            )
        why = "ended from outside"
        try:
            why = self._wait(child, folder, log, begin + seconds)
        finally:
            _end(child)
            shutil.rmtree(scratch, ignore_errors=True)
            took = f"{time.monotonic() - begin:.0f} s"
            if why:
                self._lines["SKIPPED" if "time" in why else "FAILED"].append(f"{step.name}: {why}, after {took}")
            elif child.returncode and not _failed_tests(log):
                self._lines["FAILED"].append(f"{step.name}: exit code {child.returncode}: {_last_line(log)}")
            self._lines["FAILED"] += [f"{step.name}: {line}" for line in _failed_tests(log)]
            if step.judged:  # tests that were all skipped have shown nothing
                said = why or _last_line(log)
                kind = "PASS" if child.returncode == 0 and " passed" in said else "MISS"
                self._lines[kind].append(f"{step.name}: {said}")
            print(f"{step.name}: {why or f'exit code {child.returncode}'}, {took}"[:LINE], flush=True)

    def _wait(self, child: subprocess.Popen[bytes], folder: Path, log: Path, until: float) -> str:
        """Wait for a step, and pack what it writes; returns why it has to be ended, or nothing."""
        while True:
            try:
                child.wait(max(0.0, min(PACK_S, until - time.monotonic())))
                return ""
            except subprocess.TimeoutExpired:
                self._pack(folder)
            if time.monotonic() >= until:
                return "ended, its time was over"
            if log.stat().st_size > MOST_LOG_BYTES:
                return f"ended, it had printed more than {MOST_LOG_BYTES // 10**6} MB"

    def _pack(self, folder: Path) -> Lines:
        """Write the archive and the lines, if there is something new; returns all lines."""
        files = sorted(path for path in folder.iterdir() if path.is_file())
        lines = {kind: list(each) for kind, each in self._lines.items()}
        for path in files:
            if path.suffix == ".json":
                for kind, line in _found(path):
                    lines[kind].append(line)
        text = self._text(lines)
        state = text, [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        if state != self._packed:
            archive, partial = (self.out / f"{self.name}.{end}" for end in ("tar.gz", "partial"))
            with tarfile.open(partial, "w:gz") as packed:
                for path in files:
                    _add(packed, f"{self.name}/{path.name}", _tail(path, KEPT_LOG_BYTES, path.suffix == ".log"))
            partial.replace(archive)
            (self.out / f"{self.name}.txt").write_text(text)
            self._packed = state
        return lines

    def _text(self, lines: Lines) -> str:
        """What is said of all lines: failures first, targets last. What there is no room for is counted."""
        room, shown = self.characters, []
        for kind, most in ROOM.items():
            left = min(room, most)
            fitting: list[str] = []
            for line in lines[kind]:
                cut = f"{kind} {line}"[:LINE]
                left -= len(cut) + 1
                if left < LINE // 3:  # room for a line that counts the others
                    fitting.append(f"{kind} {len(lines[kind]) - len(fitting)} more, in {self.name}.tar.gz")
                    break
                fitting.append(cut)
            room -= sum(len(line) + 1 for line in fitting)
            shown += fitting
        return "".join(f"{line}\n" for line in shown)


def _filled(argument: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        argument = argument.replace(name, value)
    return argument


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a step with all processes that it has started: first as Control-C does, so that tests say what failed."""
    child.send_signal(signal.SIGINT)
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        try:
            if number is not None:
                os.killpg(child.pid, number)
            child.wait(END_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _tail(path: Path, most: int, cut: bool) -> bytes:
    """What a file holds, or the end of it."""
    with path.open("rb") as file:
        if cut:
            file.seek(max(0, path.stat().st_size - most))
        return file.read()


def _add(packed: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), int(time.time())
    packed.addfile(member, BytesIO(content))


def _log_lines(log: Path) -> list[str]:
    return [
        line for line in _tail(log, KEPT_LOG_BYTES, cut=True).decode(errors="replace").splitlines() if line.strip()
    ]


def _last_line(log: Path) -> str:
    return next(reversed(_log_lines(log)), "nothing printed").strip("= ")


def _failed_tests(log: Path) -> list[str]:
    """Those of pytest's summary; before there is one, those that it has named so far."""
    lines = _log_lines(log)
    summary = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return summary or [found[1] for line in lines if (found := re.match(r"\[gw\d+\] .*((FAILED|ERROR) .*\S)", line))]


def _found(path: Path) -> Iterator[tuple[str, str]]:
    """What the JSON of a benchmark says of its cases and targets."""
    try:
        result = json.loads(path.read_text())
        for verdict in verdicts(path.stem, result):
            kind, _, line = str(verdict).partition(" ")
            yield kind, line
        for kind in ("failed", "skipped"):
            cases = result.get(kind, [])
            for case in cases.items() if isinstance(cases, dict) else cases:
                yield kind.upper(), f"{path.stem}: {case}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # cut short, or not of a benchmark
        yield "FAILED", f"{path.name} cannot be read: {type(error).__name__}: {error}"


def parts(device: str, shape: str) -> dict[str, list[Step]]:
    """The steps of each part.

    Args:
        device: Where models run.
        shape: Of models; see `shapes.py`.
    """
    python = sys.executable

    def script(name: str, weight: float, *arguments: str, step: str | None = None) -> Step:
        command = [python, f"benchmarks/{name}.py", *arguments, "--device", device]
        command += ["--out", "{out}", "--minutes", "{minutes}"]
        command += ["--rounds", "3"] if name != "speculation" else ["--texts", "1", "--tokens", "64"]
        return Step(name=step or name, command=command, weight=weight)

    def workload(name: str) -> Step:
        command = [python, "-m", "kvboost_hf", "bench", "--workloads", name, "--device", device]
        command += ["--prompts", "4", "--repeats", "1", "--max-new-tokens", "8"]  # it writes nothing before its end
        command += ["--random", {"tiny": "2x128", "small": "8x512", "8b": "32x4096"}[shape]]
        command += ["--dtype", "float32" if device == "cpu" else "bfloat16"]
        command += ["--arms", "exact", "exact-store", "blend-query", "kvboost_fa2"]
        command += ["--peers", "hf-kept", "hf-deepcopy", "hf-offloaded", "hf-batching"]
        command += ["--json", f"{{out}}/bench-{device}-{name}.json"]
        return Step(name=f"bench-{name}", command=command, weight=1.5)

    shaped, workers = ("--shape", shape), str(min(8, os.cpu_count() or 1))
    tests = [python, "-m", "pytest", "-v", "--tb=line", "-rfE", "-m", "gpu", "-W", "default"]
    checked = [f"tests/gpu/test_attention{which}_cuda.py" for which in ("", "_nvrtc")]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", *tests, "-x", "-k", SANITIZED, *checked]
    return {
        "1": [
            Step(name="tests", command=[*tests, "-n", workers, "tests/gpu"], weight=4, judged=True),
            script("attention", 4, "--only", "decode", "coded", "table"),
        ],
        "2": [
            script("attention", 4, "--only", "suffix", "square", "sparse", "tree", "new_lengths"),
            script("awq", 2),
            script("streaming", 3, "--model", "Llama-3.1-70B", "--layers", "16", "--budget", "8.5GB"),
        ],
        "3": [
            script("large", 7, *shaped),
            script("repair", 2, "ttft", *shaped),
            script("tiers", 2, *shaped),
            script("reuse", 1, *shaped),
        ],
        "4": [
            script("speculation", 3, *shaped),
            script("server_shared", 2, *shaped),
            *map(workload, ("chat", "rag")),
            script("kinds", 1, *shaped),
            script("attention_models", 0.5, *shaped),
            *([Step(name="sanitizer", command=sanitizer, judged=True)] if shutil.which(sanitizer[0]) else []),
            script("awq", 0.5, "--tilings", step="awq-tilings"),
        ],
    }


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts("cuda", "8b"))
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive and the lines")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="8b", choices=("tiny", "small", "8b"))
    parser.add_argument("--minutes", type=float, default=9.0)
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    steps = parts(options.device, options.shape)[options.part]
    characters = CHARACTERS[options.part]
    return Part(f"gpu-{options.part}", steps, options.out.absolute(), options.minutes, characters).run()


if __name__ == "__main__":
    sys.exit(main())
