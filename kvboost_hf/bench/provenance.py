"""Records the commit, hardware, versions and command of a run."""

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from kvboost_hf import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The conditions of a run.

    Args:
        command: That repeats it.
        commit: Of the checkout, with a plus where files differ from it; None outside of one.
        hardware: The GPU, or the processor.
        threads: Of PyTorch.
        versions: Of this package, PyTorch, transformers and Python.
    """

    command: str
    commit: str | None
    hardware: str
    threads: int
    versions: dict[str, str]

    def __str__(self) -> str:
        told = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        commit = "not in a checkout" if self.commit is None else f"commit {self.commit}"
        return f"{self.hardware}, threads: {self.threads}; {told}; {commit}; {self.command}"


def provenance(command: str, device: str) -> Provenance:
    """The conditions of a run in this process.

    Args:
        command: That was given.
        device: Where the model runs.
    """
    place = torch.device(device)
    return Provenance(
        command=command,
        commit=_commit(),
        hardware=torch.cuda.get_device_name(place) if place.type == "cuda" else _processor(),
        threads=torch.get_num_threads(),
        versions={
            "kvboost_hf": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "Python": platform.python_version(),
        },
    )


def _processor() -> str:
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} CPU"


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed: whatever repository holds it is not ours
        return None
    try:
        head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=root, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=root, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")
