"""The layouts of AWQ checkpoints: against their description, nibble by nibble."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.awq import SHIFTS, in_gemm, in_gemv, in_gptq, in_llm_awq, in_pack_quantized, random_weight
from tests.internals.offload import StoredWeight, dequantize, layout_of, pack, to_gemm, unpack

pytestmark = pytest.mark.daily

SEEDS = st.integers(0, 2**32)
GROUP_SIZES = st.sampled_from([32, 64, 128])


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), SEEDS)
def test_packing_is_exact(rows: int, words: int, seed: int) -> None:
    values = torch.randint(0, 16, (rows, 8 * words), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(values)
    assert (packed.shape, packed.dtype) == ((rows, words), torch.int32)
    assert packed.is_contiguous()
    assert torch.equal(unpack(packed), values)
    assert torch.equal(unpack(pack(values.T.contiguous().T)), values)
    for column, shift in enumerate(SHIFTS):
        assert torch.equal(packed >> shift & 15, values[:, column::8].int())


def test_a_word_by_hand() -> None:
    assert pack(torch.arange(8, dtype=torch.uint8)).tolist() == [0x75316420]
    assert pack(torch.tensor([8, 9, 10, 11, 12, 13, 14, 15], dtype=torch.uint8)).tolist() == [0xFDB9ECA8 - 2**32]


def test_a_block_of_llm_awq_by_hand() -> None:
    """The first words of the first output hold inputs 0, 8, 16, 24 and 1, 9, 17, 25, and the second output follows."""
    weight = random_weight(64, 8, 64)
    levels = weight.levels.zero_()
    for level, (row, column) in enumerate([(0, 0), (8, 0), (16, 0), (24, 0), (1, 0), (9, 0), (2, 0), (0, 1)], 1):
        levels[row, column] = level
    words = in_llm_awq(weight)["qweight"]
    assert (words[0, 0].item(), words[0, 1].item(), words[0, 2].item()) == (0x4321, 0x0065, 0x0007)
    assert words[0, 16].item() == 8
    assert words.count_nonzero() == 4


@settings(max_examples=20, deadline=None)
@given(GROUP_SIZES, st.integers(1, 4), st.integers(1, 3), SEEDS)
def test_all_layouts_are_the_same_weight(group_size: int, groups: int, words: int, seed: int) -> None:
    weight = random_weight(group_size * groups, 8 * words, group_size, seed)
    expected = in_gemm(weight)
    assert torch.equal(dequantize(*expected).double(), weight.dense)
    sizes = len(weight.levels), 8 * words, group_size

    stored = in_gemv(weight)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == layout_of("gemv", *sizes)
    for one, other in zip(to_gemm(StoredWeight("gemv", group_size), stored).packed, expected, strict=True):
        assert torch.equal(one, other)
        assert one.is_contiguous()

    if len(weight.levels) % 64 == 0:
        stored = in_llm_awq(weight)
        assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == layout_of("llm-awq", *sizes)
        for one, other in zip(to_gemm(StoredWeight("llm-awq", group_size), stored).packed, expected, strict=True):
            assert torch.equal(one, other)
            assert one.is_contiguous()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["pack-quantized", "gptq", "gptq_v2"]),
    st.sampled_from([32, 64, 96, 128, 256]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    SEEDS,
)
def test_layouts_of_other_tools(
    version: str, group_size: int, groups: int, words: int, ordered: bool, seed: int
) -> None:
    weight = random_weight(group_size * groups, 8 * words, group_size, seed)
    rows = len(weight.levels)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)) if ordered else None
    if version == "pack-quantized":
        weight = weight._replace(scales=weight.scales.bfloat16().half())
        stored = in_pack_quantized(weight, order)
    else:
        stored = in_gptq(weight, order, v2=version == "gptq_v2")
    how = StoredWeight(version, group_size, index=ordered or version != "pack-quantized", ordered=ordered)
    layout = layout_of(version, rows, 8 * words, group_size, index=how.index)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()} == layout
    found = to_gemm(how, stored)
    assert found.rounded == 0
    assert all(tensor.is_contiguous() for tensor in found.packed)
    assert {**layout_of("gemm", rows, 8 * words, how.gemm_group_size)} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.packed._asdict().items()
    }
    dense = dequantize(*found.packed).double()
    if order is None:
        assert found.order is None
        assert torch.equal(dense, weight.dense)
    else:  # rows of the weight are those of the features that `order` gathers
        assert torch.equal(dense, weight.dense[order][found.order])
        assert groups == 1 or not torch.equal(dense, weight.dense[order])
    on_meta = to_gemm(how, {name: tensor.to("meta") for name, tensor in stored.items()})
    assert [tensor.shape for tensor in on_meta.packed] == [tensor.shape for tensor in found.packed]


def test_words_of_gptq_by_hand() -> None:
    """Zeros of 0 and 9 are stored as 0x90 - 0x11, as GPTQModel subtracts from whole words."""
    weight = random_weight(32, 8, 32)
    weight.zeros[0] = torch.tensor([0, 9, 8, 8, 8, 8, 8, 8], dtype=torch.uint8)
    weight.levels[:8, 0] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8)
    stored = in_gptq(weight)
    assert stored["qzeros"].tolist() == [[0x7777777F]]
    assert stored["qweight"][0, 0].item() == 0x07654321
    assert torch.equal(
        dequantize(*to_gemm(StoredWeight("gptq", 32, index=True), stored).packed).double(), weight.dense
    )


def test_a_group_of_zeros_in_llm_awq() -> None:
    """A scale of zero has no level that zeros would be told by; the weights are zero whatever they are."""
    weight = random_weight(64, 8, 32)
    weight.scales[0] = 0
    found = to_gemm(StoredWeight("llm-awq", 32), in_llm_awq(weight)).packed
    assert torch.equal(dequantize(*found).double(), weight.dense)


@pytest.mark.parametrize("shifts", [tuple(range(0, 32, 4)), (16, 0, 4, 20, 8, 24, 12, 28)])
def test_another_order_of_nibbles_is_found_out(shifts: tuple[int, ...]) -> None:
    weight = random_weight(64, 24, 32)
    assert not torch.equal(dequantize(*in_gemm(weight, shifts)).double(), weight.dense)


def test_an_offset_of_zeros_is_found_out() -> None:
    """GPTQ stores zeros less one, AWQ does not."""
    weight = random_weight(64, 24, 32)
    weight.zeros.clamp_(max=14)
    qweight, _, scales = in_gemm(weight)
    assert not torch.equal(dequantize(qweight, pack(weight.zeros + 1), scales).double(), weight.dense)


@pytest.mark.parametrize(
    ("in_features", "group_size", "width"),
    [(128, 128, 1), (4096, 128, 4), (11008, 128, 11), (13824, 128, 14), (4096, 64, 8), (1152, 64, 4), (96, 32, 4)],
)
def test_padding_of_gemv(in_features: int, group_size: int, width: int) -> None:
    layout = layout_of("gemv", in_features, 8, group_size)
    assert layout["qzeros"] == ((8, width), torch.int32)
    assert layout["scales"] == ((8, 8 * width), torch.float16)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (("gemm", 96, 64, 64), "`in_features` must be a multiple of the group size 64, got 96"),
        (("gemm", 64, 12, 64), "`out_features` must be a multiple of 8, got 12"),
        (("gemm", 64, 64, -1), r"`group_size` must be one of \(32, 64, 128\), got -1"),
        (("llm-awq", 96, 64, 32), "`in_features` must be a multiple of 64 in the layout llm-awq, got 96"),
        (
            ("marlin", 64, 64, 64),
            "`version` must be one of .*'gemv', 'llm-awq'.*, got 'marlin'; take a checkpoint",
        ),
    ],
)
def test_sizes_that_do_not_fit(sizes: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layout_of(*sizes)
