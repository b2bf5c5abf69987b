"""The kernels over pieces and over codes compiled for GPUs that are not here: on tensor cores, and in registers.

What a warp issues for a tile of codes is counted against what the dense kernel issues for a tile of bfloat16, in the
inner loop: codes are small, and would still be slow to read if they took many more instructions than numbers do.
"""

from collections.abc import Callable
from itertools import chain

import pytest
import torch
from triton import knobs

from kvboost_hf.config import KVQuantConfig
from tests.internals.attention import AttentionCall, Visibility
from tests.internals.cache import Role, make_codec
from tests.internals.compat import LayerRotation
from tests.internals.top import CodePlanes, PieceTable
from tests.internals.triton import Device, LaunchArguments, codes, empty_parts, gather_kernel, pieces
from tests.parity.test_triton_compiles import SHARED
from tests.parity.test_triton_compiles import launch as dense_launch
from tests.triton_compile import Compiled, Kernels, Launch, compile_launch, pointer

HEADS, KV_HEADS, BLOCKS, TOKENS = 32, 8, 4, 128


def over_pieces(capability: int, head_dim: int, queries: int, window: int = 0, *, moved: bool = True) -> Launch:
    query = torch.zeros(1, queries, HEADS, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    keys = tuple(torch.zeros(KV_HEADS, tokens, head_dim, dtype=torch.bfloat16) for tokens in (128, 70))
    rows, turn = torch.tensor([[[0, 0, -1], [1, 128, 0 if moved else -1]]]), torch.zeros(1, head_dim)
    turns = (turn, turn, torch.arange(head_dim, dtype=torch.int32)) if moved else ()
    table = PieceTable(keys, keys, rows, 198, *turns)
    seen, device = Visibility(window=window), Device(132, SHARED[capability])
    call = AttentionCall(query, 1.0, seen, partial=True)
    tiling = pieces.plan(call, table, device)
    out, lse = empty_parts(query, tiling.splits)
    given = pieces.launch_arguments(call, table, 200, out, lse, tiling)
    arguments = dict(zip(pieces.fwd_pieces.arg_names, map(pointer, chain.from_iterable(given)), strict=True))
    return Launch("kvboost_hf.attention.triton.pieces:fwd_pieces", arguments, capability, tiling.warps, tiling.stages)


def over_pieces_in_place(capability: int, head_dim: int, queries: int) -> Launch:
    """Pieces that are where they were computed, as all those of caches are."""
    return over_pieces(capability, head_dim, queries, moved=False)


def over_codes(capability: int, head_dim: int, queries: int, config: KVQuantConfig | str) -> Launch:
    rotation = LayerRotation(torch.ones(head_dim // 2), "half", 0)

    def planes(role: Role) -> CodePlanes:
        codec, x = make_codec(config), torch.zeros(BLOCKS, KV_HEADS, TOKENS, head_dim, dtype=torch.bfloat16)
        encoded = codec.encode(x, role, [rotation] * BLOCKS)
        made = codec.code_planes(
            {name: each[None] for name, each in encoded.items()}, role, rotation, TOKENS, head_dim
        )
        assert made is not None
        return made

    query, keys, values = (
        torch.zeros(1, HEADS, queries, head_dim, dtype=torch.bfloat16),
        planes("keys"),
        planes("values"),
    )
    tiling = codes.plan(query, keys, values, Device(132, SHARED[capability]))
    out, lse = empty_parts(query, tiling.splits)
    lengths = torch.full((BLOCKS,), TOKENS, dtype=torch.int32)
    call = AttentionCall(query, 1.0, Visibility(), partial=True)
    given = codes.launch_arguments(call, keys, values, lengths, out, lse, tiling)
    arguments = dict(zip(codes.fwd_codes.arg_names, map(pointer, chain.from_iterable(given)), strict=True))
    return Launch("kvboost_hf.attention.triton.codes:fwd_codes", arguments, capability, tiling.warps, tiling.stages)


def over_numbers() -> Launch:
    """The same columns in bfloat16."""
    return dense_launch(90, 128, 1, "", torch.bfloat16)


CASES: list[tuple[Callable[..., Launch], tuple[object, ...]]] = [
    *((over_pieces, (capability, 128, 128)) for capability in (80, 90, 100)),
    *((over_pieces_in_place, (capability, 128, 128)) for capability in (90, 80, 86, 100, 120)),
    (over_pieces_in_place, (90, 256, 128)),
    (over_pieces, (90, 128, 1)),
    (over_pieces, (90, 256, 1, 64)),
    *((over_codes, (capability, 128, 1, "turboquant")) for capability in (80, 90, 100, 120)),
    (over_codes, (80, 128, 1, "int8")),
    (over_codes, (90, 128, 64, "int4")),
    (over_codes, (90, 128, 1, "turboquant:3:1")),
    (over_codes, (90, 128, 1, KVQuantConfig(grouped_values=True, key_bits=2))),
]
# How many times as many instructions as bfloat16 for as many columns, and how many were aimed at.
BUDGETS = {"int8": (1.7, 1.7), "int4": (1.85, 2.0), "turboquant:4": (2.75, 3.0), "turboquant:3": (2.7, 3.0)}


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "interpret", False)  # whose tiles are smaller
        launches: dict[object, Launch] = {name: over_codes(90, 128, 1, name) for name in BUDGETS}
        launches |= {"numbers": over_numbers(), "whole": dense_launch(90, 128, 128, "", torch.bfloat16)}
        launches |= {(make, given): make(*given) for make, given in CASES}
    return Kernels(launches)


@pytest.mark.slow
def test_pieces_take_the_tiles_of_numbers(compiled: Kernels) -> None:
    """Where nothing moves: with tiles of 64 x 32, as for what moves, there were 2.7 times as many instructions."""
    in_place, whole = compiled[over_pieces_in_place, (90, 128, 128)], compiled["whole"]
    assert sum(inner_loop(in_place).values()) <= 1.1 * sum(inner_loop(whole).values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}{case[1]}")
def test_kernels(compiled: Kernels, case: tuple[Callable[..., Launch], tuple[object, ...]]) -> None:
    made, capability = compiled[case], case[1][0]
    assert made.mma
    assert made.stack_bytes <= (80 if capability == 100 else 0)
    assert made.shared_bytes <= SHARED[capability]  # type: ignore[index]


@pytest.mark.slow
def test_columns_of_pinned_memory_are_read_by_16_bytes() -> None:
    """And no loop of the kernel waits for one load before it asks for the next."""
    opened, table = torch.zeros(1, KV_HEADS, 256, 128, dtype=torch.bfloat16), torch.zeros(4, 6, dtype=torch.int64)
    found: list[Launch] = []

    def note(grid: object, device: object, arguments: LaunchArguments, *, warps: int, stages: int) -> None:
        given = dict(zip(gather_kernel.gather.arg_names, map(pointer, chain.from_iterable(arguments)), strict=True))
        name = "kvboost_hf.gather_kernel:gather"
        found.extend(Launch(name, given, capability, warps, stages) for capability in (80, 90, 120))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_kernel, "_launch", note)
        gather_kernel.launch([opened, opened], table, [(5, 0), (5, 1)])
    for made in map(compile_launch, found):
        assert "ld.global.v2.b64" in made.loads
        assert made.stack_bytes == 0
        assert made.loops[0]["LDG"] >= 4


def inner_loop(made: Compiled) -> dict[str, int]:
    """The loop with products that takes the fewest instructions: at borders there are more."""
    return min(
        (each for each in made.loops if any("MMA" in name for name in each)), key=lambda loop: sum(loop.values())
    )


def test_instructions_for_codes(compiled: Kernels) -> None:
    numbers = sum(inner_loop(compiled["numbers"]).values())
    assert numbers > 200
    for name, (budget, _) in BUDGETS.items():
        made = compiled[name]
        loop = inner_loop(made)
        times = sum(loop.values()) / numbers
        assert times <= budget, (name, times, loop)
        assert loop["LDGSTS"] >= 4, "tiles are copied ahead"
        assert made.stack_bytes == 0, (name, made)
        if name.startswith("int"):  # nothing waits for memory: the length and the steps of the next block
            assert loop.get("LDG", 0) <= 5, (name, loop)
