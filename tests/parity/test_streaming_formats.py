"""Checkpoints in 4 bits, each written by its own tool: streamed, beside the logits that the tool computes."""

import json
import logging
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvboost_hf import (
    StreamingConfig,
    check_model_compatibility,
    load_streamed,
    streaming_plan,
    streaming_stats,
    what_fits,
)
from kvboost_hf.assets import EMBEDDED_MODEL_DIR
from tests.awq import in_gptq, random_weight
from tests.formats.write import CASES, HERE, IDS, LOGITS
from tests.internals.attention import kernel_calls
from tests.internals.cli import main
from tests.internals.offload import AwqLinear, estimate_sizes, use_backend
from tests.offload.poisoning import PoisoningBackend
from tests.streaming import FULL_STREAM

UNSAVED = {  # cases that no AWQ checkpoint can hold
    "compressed_tensors_mixed": "groups of one size",
    "gptq_v2": "groups of one size",
    "gptq_ordered": "no place for an index of groups",
    "gptq_moe": "no place for an index of groups",
}


EXACT = replace(FULL_STREAM, quant_kernel="torch")  # in float32, also on a CPU


def load(folder: Path, config: StreamingConfig = EXACT, dtype: torch.dtype = torch.float32) -> Any:
    with use_backend(PoisoningBackend):
        return load_streamed(str(folder), config, dtype=dtype)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS.to(model.device)).logits
    return found


def of_tool(case: str) -> torch.Tensor:
    return load_file(HERE / case / LOGITS)["logits"]


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a case, to change."""
    return Path(shutil.copytree(HERE / request.param, tmp_path / "copied"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_as_by_the_tool(case: str) -> None:
    model = load(HERE / case)
    torch.testing.assert_close(logits(model), of_tool(case), atol=2e-4, rtol=2e-4)
    stats = streaming_stats(model)
    assert stats is not None
    assert stats.misses == 1
    assert any(isinstance(module, AwqLinear) for module in model.modules())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["full_resident", "partial_resident", "ffn_only_stream", "files"])
def test_modes_are_identical(case: str, mode: Any, tmp_path: Path) -> None:
    wanted = logits(load(HERE / case))
    given: dict[str, Any] = {"residency_mode": mode}
    if mode == "files":
        given = {"residency_mode": "full_stream", "disk_folder": str(tmp_path)}
    elif mode == "partial_resident":
        given["keep_first_k"] = 0
    for _ in range(2):  # the second time from the same files
        assert torch.equal(logits(load(HERE / case, replace(EXACT, **given))), wanted)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case: str, dtype: torch.dtype) -> None:
    model = load(HERE / case, dtype=dtype)
    assert model.dtype == dtype
    found, wanted = logits(model).float(), of_tool(case)
    assert (found - wanted).norm() < 8 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("case", CASES)
def test_on_a_cpu_by_default(case: str) -> None:
    """By PyTorch's 4-bit product, of whatever format the checkpoint is; it rounds to bfloat16."""
    model, before = load(HERE / case, FULL_STREAM), kernel_calls()
    found, wanted = logits(model).float(), of_tool(case)
    assert set(kernel_calls() - before) == {"int4pack.awq_matmul"}
    # In a mixture of experts a token near a border of the router takes another expert.
    off = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert off.median() < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("case", CASES)
def test_estimate_is_what_loading_finds(case: str) -> None:
    plan = streaming_plan(load(HERE / case, dtype=torch.float16))
    assert plan is not None
    config = AutoConfig.from_pretrained(HERE / case)
    assert estimate_sizes(config, FULL_STREAM, dtype=torch.float16).layer_bytes == plan.sizes.layer_bytes
    assert what_fits(config, "1GB").sizes.layer_bytes == plan.sizes.layer_bytes


@pytest.mark.parametrize("case", CASES)
def test_saved_as_awq(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(HERE / case)
    if case in UNSAVED:
        with caplog.at_level(logging.WARNING, "kvboost_hf"), pytest.raises(ValueError, match="not serializable"):
            model.save_pretrained(tmp_path)
        assert UNSAVED[case] in caplog.text
        return
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (saved["quant_method"], saved["version"], saved["group_size"]) == ("awq", "gemm", 32)
    again = load(tmp_path)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("case", ["compressed_tensors", "gptq_ordered"])
def test_check_says_yes(case: str) -> None:
    report = check_model_compatibility(load(HERE / case))
    assert report.exact
    assert report.streaming


@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="transformers loads these with it")
@pytest.mark.parametrize("copied", ["compressed_tensors", "gptq", "gptq_ordered"], indirect=True)
def test_commands_need_no_tool(
    copied: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """`check` loads the model as a server does: without the package that transformers asks for."""
    for file in EMBEDDED_MODEL_DIR.glob("tokenizer*"):
        shutil.copy(file, copied)
    with caplog.at_level(logging.WARNING, "kvboost_hf"):
        assert main(["check", "--model", str(copied), "--device", "cpu"]) == 0
    assert "exact reuse: yes" in (said := capsys.readouterr().out)
    assert "streaming: yes" in said
    assert "loaded without the package that transformers needs" in caplog.text
    assert main(["fits", "--model", str(copied), "--vram-budget", "1GB"]) == 0
    assert "resident" in capsys.readouterr().out
    edit_config(copied, quant_method="hqq")
    assert main(["fits", "--model", str(copied), "--vram-budget", "1GB"]) != 0
    assert "quantized with 'hqq'" in capsys.readouterr().err


@pytest.mark.parametrize("copied", ["compressed_tensors", "compressed_tensors_mixed"], indirect=True)
def test_order_of_activations_of_compressed_tensors(copied: Path) -> None:
    """`weight_g_idx` names the group of each input; releases until August 2026 wrote it (`actorder="group"`)."""
    wanted = logits(load(copied))
    draw = torch.Generator().manual_seed(0)

    def permute(tensors: dict[str, torch.Tensor]) -> None:
        """Let features come in another order, and with them the inputs of weights: nothing changes."""
        order = torch.randperm(96, generator=draw)
        down = "model.layers.1.mlp.down_proj.weight"
        tensors[f"{down}_g_idx"] = (torch.arange(96) // 32)[order].int()
        tensors[f"{down}_packed"] = inputs_of(tensors[f"{down}_packed"], order)
        for part in ("gate_proj", "up_proj"):  # whose outputs are these features
            weight = f"model.layers.1.mlp.{part}.weight"
            tensors[f"{weight}_packed"] = tensors[f"{weight}_packed"][order]
            tensors[f"{weight}_scale"] = tensors[f"{weight}_scale"][order]
            if f"{weight}_zero_point" in tensors:
                tensors[f"{weight}_zero_point"] = inputs_of(tensors[f"{weight}_zero_point"].T, order).T

    edit_tensors(copied, permute)
    groups = json.loads((copied / "config.json").read_text())["quantization_config"]["config_groups"]
    for group in groups.values():
        group["weights"]["actorder"] = "group"
    edit_config(copied, config_groups=groups)
    model = load(copied)
    assert model.model.layers[1].mlp.down_proj.order is not None
    torch.testing.assert_close(logits(model), wanted, atol=2e-5, rtol=2e-5)


def inputs_of(words: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Packed weights [out, in / 8] with inputs in another order, nibble by nibble."""
    levels = torch.stack([words >> 4 * place & 15 for place in range(8)], -1).flatten(1)[:, order].long()
    packed = sum(levels[:, place::8] << 4 * place for place in range(8))
    assert isinstance(packed, torch.Tensor)
    return packed.to(torch.int32)


@pytest.mark.parametrize("copied", ["compressed_tensors"], indirect=True)
def test_an_order_that_config_does_not_tell(copied: Path) -> None:
    """It has no place in the plan, and is no reason to compute nonsense."""
    index = (torch.arange(96) % 3).int()
    edit_tensors(copied, lambda tensors: tensors.update({"model.layers.1.mlp.down_proj.weight_g_idx": index}))
    model = load(copied)
    assert model.model.layers[1].mlp.down_proj.order is not None
    assert model.model.layers[0].mlp.down_proj.order is None


@pytest.mark.parametrize("copied", ["compressed_tensors"], indirect=True)
def test_groups_that_do_not_fit(copied: Path) -> None:
    index = torch.zeros(96, dtype=torch.int32)
    edit_tensors(copied, lambda tensors: tensors.update({"model.layers.1.mlp.down_proj.weight_g_idx": index}))
    with pytest.raises(ValueError, match=r"mlp.down_proj .* must have 32 rows, got \[96, 0, 0\]"):
        load(copied)


@pytest.mark.parametrize("copied", ["compressed_tensors"], indirect=True)
@pytest.mark.parametrize(
    ("scale", "words"), [(1e5, "within float16, got one of 99840"), (1e-7, "1 scales .* rounded")]
)
def test_scales_that_float16_does_not_hold(
    copied: Path, scale: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight_scale"][5, 1] = scale

    edit_tensors(copied, change)
    if scale > 1:
        with pytest.raises(ValueError, match=f"mlp.up_proj of Qwen2DecoderLayer cannot be streamed.*{words}"):
            load(copied)
        return
    with caplog.at_level(logging.WARNING, "kvboost_hf"):
        assert logits(load(copied)).isfinite().all()
    assert re.search(words, caplog.text)


@pytest.mark.parametrize("copied", ["gptq_ordered"], indirect=True)
def test_an_order_that_config_denies(copied: Path) -> None:
    edit_config(copied, desc_act=False)
    with pytest.raises(ValueError, match=r"in order where config.json says `desc_act` false.*Set it to true"):
        load(copied)


@pytest.mark.parametrize("copied", ["gptq"], indirect=True)
def test_gptq_without_an_index_of_groups(copied: Path) -> None:
    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    edit_tensors(copied, remove)
    edit_config(copied, desc_act=True)
    torch.testing.assert_close(logits(load(copied)), of_tool("gptq"), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("copied", ["gptq"], indirect=True)
def test_a_head_in_4_bits(copied: Path, tied: bool) -> None:
    """`lm_head: true`: it is outside of the layers, and stays on the device; whatever the configuration ties it to."""
    weight = random_weight(64, 64, 32, seed=3)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head.{name}": tensor for name, tensor in in_gptq(weight).items()})

    edit_tensors(copied, change)
    edit_config(copied, lm_head=True)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    found = load(copied)
    assert isinstance(found.lm_head, AwqLinear)
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(found.lm_head(hidden), hidden @ weight.dense.float(), atol=1e-4, rtol=1e-4)
    assert logits(found).isfinite().all()


@pytest.mark.daily
@pytest.mark.parametrize("copied", ["gptq"], indirect=True)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 8}, "`bits` of a GPTQ checkpoint must be 4 for all of its weights to stream it, got 8"),
        ({"dynamic": {r".*down_proj": {"bits": 8}}}, "`bits` .* got 8"),
        ({"checkpoint_format": "marlin"}, "`checkpoint_format` .* must be 'gptq' or 'gptq_v2' .* got 'marlin'"),
        ({"is_marlin_format": True}, "`checkpoint_format` .* got 'marlin'"),
        ({"pack_dtype": "int64"}, "`pack_dtype` .* must be 'int32' .* got 'int64'"),
        ({"rotation": "hadamard"}, "`rotation` .* must be None"),
    ],
)
def test_other_kinds_of_gptq(copied: Path, change: dict[str, Any], words: str) -> None:
    edit_config(copied, **change)
    with pytest.raises(ValueError, match=words):
        load(copied)
    with pytest.raises(ValueError, match=words):
        what_fits(AutoConfig.from_pretrained(copied), "1GB")


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"weights": {"num_bits": 8}}, "`num_bits` of 'group_0' .* must be 4 to stream it, got 8"),
    ({"weights": {"type": "float"}}, "`type` of 'group_0' .* must be 'int' to stream it, got 'float'"),
    ({"weights": {"strategy": "tensor"}}, "`strategy` of 'group_0' .* must be 'group' or 'channel'"),
    ({"format": "marlin-24"}, "`format` of 'group_0' .* must be 'pack-quantized' to stream it, got 'marlin-24'"),
    ({"input_activations": {"num_bits": 8}}, "`input_activations` of 'group_0' .* must be None"),
]


@pytest.mark.daily
@pytest.mark.parametrize("copied", ["compressed_tensors"], indirect=True)
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_other_schemes_of_compressed_tensors(copied: Path, change: dict[str, Any], words: str) -> None:
    config = json.loads((copied / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    group.update(change | {"weights": group["weights"] | change.get("weights", {})})
    edit_config(copied, **config)
    with pytest.raises(ValueError, match=words):
        load(copied)
    with pytest.raises(ValueError, match=words):
        what_fits(AutoConfig.from_pretrained(copied), "1GB")


@pytest.mark.daily
@pytest.mark.parametrize("copied", ["compressed_tensors"], indirect=True)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_scheme": {"num_bits": 8}}, "`kv_cache_scheme` of a compressed-tensors checkpoint must be empty"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "`transform_config` .* must be empty"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "must be dense, got 'sparse-24-bitmask'"),
    ],
)
def test_more_than_weights_in_4_bits(copied: Path, change: dict[str, Any], words: str) -> None:
    edit_config(copied, **change)
    with pytest.raises(ValueError, match=words):
        load(copied)


@pytest.mark.parametrize("copied", ["compressed_tensors"], indirect=True)
def test_packed_in_name_only(copied: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_packed")]:
            tensors[name.removesuffix("_packed")] = tensors.pop(name)

    edit_tensors(copied, rename)
    with pytest.raises(
        ValueError, match="packed by compressed-tensors, but none of its tensors ends in 'weight_packed'"
    ):
        load(copied)


@pytest.mark.parametrize("copied", ["compressed_tensors_moe"], indirect=True)
def test_experts_that_are_not_alike(copied: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.experts.2.gate_proj.weight_scale"
        tensors[name] = tensors[name][:, :1]

    edit_tensors(copied, change)
    with pytest.raises(ValueError, match=r"experts.*gate_proj must have the same groups in all experts"):
        load(copied)
