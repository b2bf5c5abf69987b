"""The folders in hub/ are loaded as from the hub: by `custom_generate=FOLDER`, and by the `kernels` library."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations import hub_kernels
from transformers.utils.import_utils import is_kernels_available

from kvboost_hf.assets import load_embedded
from recipes import hub_kernel
from tests.conftest import counted, make_model, random_ids
from tests.internals.compat import attention_function

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


KERNEL = "kvboost/attention"  # as a repository of the hub is named


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the kernel, which `kernels` takes for the repository `KERNEL`."""
    hub_kernel.write(tmp_path)
    monkeypatch.setenv("LOCAL_KERNELS", f"{KERNEL}={tmp_path}")
    return tmp_path


def test_a_kernel_holds_all_of_its_code(kernel: Path) -> None:
    """Whoever loads it has torch, and Triton where there is a GPU; nobody checks that for us."""
    paths = sorted(kernel.rglob("*.py"))
    imported = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").split(".")[0])
    assert {"attend.cu", "warp.cuh"} == {path.name for path in kernel.rglob("*.cu*")}
    assert len(paths) > 40
    assert imported - sys.stdlib_module_names == {"torch", "triton"}


def test_attention_by_the_name_of_a_kernel(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("kernels")
    if not is_kernels_available():
        # Each release of transformers asks for one release of `kernels`, which may not be the one that is installed.
        monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
        monkeypatch.setattr(hub_kernels, "get_kernel_hub", kernels.get_kernel, raising=False)
    for name in ("llama", "gemma2", "gpt_oss"):  # windows and a softcap; attention sinks
        model = make_model(name)
        prompt = random_ids(40, batch=2)
        mask = torch.ones_like(prompt)
        mask[0, :7] = 0  # padding
        told: Any = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        model.set_attn_implementation("eager")
        expected, logits = model.generate(prompt, **told), model(prompt, attention_mask=mask).logits
        model.set_attn_implementation(KERNEL, allow_all_kernels=True)
        loaded = sys.modules[attention_function(model).__module__.split(".")[0]]
        before = loaded.kernel_calls().total()
        assert torch.equal(model.generate(prompt, **told), expected)
        found = model(prompt, attention_mask=mask).logits
        torch.testing.assert_close(found[mask.bool()], logits[mask.bool()], atol=1e-4, rtol=1e-4)
        assert loaded.kernel_calls().total() == before + 7 * model.config.num_hidden_layers
    # `kernels` asks how torch was built, not whether there is a GPU.
    assert loaded.__file__ == str(
        kernel / "build" / f"torch-{'cuda' if torch.version.cuda else 'cpu'}" / "__init__.py"
    )
