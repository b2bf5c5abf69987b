"""Codes come back as they were packed, and layers do not know of each other."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost_hf.config import KVQuantConfig
from tests.codecs import assert_keeps_contract
from tests.internals.cache import make_codec, pack, packed_width, random_rotation, rotated, rotated_back, unpack
from tests.internals.compat import LayerRotation

DIMS = st.integers(1, 136).map(lambda half: 2 * half)
BITS = st.sampled_from([1, 2, 3, 4, 8])
ROTATIONS = st.sampled_from(
    [None, LayerRotation(torch.arange(8) / 8, "half", 0), LayerRotation(torch.arange(5) / 5, "interleaved", 4)]
)
CONFIGS = st.one_of(
    st.builds(
        KVQuantConfig,
        key_bits=st.floats(2, 4),
        value_bits=st.sampled_from([2, 4]),
        rotation=st.sampled_from(["hadamard", "haar"]),
        qjl=st.booleans(),
        remove_key_mean=st.booleans(),
        norm_correction=st.booleans(),
        grouped_values=st.booleans(),
    ),
    st.builds(
        KVQuantConfig,
        method=st.just("kivi"),
        key_bits=st.sampled_from([2, 4, 8]),
        value_bits=st.sampled_from([2, 4, 8]),
        group_size=st.sampled_from([16, 64]),
    ),
)


@given(DIMS, BITS, st.integers(0, 4), st.integers(0, 2**32))
def test_packing_is_exact(dim: int, bits: int, tokens: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (2, tokens, dim), generator=draw, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (2, tokens, packed_width(dim, bits))
    assert packed.untyped_storage().nbytes() == packed.numel()
    assert torch.equal(unpack(packed, bits, dim), codes)
    assert -(-dim * bits // 8) <= packed_width(dim, bits) <= dim * bits / 8 + 2


@given(st.integers(1, 64), st.integers(0, 255), st.integers(0, 2**32))
def test_halves_share_bytes(half: int, byte: int, seed: int) -> None:
    codes = torch.randint(0, 16, (2 * half,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert pack(codes, 4).tolist() == (codes[:half] + 16 * codes[half:]).tolist()


@given(
    st.sampled_from([1, 2, 2.5, 3, 4]),
    st.sampled_from([32, 64, 128, 256]),
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.integers(0, 2**32),
)
@settings(deadline=None)
def test_a_vector_has_the_same_codes_in_any_company(bits: float, dim: int, sizes: list[int], seed: int) -> None:
    """All at once, in chunks or one by one; but for the mean, which is that of the chunk."""
    codec = make_codec(KVQuantConfig(value_bits=bits))
    x = torch.randn(2, 3, sum(sizes), dim, generator=torch.Generator().manual_seed(seed))
    bulk = codec.encode(x, "values", [None, None])
    for chunks in (sizes, [1] * min(sum(sizes), 5)):
        parts = [codec.encode(part, "values", [None, None]) for part in x[:, :, : sum(chunks)].split(chunks, dim=2)]
        for name, plane in bulk.items():
            assert torch.equal(torch.cat([part[name] for part in parts], dim=2), plane[:, :, : sum(chunks)])


@given(st.sampled_from([32, 64, 128, 256]), st.integers(1, 40), st.integers(0, 2**32))
@settings(deadline=None)
def test_passes_are_the_product_of_matrices(dim: int, rows: int, seed: int) -> None:
    x = torch.randn(2, rows, dim, generator=torch.Generator().manual_seed(seed))
    found = rotated(x.clone(), "hadamard", 3)
    torch.testing.assert_close(found, x @ random_rotation("hadamard", dim, 3, x.device).mT, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotated_back(found, "hadamard", 3), x, atol=1e-5, rtol=0)


@given(
    CONFIGS,
    st.sampled_from(["keys", "values"]),
    st.lists(ROTATIONS, min_size=1, max_size=4),
    st.integers(0, 40),
    st.sampled_from([18, 32, 80]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=60, deadline=None)
def test_layers_one_by_one_are_all_at_once(config, role, rotations, tokens, head_dim, dtype) -> None:
    codec = make_codec(config)
    x = torch.randn(len(rotations), 2, tokens, head_dim, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    assert_keeps_contract(codec, x, role, rotations)
