"""What others do to a cache, a layer or a module on a CUDA device: tests of the CPU with the model on the device."""

from typing import Any

import pytest
import torch

from tests.conftest import make_model
from tests.gpu.device import DEVICE
from tests.parity import test_never_poisoned as on_cpu

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
]
EDITS = [edit for edit in on_cpu.EDITS if edit is not on_cpu.write_through_numpy]  # NumPy reaches no device


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = on_cpu.generate

    def generate_there(model: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return generate(model, ids.to(DEVICE), *args, **kwargs)

    monkeypatch.setattr(on_cpu, "make_model", lambda name: make_model(name).to(DEVICE))
    monkeypatch.setattr(on_cpu, "generate", generate_there)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("edit", EDITS, ids=on_cpu.name_of)
def test_edits_between_two_calls(name: str, edit: on_cpu.Edit) -> None:
    on_cpu.test_edits_between_two_calls(name, edit)


@pytest.mark.parametrize("edit", EDITS, ids=on_cpu.name_of)
def test_edits_before_the_last_tokens_are_stored(edit: on_cpu.Edit) -> None:
    on_cpu.test_edits_before_the_last_tokens_are_stored(edit)


def test_a_hook_that_counts() -> None:
    on_cpu.test_a_hook_that_counts()


@pytest.mark.parametrize("attached", [False, True], ids=["passed", "attached"])
def test_hooks_that_count_tokens(attached: bool) -> None:
    on_cpu.test_hooks_that_count_tokens("llama", attached)


@pytest.mark.parametrize("where", ["layers.0", "layers.1.self_attn.k_proj"])
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_hooks_that_write_to_one_number_of_a_prompt(where: str, inference: bool) -> None:
    on_cpu.test_hooks_that_write_to_one_number_of_a_prompt(where, False, inference)


def test_a_hook_that_begins_to_change_what_is_computed() -> None:
    on_cpu.test_a_hook_that_begins_to_change_what_is_computed()
