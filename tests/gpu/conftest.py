"""How these tests run: all of them on a GPU; without one, one case of each on the host, in Triton's interpreter."""

import warnings
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.device import ON_GPU


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all that is in this folder where there is a GPU; without one, leave out all cases but the first."""
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    if ON_GPU:
        for item in here:
            item.add_marker(pytest.mark.gpu)
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in here:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {each[0] for each in cases.values()}
    left_out = [item for item in here if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(autouse=True)
def _cuda_is_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, what is asked of CUDA's streams has been done already."""
    if ON_GPU:
        return
    for name in ("synchronize", "_sleep", "Stream", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, _does_nothing)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", _warns)


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a function of CUDA."""


def _warns(mode: str) -> None:
    """Stand in for `set_sync_debug_mode`, which warns of itself, whatever the mode."""
    warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
