"""How a model's keys rotate is found out from the model itself: a text further on has the same K/V, rotated."""

import copy
import threading

import pytest
import torch
from torch import nn
from transformers import FalconConfig, FalconForCausalLM, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import check_model_compatibility
from tests.architectures import make_architecture
from tests.conftest import counted, make_model, random_ids
from tests.internals.compat import KeyRotation, key_rotation, rope_regime
from tests.rotations import KINDS, LIMITS, computed, make_rotary

TEXT = random_ids(40, seed=1)


def rotation_of(model: PreTrainedModel) -> KeyRotation:
    found = key_rotation(model)
    assert isinstance(found, KeyRotation), found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_further_on_has_the_same_kv_rotated(kind: str) -> None:
    model = make_rotary(kind)
    start = 500 if kind in LIMITS else 1_000
    assert rope_regime(model, start + TEXT.shape[1]) == b""
    rotation = rotation_of(model)
    for idx, (keys, values) in enumerate(computed(model, TEXT, 0, start)):
        scale = keys.std()
        torch.testing.assert_close(values[1], values[0], atol=2e-4, rtol=2e-4)
        moved = rotation.rotate(idx, keys[0], start)
        torch.testing.assert_close(moved / scale, keys[1] / scale, atol=2e-3, rtol=0)
        back = rotation.rotate(idx, keys[1], -start)
        torch.testing.assert_close(back / scale, keys[0] / scale, atol=2e-3, rtol=0)
        if rotation.layers[idx] is not None:
            assert (keys[0] - keys[1]).abs().max() > 0.1 * scale


@pytest.mark.daily
@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("default", [("half", 0, 8)] * 2),
        ("partial (phi)", [("half", 0, 4)] * 2),
        ("partial, interleaved (glm)", [("interleaved", 0, 4)] * 2),
        ("by layer type (gemma3)", [("half", 0, 8)] * 4),
        ("none in full layers, interleaved (cohere2)", [("interleaved", 0, 8), None] * 2),
        ("no positions in some layers (smollm3)", [*[("half", 0, 8)] * 3, None]),
    ],
)
def test_what_is_found(kind: str, layers: list[tuple[str, int, int] | None]) -> None:
    found = rotation_of(make_rotary(kind)).layers
    assert layers == [layer and (layer.style, layer.offset, layer.inv_freq.numel()) for layer in found]


def test_layers_that_rotate_alike_share_one_object() -> None:
    first, second, third, fourth = rotation_of(make_rotary("by layer type (gemma3)")).layers
    assert first is third
    assert second is fourth
    assert first is not None
    assert second is not None
    assert not torch.allclose(first.inv_freq, second.inv_freq)


@pytest.mark.daily
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latent_attention_keeps_rotated_keys_as_values(dtype: torch.dtype) -> None:
    rotation = rotation_of(make_model("deepseek_v3").to(dtype))
    assert [rotation.rotated(idx) for idx in range(2)] == [1, 1]
    assert rotation_of(make_model("llama").to(dtype)).rotated(0) == 0


@pytest.mark.daily
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "its positions are not rotary"),  # learned
        ("opt", "its positions are not rotary"),
        ("ctrl", "its positions are not rotary"),  # sines that are added
        ("bloom", "its forward takes no position_ids"),  # ALiBi
        ("mpt", "its forward takes no position_ids"),
        ("qwen2_vl-multimodal", "its positions have several dimensions"),
        ("llama4_text", "some of its layers attend within fixed stretches of positions"),
        ("hrm_text", "its decoder layers cannot be told apart"),
        ("hunyuan_v1_dense", "its keys change with positions by more than a rotation"),  # normalized after it
        ("mamba2", "only keys and values can be moved, and it keeps something else (LinearAttentionLayer)"),
        ("deepseek_v32", "only keys and values can be moved, and it keeps something else (DynamicIndexedLayer)"),
        ("jamba", "nothing of it can be reused"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot reuse K/V")
def test_what_cannot_be_moved_and_why(name: str, reason: str) -> None:
    report = check_model_compatibility(make_architecture(name), strict=False)
    assert not report.moved
    assert str(report.moved_reason).startswith(reason)


def test_alibi_beside_rotary_code() -> None:
    config = FalconConfig(vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True)
    assert key_rotation(FalconForCausalLM(config).eval()) == "its positions are not rotary"


class LearnedToo(LlamaForCausalLM):
    """Rotary and learned positions."""

    def __init__(self, config: object) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self.places = nn.Embedding(1024, config.hidden_size)  # type: ignore[attr-defined]

    def forward(self, input_ids=None, position_ids=None, past_key_values=None, **kwargs):
        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values}
        return super().forward(inputs_embeds=self.model.embed_tokens(input_ids) + self.places(position_ids), **kwargs)


def test_positions_that_are_in_the_values_too(llama: PreTrainedModel) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = LearnedToo(llama.config).eval().to(dtype)
        assert str(key_rotation(model)).startswith("its values depend on positions, too")


def test_frequencies_that_can_hardly_be_told_apart(llama: PreTrainedModel) -> None:
    """In float32 they can; in bfloat16 it is not guessed."""
    right = llama.model.rotary_emb.inv_freq.clone()
    near = right.clone()
    near[-1] += 2e-7
    llama.register_buffer("another_inv_freq", near, persistent=False)
    layer = rotation_of(llama).layers[0]
    assert layer is not None
    assert torch.equal(layer.inv_freq, right)
    for module in (llama.to(torch.bfloat16), llama.model.rotary_emb):  # type: ignore[arg-type]
        for name, value in (("another_inv_freq", near), ("inv_freq", right)):
            if name in module._buffers:
                module._buffers[name] = value  # as from_pretrained(dtype=...) leaves them
    assert key_rotation(llama) == "its keys do not tell which of several rotations is theirs"


def test_it_fails_without_harm(llama: PreTrainedModel) -> None:
    llama.model.rotary_emb.register_forward_pre_hook(lambda module, args, kwargs: 1 / 0, with_kwargs=True)
    assert str(key_rotation(llama)).startswith("it fails on a few tokens at later positions (ZeroDivisionError")


def test_it_is_found_once_by_20_tokens(llama: PreTrainedModel) -> None:
    with counted(llama) as work:
        found = rotation_of(llama)
    assert (work.calls, work.tokens) == (1, 20)
    with counted(llama) as work:
        assert key_rotation(llama) is found
        assert check_model_compatibility(llama).moved
    assert copy.deepcopy(llama).__dict__["_kvboost_hf__Findings"].known == {}
    assert rotation_of(llama.to(torch.bfloat16)) is not found  # type: ignore[arg-type]


def test_threads_find_one(llama: PreTrainedModel) -> None:
    found: list[KeyRotation | str] = []
    threads = [threading.Thread(target=lambda: found.append(key_rotation(llama))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(one is found[0] for one in found)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "default"])
@pytest.mark.parametrize("length", [10, 700])
def test_no_trace_is_left(kind: str, length: int) -> None:
    """Neither after short texts nor where the frequencies are those of a long one."""
    model = make_rotary(kind)
    with torch.no_grad():
        model(random_ids(length))
    rotary = model.model.rotary_emb
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    identities = {name: id(buffer) for name, buffer in model.named_buffers()}
    attributes = {name: value for name, value in rotary.__dict__.items() if isinstance(value, int | float | str)}
    state = torch.get_rng_state()
    found = rotation_of(model).layers[0]
    assert found is not None
    assert torch.equal(found.inv_freq, rotary.original_inv_freq)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == identities
    assert attributes.items() <= rotary.__dict__.items()
    assert torch.equal(torch.get_rng_state(), state)


def test_moved_is_said_of_those_whose_frequencies_depend_on_the_length() -> None:
    """Within the original length; beyond it `rope_regime` tells."""
    for kind in ("dynamic", "longrope"):
        assert check_model_compatibility(make_rotary(kind)).moved


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_the_same_is_found(name: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        expected = rotation_of(make_model(name, seed)).layers
        found = rotation_of(make_model(name, seed).to(dtype)).layers
        for one, other in zip(found, expected, strict=True):
            assert one is not None
            assert other is not None
            assert (one.style, one.offset) == (other.style, other.offset)
