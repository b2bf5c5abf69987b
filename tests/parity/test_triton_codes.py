"""The Triton kernel over codes against float64, in Triton's interpreter."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kvboost_hf.config import KVQuantConfig
from tests.attention import Problem, assert_within_budget, of_codes
from tests.internals.attention import AttentionCall, Part, kernel_calls, ops, reference, use_tier
from tests.internals.cache import Role, make_codec
from tests.internals.compat import LayerRotation
from tests.internals.top import CodePlanes
from tests.internals.triton import AttentionTiling as Tiling
from tests.internals.triton import codes

BLOCKS = 3
BF16, FP16 = torch.bfloat16, torch.float16


def turning(dim: int) -> LayerRotation:
    return LayerRotation(1e2 ** -torch.linspace(0, 1, dim // 2), "half", 0)


def encoded(
    config: KVQuantConfig | str, x: torch.Tensor, role: Role, rotation: LayerRotation | None
) -> tuple[CodePlanes | None, torch.Tensor]:
    """Blocks [batch, blocks, heads, tokens, head_dim] as codes, and what their codec makes of them."""
    codec, (batch, blocks, *shape) = make_codec(config), x.shape
    planes = codec.encode(x.flatten(0, 1), role, [rotation] * (batch * blocks))
    decoded = codec.decode(planes, (batch * blocks, *shape), torch.float32, role, rotation).view(x.shape)
    buffers = {name: plane.unflatten(0, (batch, blocks)) for name, plane in planes.items()}
    for name, plane in buffers.items():  # views of larger buffers
        buffer = plane.new_zeros(batch, blocks + 2, *plane.shape[2:])
        buffer[:, :blocks] = plane
        buffers[name] = buffer[:, :blocks]
    return codec.code_planes(buffers, role, rotation, shape[1], shape[2]), decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A problem of which the columns are codes."""

    config: KVQuantConfig | str
    problem: Problem = field(default_factory=lambda: Problem(queries=1))
    tokens: int = 32
    rotated: bool = True
    splits: int = 1
    block_n: int = 16

    def planes(self, role: Role) -> tuple[CodePlanes, torch.Tensor]:
        problem, draw = self.problem, torch.Generator().manual_seed(5 + len(role))
        shape = (problem.batch, BLOCKS, problem.kv_heads, self.tokens, problem.head_dim)
        x = torch.randn(shape, generator=draw) + 2 * torch.randn(problem.head_dim, generator=draw)
        planes, decoded = encoded(
            self.config, x.to(problem.dtype), role, turning(problem.head_dim) if self.rotated else None
        )
        assert planes is not None
        return planes, decoded

    def given(self) -> tuple[AttentionCall, CodePlanes, CodePlanes, torch.Tensor]:
        lengths = torch.tensor([self.tokens, self.tokens // 3, self.tokens - 1], dtype=torch.int32)
        call = self.problem.call(scale=self.problem.scale / 2)
        return call, self.planes("keys")[0], self.planes("values")[0], lengths

    def found(self, **changed: Any) -> Part:
        names = ("call", "keys", "values", "lengths")
        call, keys, values, lengths = (changed.get(*each) for each in zip(names, self.given(), strict=True))
        assert codes.can_attend(call.query, keys, values)
        tiling = Tiling(block_m=16, block_n=self.block_n, warps=1, stages=1, border_stages=1, splits=self.splits)
        return codes.attend_codes(call, keys, values, lengths, tiling)


Given = tuple[AttentionCall, CodePlanes, CodePlanes, torch.Tensor]


def check(case: Coded, found: Part, given: Given | None = None) -> None:
    """Assert that a result is within the budget; by default that of what the case is given."""
    assert all(each.dtype == torch.float32 for each in found)
    call, keys, values, lengths = given or case.given()
    # Products of 16 bits are of float16: a rounding is then an eighth of one of bfloat16.
    unit = 1 / 8 if call.query.dtype == BF16 else 1.0
    # Queries are rounded when they are rotated; then as products with steps, or divided by their size, beside the
    # numbers of a codebook; and as products with the mean, beside cosines and sines.
    products = 1 + (keys.codebook is not None) + 2 * (keys.mean is not None)
    operands = (keys.rotation is not None) + products * unit**2
    weights = unit * (1 + (values.codebook is not None))  # products with steps; numbers of a codebook
    allowed = of_codes(keys, values) | {"operands": operands, "weights": weights}
    if keys.mean is not None and call.query.itemsize == 2:
        # Products with a mean of less than 2**-14, the least normal number of float16, are off by 2**-25.
        least = 2**-25 / (torch.finfo(call.query.dtype).eps / 2)
        allowed["key_sizes"] = allowed["key_sizes"] + least * call.query.shape[3] ** 0.5
    assert_within_budget(found, *reference.over_codes(call, keys, values, lengths, torch.float64), **allowed)


KIVI = KVQuantConfig(method="kivi", group_size=16)
TURBO = KVQuantConfig()
CASES = {
    "int8": Coded(config="int8"),
    "int4": Coded(config="int4", problem=Problem(queries=1, heads=8, dtype=BF16), splits=3, block_n=32),
    "int2": Coded(config="int2", problem=Problem(queries=5, dtype=FP16, head_dim=64), splits=2, block_n=32),
    "int4, small groups": Coded(config=KIVI, problem=Problem(queries=3, dtype=BF16, head_dim=64, batch=1), splits=2),
    "int8, int2": Coded(
        config=replace(KIVI, key_bits=8, value_bits=2), problem=Problem(heads=2, softcap=3.0, batch=1)
    ),
    "int2, odd sizes": Coded(
        config=replace(KIVI, key_bits=2, value_bits=8),
        problem=Problem(head_dim=80, dtype=FP16, batch=1),
        tokens=40,
        splits=2,
    ),
    "turboquant": Coded(config=TURBO, problem=Problem(queries=1, dtype=BF16), splits=2),
    "turboquant:3": Coded(config="turboquant:3", problem=Problem(queries=3, heads=8, kv_heads=1), block_n=32),
    "turboquant:2": Coded(config="turboquant:2", problem=Problem(queries=2, dtype=FP16, softcap=5.0), splits=5),
    "turboquant:1": Coded(config="turboquant:1", problem=Problem(queries=1), rotated=False, splits=2),
    "turboquant:3:1, haar": Coded(
        config=replace(TURBO, key_bits=3, value_bits=1, rotation="haar"),
        problem=Problem(queries=2, head_dim=80, dtype=BF16, batch=1),
    ),
    "turboquant, with the mean": Coded(
        config=replace(TURBO, remove_key_mean=False, norm_correction=False, value_bits=3),
        problem=Problem(queries=20, batch=1, dtype=FP16),
        block_n=32,
    ),
    "turboquant:4, int2 values": Coded(
        config=replace(TURBO, grouped_values=True, value_bits=2, group_size=32),
        problem=Problem(queries=1, head_dim=64, dtype=BF16, batch=1),
        tokens=48,
        splits=3,
    ),
    "turboquant:2, int4 values": Coded(
        config=replace(TURBO, grouped_values=True, key_bits=2, rotation="haar", group_size=128),
        problem=Problem(queries=3, head_dim=48, batch=1),
        rotated=False,
        block_n=32,
    ),
    "int4, groups across halves": Coded(
        config=replace(KIVI, group_size=48), problem=Problem(queries=1, head_dim=64, dtype=FP16, batch=1), tokens=48
    ),
    "int4, one group": Coded(config=replace(KIVI, group_size=96), problem=Problem(queries=1, head_dim=80, batch=1)),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@cases
def test_codes(case: Coded) -> None:
    check(case, case.found())


@pytest.mark.daily
@cases
@pytest.mark.parametrize("role", ["keys", "values"])
def test_planes_are_what_the_codec_decodes(case: Coded, role: Role) -> None:
    planes, decoded = case.planes(role)
    found = reference.decode(planes, case.problem.head_dim, torch.float32)
    torch.testing.assert_close(found, decoded, rtol=1e-5, atol=1e-5)


@pytest.mark.daily
@pytest.mark.parametrize("config", ["turboquant:3.5", KVQuantConfig(qjl=True), "raw"], ids=str)
def test_what_cannot_be_read_is_decoded(config: KVQuantConfig | str) -> None:
    assert encoded(config, torch.randn(1, 1, 2, 16, 32), "keys", None)[0] is None


SIZES = {  # of queries, keys and values
    "small keys": (1e6, 1e-6, 1.0),
    "large keys": (1e-4, 1e4, 1.0),
    "small values": (1.0, 1.0, 1e-6),
    "large values": (1.0, 1.0, 1e4),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("config", ["int8", "int4", "turboquant"])
def test_numbers_of_any_size(config: str, sizes: tuple[float, float, float]) -> None:
    case = Coded(config=config, problem=Problem(queries=3, batch=1, dtype=BF16), block_n=32)
    call, keys, values, lengths = case.given()
    of_query, of_keys, of_values = sizes
    given = call._replace(query=call.query * of_query), resized(keys, of_keys), resized(values, of_values), lengths
    names = ("call", "keys", "values", "lengths")
    found = case.found(**dict(zip(names, given, strict=True)))
    check(case, found, given)


def resized(codes: CodePlanes, size: float) -> CodePlanes:
    """Each number times `size`."""
    changed = {name: getattr(codes, name) for name in ("least", "step", "scale", "mean")}
    return replace(codes, **{name: each * size for name, each in changed.items() if each is not None})


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("config", ["int8", "int4", "turboquant"])
@pytest.mark.parametrize("empty", ["the one that is seen most", "the last half", "all"])
def test_values_of_zeros_keep_their_weights(config: str, dtype: torch.dtype, empty: str) -> None:
    """They have steps of 0, which weights cannot be multiplied by and divided by again."""
    case = Coded(config=config, problem=Problem(queries=1, batch=1, dtype=dtype), tokens=64)
    call, keys, values, lengths = case.given()
    there = torch.ones(BLOCKS, 1, 64, 1, dtype=dtype)
    if empty == "the one that is seen most":
        there[0, :, 3] = 0
        call = call._replace(query=case.planes("keys")[1][:, 0, :, 3:4].repeat_interleave(2, 1).to(dtype))
    elif empty == "the last half":
        there[:, :, 32:] = 0
    else:
        there[:] = 0
    names = [name for name in ("least", "step", "scale") if getattr(values, name) is not None]
    factors = {
        name: getattr(values, name) * there.view(1, *there.shape[: getattr(values, name).dim() - 1]) for name in names
    }
    values = replace(values, **factors)
    check(case, case.found(call=call, values=values), (call, keys, values, lengths))


def test_a_token_of_large_values_leaves_the_others_theirs() -> None:
    """Weights are relative to the largest product with a step: a millionth of it must not be rounded to nothing."""
    case = Coded(config="int4", problem=Problem(queries=1, batch=1, dtype=BF16, heads=2, kv_heads=1))
    call, keys, values, lengths = case.given()
    assert values.least is not None
    assert values.step is not None
    step, least, used = values.step * 1e-6, values.least * 1e-6, values.codes.clone()
    step[0, 0, 0, 0], least[0, 0, 0, 0], used[0, 0, 0, 0] = 0.5, 0, 0  # a vector of zeros, with a large step
    call = call._replace(query=torch.zeros_like(call.query))
    values = replace(values, step=step, least=least, codes=used)
    found = case.found(call=call, values=values)[0]
    truth = reference.attend_codes(call, keys, values, lengths, compute=torch.float64)[0]
    torch.testing.assert_close(found.double(), truth, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("config", ["int4", "turboquant"])
@pytest.mark.parametrize("damage", ["no key codes", "no value codes", "another length", "another query"])
def test_damage_is_found(config: str, damage: str) -> None:
    case = Coded(config=config, problem=Problem(queries=1, batch=1, dtype=FP16), block_n=32)
    call, keys, values, lengths = case.given()
    changed: dict[str, Any] = {  # type: ignore[assignment]
        "no key codes": {"keys": replace(keys, codes=torch.zeros_like(keys.codes))},
        "no value codes": {"values": replace(values, codes=torch.zeros_like(values.codes))},
        "another length": {"lengths": lengths - 1},
        "another query": {"call": call._replace(query=call.query.roll(1, 3))},
    }[damage]
    with pytest.raises(AssertionError, match="off by"):
        check(case, case.found(**changed))


def test_the_mean_turns_with_its_token() -> None:
    case = Coded(config="turboquant", problem=Problem(queries=1))
    keys = case.given()[1]
    assert keys.cos is not None
    with pytest.raises(AssertionError, match="off by"):
        check(case, case.found(keys=replace(keys, cos=keys.cos.roll(1, 0))))


def test_the_kernel_is_called() -> None:
    case = Coded(config="int4", problem=Problem(queries=1))
    before = kernel_calls()
    with use_tier("triton"):
        found = ops.attend_codes(*case.given())
    assert kernel_calls() - before == {"triton.attend_codes": 1}
    check(case, found)


def test_groups_that_no_tile_fits_are_left_to_others() -> None:
    case = Coded(config=KIVI, problem=Problem(queries=1, head_dim=64))
    call, keys, values, _ = case.given()
    assert codes.can_attend(call.query, keys, values)
    assert not codes.can_attend(call.query, replace(keys, group_size=24), values)


def test_codes_at_odd_bytes_are_left_to_others() -> None:
    call, keys, values, _ = Coded(config="int4", problem=Problem(queries=1)).given()
    odd = values.codes.new_empty(values.codes.numel() + 1)[1:].view(values.codes.shape)
    assert not codes.can_attend(call.query, keys, replace(values, codes=odd))


@pytest.mark.daily
@pytest.mark.parametrize(("apart", "taken"), [(2**31 - 2, True), (2**31, False)])
def test_blocks_too_far_apart_are_left_to_others(apart: int, taken: bool) -> None:
    call, keys, values, _ = Coded(config="int4", problem=Problem(queries=1)).given()
    strides = [apart if dim == 1 else stride for dim, stride in enumerate(values.codes.stride())]
    far = torch.empty_strided(values.codes.shape, strides, dtype=values.codes.dtype, device="meta")
    assert codes.can_attend(call.query, keys, replace(values, codes=far)) == taken
