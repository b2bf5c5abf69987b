"""The operators of the attention: what torch.library asks of them, and that all tiers agree."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from kvboost_hf import KVQuantConfig
from tests.attention import UNIT, Problem
from tests.conftest import make_model
from tests.internals.attention import (
    AttentionCall,
    Visibility,
    attention,
    dense,
    kernel_calls,
    no_log,
    ops,
    reference,
    sdpa,
    use_tier,
)
from tests.internals.cache import make_codec
from tests.internals.top import (
    CodedKV,
    CodePlanes,
    KVHandle,
    PiecedKV,
    PieceTable,
    make_reach,
    read_in_place,
    read_reach,
)

pytestmark = pytest.mark.daily

OPERATORS = torch.ops.kvboost_hf


def code_planes(method: str, role: Any, x: torch.Tensor) -> CodePlanes:
    """Codes of x [batch, blocks, heads, tokens, head_dim]."""
    codec = make_codec(KVQuantConfig(method=method, group_size=16))  # type: ignore[arg-type]
    planes = codec.encode(x.flatten(0, 1), role, [None] * (x.shape[0] * x.shape[1]))
    planes = {name: plane.unflatten(0, x.shape[:2]) for name, plane in planes.items()}
    found = codec.code_planes(planes, role, None, *x.shape[3:])
    assert found is not None
    return found


def arguments() -> dict[str, tuple[Any, ...]]:
    """Of each operator."""
    problem = Problem(padding=True, sinks=True)
    query, key, value = problem.tensors()
    keep = problem.visibility().keep
    part = (query, 0.2, [None] * 4, True, 0, 0.0, None, True)
    rows = torch.tensor([[[0, 0, -1], [1, 16, -1]]] * 2)
    pieces = ([key[0, :, :16], key[0, :, 16:]], [value[0, :, :16], value[0, :, 16:]], rows)
    codes = torch.randn(2, 3, 2, 16, 32)
    keys, values = (ops._planes(code_planes("turboquant", role, codes)) for role in ("keys", "values"))
    lengths = torch.tensor([16, 9, 16], dtype=torch.int32)
    return {
        "attend": (key, value, query, 0.2, (keep, None, None, None), True, 0, 0.0, problem.sink_logits(), False),
        "attend_pieces": (*pieces, 40, [None] * 4, 47, *part),
        "attend_codes": (keys, values, [4, 0, 4, 0], lengths, *part),
        "merge": ([torch.randn(2, 7, 4, 8)] * 2, [torch.randn(2, 4, 7)] * 2, problem.sink_logits(), torch.bfloat16),
    }


@pytest.mark.parametrize("name", ["attend", "attend_pieces", "attend_codes", "merge"])
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPERATORS, name).default, arguments()[name])


@pytest.mark.parametrize("tier", ["cpu", "sdpa", "reference"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"causal": False},
        {"window": 9},
        {"padding": True},
        {"sparse": True},
        {"tree": True},
        {"mask": True},
        {"softcap": 3.0},
        {"sinks": True},
    ],
    ids=str,
)
def test_tiers_agree(tier: Any, given: dict[str, Any]) -> None:
    problem = Problem(**given)
    with use_tier(tier):
        out, lse = ops.attend(problem.call(), *problem.kv())
    assert lse.numel() == 0
    rows = problem.visibility().dense(problem.queries, problem.columns, out.device).any(-1)
    seen = rows.expand(problem.batch, 1, -1)[:, 0]  # what a query without columns gets is of no use to anybody
    problem.check((out * seen[..., None, None], lse), exponential=40 * UNIT)


@pytest.mark.parametrize(("queries", "case"), [(9, "square"), (1, "decode"), (4, None)])
@pytest.mark.parametrize(
    "told", ["nothing", "keep", "columns", "mask", "tree", "window", "softcap", "sinks", "partial"]
)
def test_a_plain_call_on_a_gpu_is_known_without_a_look_at_it(told: str, queries: int, case: str | None) -> None:
    with FakeTensorMode():  # which raises where numbers would have to come from the device
        query = torch.empty(2, 4, queries, 32, dtype=torch.float16, device="cuda")
        key, value = (torch.empty(2, 4, 9, 32, dtype=torch.float16, device="cuda") for _ in range(2))
        hides = {"keep": (2, 9), "columns": (2, queries), "mask": (2, 1, queries, 9), "tree": (2, queries)}
        hidden: dict[str, Any] = {told: torch.empty(hides[told], device="cuda")} if told in hides else {}
        call = AttentionCall(query, 0.2, Visibility(window=4 if told == "window" else 0, **hidden))
        others: dict[str, Any] = {"softcap": 3.0, "sinks": torch.empty(4, device="cuda"), "partial": True}
        call = call._replace(**{told: others[told]} if told in others else {})
        found = sdpa.faster_case(call, key, value)
    assert found == (case if told == "nothing" else None)


@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype"), [(36, 36, "float16"), (32, 64, "float16"), (32, 32, "float32")]
)
def test_one_query_that_pytorch_would_copy_all_keys_for_stays(dim: int, value_dim: int, dtype: str) -> None:
    with FakeTensorMode():
        query, key, value = (
            torch.empty(1, 4, tokens, width, dtype=getattr(torch, dtype), device="cuda")
            for tokens, width in ((1, dim), (9, dim), (9, value_dim))
        )
        assert sdpa.faster_case(AttentionCall(query, 0.2, Visibility()), key, value) is None


@pytest.mark.parametrize(("tokens", "asked"), [(2_000, False), (40_000, True)])
def test_cudnn_plans_for_long_prompts_only(tokens: int, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode():
        query = torch.empty(1, 4, tokens, 32, dtype=torch.float16, device="cuda")
    assert isinstance(sdpa._order(query), nullcontext) != asked


@pytest.mark.parametrize(("tier", "called"), [("triton", "sdpa.square"), ("reference", "reference.attend")])
def test_a_tier_that_is_asked_for_takes_plain_prompts_too(
    tier: Any, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "faster_case", lambda *args, **kwargs: "square")  # as on a GPU
    problem, before = Problem(queries=40), kernel_calls()
    with use_tier(tier):
        found = ops.attend(problem.call(), *problem.kv())
    assert dict(kernel_calls() - before) == {called: 1}
    problem.check(found, exponential=40 * UNIT)


def test_what_is_told_apart_is_told_apart() -> None:
    """The tests above would not pass with another problem's solution."""
    plain = Problem()
    for given in ({"causal": False}, {"window": 9}, {"padding": True}, {"sparse": True}, {"softcap": 3.0}):
        with pytest.raises(AssertionError, match="off by"):
            plain.check(Problem(**given).solve(torch.float32))


@pytest.mark.parametrize("tier", ["reference", "triton"])
def test_parts_are_merged_to_the_whole(tier: Any) -> None:
    problem = Problem(columns=50, sinks=True)
    key, value = problem.kv()
    parts = []
    for start, stop in ((0, 11), (11, 12), (12, 50)):
        columns = torch.arange(43, 50, dtype=torch.int32).expand(2, -1) - start
        call = problem.call(partial=True, sinks=None, visibility=Visibility(columns=columns))
        parts.append(reference.attend(call, key[:, :, start:stop], value[:, :, start:stop]))
    before = kernel_calls()
    with use_tier(tier):
        whole = ops.merge(parts, problem.sink_logits(), torch.float32)
    assert dict(kernel_calls() - before) == ({"triton.merge": 1} if tier == "triton" else {})
    problem.check((whole, no_log(whole.device)))


def test_a_held_tensor_is_a_tensor_to_everybody_else() -> None:
    whole, asked = torch.randn(2, 3, 5, 8), []

    def dense() -> torch.Tensor:
        asked.append(1)
        return whole

    table = PieceTable((whole[0],), (whole[0],), torch.tensor([[[0, 0, -1]]] * 2), 5)
    held = KVHandle(table, dense, whole, 5)  # type: ignore[arg-type]
    assert (held.shape, held.dtype, held.device, held.requires_grad) == (whole.shape, whole.dtype, whole.device, False)
    assert not asked
    assert torch.equal(held * 2, whole * 2)
    assert torch.equal(held.transpose(1, 2)[:, :2], whole.transpose(1, 2)[:, :2])
    assert torch.equal(torch.cat([held, held], dim=2), torch.cat([whole, whole], dim=2))
    assert len(asked) == 1


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_reach_says_what_it_was_made_of(window: int, sparse: bool) -> None:
    keep = torch.rand(2, 12) > 0.3
    columns = torch.tensor([[1, 5, 11], [0, 2, 3]]) if sparse else None
    mask = make_reach(keep, window, "cpu", columns)
    assert mask is not None
    assert mask.shape == (2, 1 + bool(window) + 2 * sparse, 1, 12)
    found_keep, found_columns, reach = read_reach(mask, 3)
    assert found_keep is not None
    assert torch.equal(found_keep, keep)
    assert (found_columns is None) == (columns is None)
    assert columns is None or torch.equal(found_columns, columns.int())
    assert (reach is not None) == bool(window)
    assert reach is None or torch.equal(reach, keep * window)
    for queries in (1, 2):  # as models cut it that compute the last queries alone
        found = read_reach(mask[:, :, -queries:], queries)[1]
        assert (found is None) == (columns is None)
        assert found is None or columns is None or torch.equal(found, columns[:, -queries:].int())


def test_without_padding_a_reach_is_one_number() -> None:
    assert make_reach(None, 0, "cpu") is None
    mask = make_reach(None, 7, "cpu")
    assert mask is not None
    assert mask.tolist() == [[[[7]], [[7]]]]
    keep, columns, reach = read_reach(mask, 3)
    assert keep is None
    assert columns is None
    assert reach is not None
    assert reach.item() == 7


def test_calls_are_counted() -> None:
    problem, before = Problem(), kernel_calls()
    ops.attend(problem.call(), *problem.kv())
    assert dict(kernel_calls() - before) == {"cpu.attend": 1}


@pytest.mark.parametrize("tier", ["cpu", "triton", "reference"])
def test_a_callers_autocast_leaves_codes_in_full_precision(tier: Any) -> None:
    call, codes = AttentionCall(torch.randn(2, 4, 1, 32), 0.2, Visibility()), torch.randn(2, 3, 2, 16, 32)
    planes = [code_planes("turboquant", role, codes) for role in ("keys", "values")]
    lengths = torch.full((3,), 16, dtype=torch.int32)
    with use_tier(tier):
        expected, _ = ops.attend_codes(call, *planes, lengths)  # type: ignore[arg-type, call-arg]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, _ = ops.attend_codes(call, *planes, lengths)  # type: ignore[arg-type, call-arg]
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kept", [(0, 1), (0, 2), (1, 2)])
@torch.no_grad()
def test_a_callers_autocast_may_leave_one_of_three_in_another_dtype(kept: tuple[int, int]) -> None:
    given = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    given = [each if place in kept else each.bfloat16() for place, each in enumerate(given)]
    found, expected = (
        attention(torch.nn.Module(), query, key, value, None)[0]
        for query, key, value in (given, [each.to(given[2].dtype) for each in given])
    )
    assert torch.equal(found, expected)


def test_a_mask_is_made_only_where_nothing_else_tells_who_sees_what() -> None:
    tree, columns = torch.zeros(1, 2, 2, dtype=torch.bool), torch.arange(4)[None]
    regular = (
        Visibility(),
        Visibility(causal=False),
        Visibility(window=1),
        Visibility(columns=columns),
        Visibility(tree=tree),
    )
    assert not any(map(dense.is_irregular, regular))
    irregular = (
        Visibility(causal=False, window=1),
        Visibility(tree=tree, window=1),
        Visibility(tree=tree, columns=columns),
        Visibility(mask=tree),
    )
    assert all(map(dense.is_irregular, irregular))


def test_a_cpu_reads_codes_where_they_are_and_makes_pieces_dense() -> None:
    with use_tier("cpu"):
        assert [read_in_place(kind, torch.device("cpu")) for kind in (CodedKV, PiecedKV)] == [True, False]


def test_a_step_that_asks_for_more_than_a_plain_output_is_none() -> None:
    query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    assert dense._columns_of_step(AttentionCall(query, 0.2, Visibility()), key, key) == slice(0, 5)
    for more in ({"softcap": 5.0}, {"partial": True}, {"sinks": torch.zeros(2)}):
        assert dense._columns_of_step(AttentionCall(query, 0.2, Visibility(), **more), key, key) is None


@pytest.mark.parametrize(
    ("first_column", "sees", "compact"),
    [(0, causal_mask_function, True), (4, causal_mask_function, False), (0, bidirectional_mask_function, False)],
)
def test_masks_where_the_first_query_is_a_tensor(first_column: int, sees: Any, compact: bool) -> None:
    """One number for each column says where queries stand, and takes layers for causal and whole."""
    model = make_model("llama")
    model.set_attn_implementation("kvboost_fa2")
    given = {"kv_offset": first_column, "mask_function": sees, "config": model.config, "device": "cpu"}
    mask = AttentionMaskInterface()["kvboost_fa2"](1, 2, 8, torch.tensor(first_column + 3), **given)
    assert mask.dtype == (torch.int32 if compact else torch.bool)
    if not compact:
        at = torch.arange(8)
        seen = at[None] <= at[3:5, None] if sees is causal_mask_function else torch.ones(2, 8, dtype=torch.bool)
        assert torch.equal(mask[0, 0], seen)
