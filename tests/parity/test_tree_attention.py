"""Trees of drafted tokens under `kvboost_fa2`: each node's logits are those of the path that leads to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, KVQuantConfig
from tests.attention import UNIT, Problem, shares_of_budget
from tests.conftest import make_model, random_ids
from tests.internals.assisted import ROOT, Branches
from tests.internals.attention import Part, Visibility, attention, kernel_calls, no_log, ops, use_tier
from tests.internals.cache import PiecedLayer, QuantizedLayer
from tests.internals.compat import decoder_layers
from tests.internals.top import handles, make_tree

PROMPT, NODES = 40, 12  # windows are of 24 columns
Parents = list[int]  # of each node, another one before it, or -1 for none

SIZES: dict[str, Problem] = {
    "one node and nothing else": Problem(queries=1, columns=1, head_dim=64),
    "one node": Problem(queries=1, columns=300, head_dim=80, sinks=True),
    "two": Problem(queries=2, columns=65, heads=8, head_dim=40, softcap=4.0),
    "in a window": Problem(queries=17, columns=40, head_dim=64, sparse=True, window=9),
    "a window within the tree": Problem(queries=33, columns=64, head_dim=24, sparse=True, window=2, sinks=True),
    "63": Problem(queries=63, columns=63, heads=2, head_dim=64, softcap=4.0, sinks=True),
    "64": Problem(queries=64, columns=64, kv_heads=1, head_dim=16),
    "64 behind one": Problem(queries=64, columns=65, batch=1, head_dim=64, mask=True),
    "64 behind many": Problem(queries=64, columns=300, batch=1, heads=6, head_dim=64, sinks=True),
    "64 in a window": Problem(queries=64, columns=300, head_dim=40, sparse=True, window=100, softcap=4.0),
    "64 not causal": Problem(queries=64, columns=90, batch=1, head_dim=64, causal=False, padding=True),
}
SIZES = {name: replace(problem, tree=True) for name, problem in SIZES.items()}


@dataclass(frozen=True, slots=True)
class Tree:
    """Drafted tokens behind a prompt.

    Args:
        ids: [1, nodes].
        parents: The parent of each node; the first is the root.
    """

    ids: torch.Tensor
    parents: Parents

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one."""
        return [*(self.path(self.parents[node]) if node else []), node]

    def depths(self) -> torch.Tensor:
        """[1, nodes]: how many ancestors each node has."""
        return torch.tensor([[len(self.path(node)) - 1 for node in range(len(self.parents))]])

    def bits(self, window: int) -> torch.Tensor:
        """[1, nodes]: what each node sees of the tree."""
        seen = torch.zeros(len(self.parents), len(self.parents), dtype=torch.long)
        for node in range(len(self.parents)):
            seen[node, self.path(node)[-window:]] = 1
        return (seen << torch.arange(len(self.parents))).sum(dim=-1)[None]


def random_tree(nodes: int = NODES) -> Tree:
    draw = torch.Generator().manual_seed(3)
    parents = [-1, *(int(torch.randint(max(node - 4, 0), node, (1,), generator=draw)) for node in range(1, nodes))]
    return Tree(random_ids(nodes, 5), parents)


class Teller:
    """Gives a layer its mask."""

    leaves_kv_alone = True

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask

    def before(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"attention_mask": self._mask}


@contextmanager
def told(model: PreTrainedModel, cache: Cache, tree: Tree, depths: torch.Tensor, wrong: Any) -> Iterator[None]:
    """Gives each layer the mask for its window."""
    handles = []
    kinds = DynamicCache(config=model.config).layers
    for layer, kind, held in zip(decoder_layers(model), kinds, cache.layers, strict=True):
        window = getattr(kind, "sliding_window", None) or 0
        bits, columns = tree.bits(window) ^ wrong, held.keys.shape[2] + depths if window else None
        teller = Teller(make_tree(bits, columns).to(model.device))
        handles.append(layer.register_forward_pre_hook(teller.before, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def logits_of(
    model: PreTrainedModel,
    tree: Tree,
    cache: Cache | None = None,
    *,
    depths: torch.Tensor | None = None,
    wrong: Any = 0,
) -> torch.Tensor:
    """Of each node, [nodes, vocabulary], in one forward behind a prompt.

    Args:
        model: The model.
        tree: The tree whose nodes are given to the model.
        cache: An empty one; by default that of the model.
        depths: [1, nodes]: those that layers are told in place of the true ones.
        wrong: [1, nodes]: the bits that are flipped.
    """
    model.set_attn_implementation("kvboost_fa2")
    device = model.device
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        model(random_ids(PROMPT, 1).to(device), past_key_values=cache, logits_to_keep=1)
        with told(model, cache, tree, tree.depths() if depths is None else depths, wrong):
            found: torch.Tensor = model(
                tree.ids.to(device),
                past_key_values=cache,
                position_ids=PROMPT + tree.depths().to(device),
                logits_to_keep=tree.ids.shape[1],
            ).logits[0]
    return found


def logits_of_paths(model: PreTrainedModel, tree: Tree) -> torch.Tensor:
    """The same by stock attention, in a forward for each node over the prompt and its path."""
    model.set_attn_implementation("eager")  # `sdpa` knows neither caps nor sinks
    prompt, found = random_ids(PROMPT, 1), []
    with torch.no_grad():
        for node in range(len(tree.parents)):
            ids = torch.cat([prompt, tree.ids[:, tree.path(node)]], dim=1).to(model.device)
            found.append(model(ids, use_cache=False, logits_to_keep=1).logits[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize("trimmed", [True, False], ids=["layers hold a window", "layers hold all"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma2", "gpt_oss"])
def test_logits_are_those_of_each_path(name: str, trimmed: bool) -> None:
    model, tree = make_model(name), random_tree()
    before = kernel_calls()
    found = logits_of(model, tree, DynamicCache(config=model.config) if trimmed else DynamicCache())
    assert dict(kernel_calls() - before) == {"cpu.attend": 2 * model.config.num_hidden_layers}
    torch.testing.assert_close(found, logits_of_paths(model, tree), rtol=0, atol=1e-4)


def test_a_branch_sees_its_window_of_itself_alone() -> None:
    """A window goes by depth: among branches, an ancestor that has left it is no farther off in the order of nodes."""
    branches = Branches(make_model("llama"), DynamicCache(), torch.tensor([[0]]), branching=False)
    branches._tokens, branches._parents = [[7] * 5], [[ROOT, 0, 1, 0, 3]]
    seen = branches.see(2, 5, 5, torch.device("cpu"))
    assert seen.tree is not None
    assert seen.tree.tolist() == [[0b00001, 0b00011, 0b00110, 0b01001, 0b11000]]


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_ancestors_out_of_a_window_are_not_seen(name: str) -> None:
    model, chain = make_model(name), Tree(random_ids(30, 5), list(range(-1, 29)))
    torch.testing.assert_close(logits_of(model, chain), logits_of_paths(model, chain), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_node_that_does_not_see_its_parent_is_noticed(name: str) -> None:
    model, tree = make_model(name), random_tree()
    wrong = torch.zeros(1, NODES, dtype=torch.long)
    wrong[0, 2] = 1 << tree.parents[2]
    off = (logits_of(model, tree, wrong=wrong) - logits_of_paths(model, tree)).abs().amax(dim=-1)
    others = [node for node in range(NODES) if 2 not in tree.path(node)]
    assert 2 < len(others) < NODES - 1
    assert off[2] > 1e-2
    assert off[others].max() < 1e-4


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_wrong_column_is_noticed(name: str) -> None:
    """A window that goes by the order of nodes is too far on for all but those of a chain."""
    model, tree = make_model(name), random_tree()
    off = (logits_of(model, tree, depths=torch.arange(NODES)[None]) - logits_of_paths(model, tree)).abs()
    wrong = tree.depths()[0] != torch.arange(NODES)
    assert 0 < wrong.sum() < NODES
    assert torch.equal(off.amax(dim=-1) > 1e-4, wrong)


@pytest.mark.daily
@pytest.mark.parametrize(("name", "tier"), [("llama", "triton"), ("gemma2", "cpu"), ("gpt_oss", "cpu")])
def test_codes_are_read_in_place(name: str, tier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tree = make_model(name), random_tree()
    config = KVQuantConfig(method="kivi", group_size=16, window=16, sink_tokens=4, exact_layers=0)
    found = []
    for in_place in (True, False):
        cache, before = ChunkReuseCache(model, ChunkStore(model), live_quant=config), kernel_calls()
        with use_tier(tier):
            found.append(logits_of(model, tree, cache))
        coded = sum(isinstance(layer, QuantizedLayer) for layer in cache.layers)
        assert coded
        assert (kernel_calls() - before)[f"{tier}.attend_codes"] == coded * in_place
        monkeypatch.setattr(handles, "_readers", {})  # the second time, codes are decoded
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)
    assert (found[0] - logits_of_paths(model, tree)).abs().max() > 1e-2, "no codes were read"


@pytest.mark.parametrize(("name", "tier"), [("llama", "triton"), ("gemma2", "reference"), ("gpt_oss", "reference")])
def test_pieces_are_read_in_place(name: str, tier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(handles._readers, "a test", lambda kind, device: True)
    model, tree = make_model(name), random_tree()
    model.set_attn_implementation("kvboost_fa2")
    store = ChunkStore(model, chunk_size=16)
    store.warm(random_ids(PROMPT, 1)[:, :32])
    cache, before = ChunkReuseCache(model, store), kernel_calls()
    with use_tier(tier):
        found = logits_of(model, tree, cache)
    pieced = sum(isinstance(layer, PiecedLayer) for layer in cache.layers)
    assert pieced
    assert (kernel_calls() - before)[f"{tier}.attend_pieces"] == 2 * pieced
    torch.testing.assert_close(found, logits_of_paths(model, tree), rtol=0, atol=1e-4)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("mask", "columns"),
    [
        (make_tree(torch.ones(2, 8, dtype=torch.long)), 20),
        (make_tree(torch.ones(1, 9, dtype=torch.long)), 20),
        (make_tree(torch.ones(2, 9, dtype=torch.long)).expand(-1, 2, -1, -1), 20),
        (make_tree(torch.ones(2, 65, dtype=torch.long)), 80),
        (make_tree(torch.ones(2, 9, dtype=torch.long)), 9),
    ],
    ids=["fewer nodes than queries", "fewer rows", "heads", "more than 64", "a mask of columns"],
)
def test_what_is_no_tree_of_the_queries_is_refused(mask: torch.Tensor, columns: int) -> None:
    problem = Problem(queries=65 if mask.shape[-1] == 65 else 9, columns=columns)
    with pytest.raises(ValueError, match="must describe a tree of"):
        attention(nn.Module(), *problem.tensors(), mask)


def test_a_tree_may_be_all_there_is() -> None:
    problem = SIZES["64"]
    bits = problem.visibility().tree
    assert bits is not None
    out, _ = attention(nn.Module(), *problem.tensors(), make_tree(bits), scaling=problem.scale)
    problem.check((out, no_log(out.device)), exponential=40 * UNIT)


def test_a_window_asks_for_columns() -> None:
    given = nn.Module(), *Problem(queries=9).tensors(), make_tree(torch.ones(2, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="`columns` must be given with a tree in a layer with a window of 39"):
        attention(*given, sliding_window=39)
    assert torch.equal(attention(*given, sliding_window=40)[0], attention(*given)[0])


def attend(problem: Problem, tier: Any, visibility: Visibility | None = None, *, partial: bool = True) -> Part:
    with use_tier(tier):
        call = problem.call(visibility=visibility or problem.visibility(), partial=partial)
        return ops.attend(call, *problem.kv())


@pytest.mark.parametrize("tier", ["cpu", "triton"])
@pytest.mark.parametrize("name", SIZES)
def test_trees_of_any_size(name: str, tier: Any) -> None:
    problem, before = SIZES[name], kernel_calls()
    found = attend(problem, tier)
    assert dict(kernel_calls() - before) == {f"{tier}.attend": 1}
    problem.check(found, exponential=40 * UNIT)


@pytest.mark.daily
@pytest.mark.parametrize("tier", ["cpu", "triton"])
def test_the_bit_of_the_last_of_64_nodes_counts(tier: Any) -> None:
    problem = SIZES["64"]
    seen = problem.visibility()
    assert seen.tree is not None
    assert (seen.tree[:, 63] < 0).all()
    blind = replace(seen, tree=seen.tree & ~(-1 << 63))
    share, _ = shares_of_budget(attend(problem, tier, blind), problem.call(), *problem.kv(), exponential=40 * UNIT)
    assert share[:, :63].max() <= 1
    assert share[:, 63].max() > 100


def test_what_is_dense_is_what_the_bits_say() -> None:
    problem = SIZES["64 in a window"]
    seen = problem.visibility()
    assert seen.tree is not None
    assert seen.columns is not None
    dense = seen.dense(64, 300, torch.device("cpu"))[:, 0].tolist()
    for row in range(2):
        for query, (bits, own) in enumerate(zip(seen.tree[row].tolist(), seen.columns[row].tolist(), strict=True)):
            before = [own - column < 100 for column in range(236)]
            assert dense[row][query] == before + [bool(bits % 2**64 // 2**node % 2) for node in range(64)]
