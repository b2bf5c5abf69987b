"""The folders in hub/ are loaded by `generate(custom_generate=FOLDER)`, as from the hub."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf.assets import load_embedded
from tests.conftest import counted

HUB = Path(__file__).parents[2] / "hub"
TEXT = "Maria lives in Rome. She owns the lamp. It is red. " * 12


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    return load_embedded()


def test_reuse(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    for question in ("Where does Maria live?", "What colour is the lamp?"):
        inputs = tokenizer(TEXT + question, return_tensors="pt")
        plain = model.generate(**inputs, max_new_tokens=8)
        with counted(model) as work:
            found = model.generate(
                **inputs, custom_generate=str(HUB / "reuse"), trust_remote_code=True, max_new_tokens=8
            )
        assert torch.equal(found, plain)
    assert work.tokens < inputs["input_ids"].shape[1] / 2


def test_tree_decoding(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(TEXT + "Where does Maria live?", return_tensors="pt")
    told: dict[str, Any] = {"custom_generate": str(HUB / "tree-decoding"), "trust_remote_code": True}
    plain = model.generate(**inputs, max_new_tokens=12)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **told, draft=load_embedded()[0], max_new_tokens=12), plain)
    with pytest.raises(ValueError, match="`draft` must be"):
        model.generate(**inputs, **told, max_new_tokens=12)
