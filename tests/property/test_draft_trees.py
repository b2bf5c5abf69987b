"""Trees of drafted tokens, and how far they grow: without models."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_hf import DraftTreeConfig
from tests.internals.assisted import ROOT, Calibration, Growth, Tree, as_bits, depths, lineage


@st.composite
def trees(draw: Any) -> Tree:
    """Any tree of up to 40 tokens."""
    tree = Tree()
    for node in range(draw(st.integers(0, 40))):
        parent = draw(st.integers(ROOT, node - 1))
        before = tree.chances[parent] if parent != ROOT else 1.0
        tree.add(node, parent, before * draw(st.floats(0, 1)), 0.5)
    return tree


@given(trees())
def test_lineage_and_depths_are_those_of_the_paths(tree: Tree) -> None:
    seen, depth = lineage(tree.parents), depths(tree.parents)
    for node in range(len(tree)):
        path = tree.path(node)
        assert np.flatnonzero(seen[node]).tolist() == path
        assert depth[node] == len(path) - 1
        assert path[-1] == node
    children = tree.children()
    assert sorted(node for behind in children.values() for node in behind.values()) == list(range(len(tree)))


@given(trees(), st.integers(0, 50), st.floats(0, 1))
def test_the_likeliest_part_is_a_tree(tree: Tree, count: int, least: float) -> None:
    nodes = tree.likeliest(count, least)
    part = tree.part(nodes)
    assert len(part) == len(nodes) <= count
    for place, node in enumerate(nodes):
        assert [part.tokens[at] for at in part.path(place)] == [tree.tokens[at] for at in tree.path(node)]
        assert part.chances[place] >= least
    left = [tree.chances[node] for node in range(len(tree)) if node not in nodes]
    if len(nodes) < count:
        assert all(chance < least for chance in left)
    elif nodes:
        assert max(left, default=0) <= min(part.chances)


@given(st.lists(st.lists(st.booleans(), min_size=64, max_size=64), min_size=1, max_size=5))
def test_bits(rows: list[list[bool]]) -> None:
    found = as_bits(np.array(rows))
    for row, bits in zip(rows, found.tolist(), strict=True):
        assert [bool(bits >> place & 1) for place in range(64)] == row
    assert as_bits(np.array([[True, False, True]])).tolist() == [5]


@given(st.floats(0.001, 0.999), st.floats(0, 1))
def test_calibration_comes_near_what_happens(probability: float, share: float) -> None:
    calibration, rng = Calibration(), np.random.default_rng(0)
    assert abs(calibration.rate(probability) - probability) < 1e-9
    for hit in rng.random(600) < share:
        calibration.learn(probability, hit=bool(hit))
    assert abs(calibration.rate(probability) - share) < 0.25
    assert 0 <= calibration.rate(probability) <= 1


def rounds(growth: Growth, *, target_s: float, draft_s: float, per_token_s: float = 0.0, count: int = 80) -> list[int]:
    """Rounds of a draft that is right with the probability it says, .7 or .2 for the second token; their levels."""
    rng, levels = np.random.default_rng(1), []
    for _ in range(count):
        tree, behind, level = Tree(), [ROOT], 0
        while True:
            level += 1
            new = []
            for parent in behind:
                before = tree.chances[parent] if parent != ROOT else 1.0
                for probability in (0.7, 0.2):
                    rate = growth.calibration.rate(probability)
                    new.append(tree.add(len(tree), parent, before * rate, probability))
            behind = sorted(sorted(new, key=lambda node: -tree.chances[node])[:4])
            if not growth.goes_on([tree.chances[node] for node in behind], level):
                break
        tree = tree.part(growth.chosen(tree))
        path, at, children = [], ROOT, tree.children()
        while behind_it := list(children.get(at, {}).values()):
            drawn, passed = rng.random(), 0.0
            for node in behind_it:
                passed += tree.probabilities[node]
                if drawn < passed:
                    break
            else:
                break
            path.append(node)
            at = node
        growth.learn(
            tree,
            children,
            path,
            committed=len(path) + 1,
            passes=level,
            draft_s=level * draft_s,
            target_s=target_s + per_token_s * len(tree),
            first=False,
        )
        levels.append(level)
    return levels


def test_trees_are_deeper_where_the_target_is_slower() -> None:
    deep = [np.mean(rounds(Growth(DraftTreeConfig()), target_s=t, draft_s=1.0)[20:]) for t in (2, 20, 200)]
    assert deep[0] < deep[1] < deep[2]
    assert deep[0] < 6
    assert deep[2] > 8


def test_levels_before_anything_is_known_and_at_most() -> None:
    fresh = Growth(DraftTreeConfig())
    assert [fresh.goes_on([0.9], level) for level in range(7)] == [True] * 5 + [False] * 2
    assert not fresh.goes_on([], 0)
    fixed = Growth(DraftTreeConfig(policy="tree", depth=7))
    assert [fixed.goes_on([0.001], level) for level in (1, 6, 7, 8)] == [True, True, False, False]


def test_tokens_that_cost_more_than_they_give_are_left_out() -> None:
    growth = Growth(DraftTreeConfig())
    rounds(growth, target_s=20, draft_s=0.1, per_token_s=2.0)
    tree = Tree()
    for chance in (0.9, 0.5, 0.001):
        tree.add(len(tree), ROOT, chance)
    assert growth.chosen(tree) == [0, 1]
    free = Growth(DraftTreeConfig())
    rounds(free, target_s=20, draft_s=0.1)
    assert free.chosen(tree) == [0, 1, 2]


def test_drafts_of_little_worth_are_still_learned_from() -> None:
    growth, tree = Growth(DraftTreeConfig()), Tree()
    for chance in (0.1, 0.2, 0.05):
        tree.add(len(tree), ROOT, chance)
    for nodes in ([0], [0, 1, 2]):
        part = tree.part(nodes)
        told: dict[str, Any] = {"committed": 1, "passes": 1, "draft_s": 0.1, "target_s": len(part), "first": False}
        growth.learn(part, part.children(), [], **told)
    assert growth.chosen(tree) == [1]
    assert growth.chosen(Tree()) == []


@pytest.mark.daily
@pytest.mark.parametrize("right", [0, 1])
def test_tokens_that_are_right_are_thought_likelier(right: int) -> None:
    growth, tree = Growth(DraftTreeConfig()), Tree()
    for node, chance in enumerate((0.7, 0.2)):
        tree.add(node, ROOT, chance, chance)
    for _ in range(200):
        told: dict[str, Any] = {"committed": 2, "passes": 1, "draft_s": 1.0, "target_s": 1.0, "first": False}
        growth.learn(tree, tree.children(), [right], **told)
    rates = [growth.calibration.rate(chance) for chance in (0.7, 0.2)]
    assert [rate > 0.9 for rate in rates] == [right == 0, right == 1]


def test_a_fixed_tree_is_always_as_large() -> None:
    growth = Growth(DraftTreeConfig(policy="tree", depth=3))
    assert set(rounds(growth, target_s=0.001, draft_s=1.0, per_token_s=1.0)) == {3}


def test_times_of_prompts_count_until_there_are_others() -> None:
    growth, tree = Growth(DraftTreeConfig()), Tree()
    tree.add(0)
    told: dict[str, Any] = {"committed": 2, "passes": 1, "draft_s": 1.0}
    for _ in range(5):
        growth.learn(tree, tree.children(), [0], target_s=1000.0, first=True, **told)
    assert growth.goes_on([0.01], 2)
    for _ in range(2):
        growth.learn(tree, tree.children(), [0], target_s=1.0, first=False, **told)
        growth.learn(tree, tree.children(), [0], target_s=1000.0, first=True, **told)
    assert not growth.goes_on([0.01], 2)


def told(**of: Any) -> dict[str, Any]:
    """A round of one pass of the draft and one of the target, a second each, which gives two tokens."""
    return {"committed": 2, "passes": 1, "draft_s": 1.0, "target_s": 1.0, "first": False} | of


def test_another_level_must_save_time() -> None:
    growth = Growth(DraftTreeConfig())
    growth.learn(Tree(), {}, [], **told(passes=2, draft_s=2.0, target_s=2.0, committed=4))
    assert [growth.goes_on([chance], 1) for chance in (1.0, 1.01)] == [False, True]  # a second, for a second
    slow = Growth(DraftTreeConfig())
    slow.learn(Tree(), {}, [], **told(committed=1, draft_s=3.0))  # without drafts a token takes one second, not four
    assert [slow.goes_on([chance], 1) for chance in (2.9, 3.1)] == [False, True]


@pytest.mark.daily
@pytest.mark.parametrize(("policy", "chain", "right"), [("auto", False, 1), ("auto", True, 0), ("chain", False, 0)])
def test_a_level_of_one_child_each_is_worth_what_likeliest_ones_are(policy: Any, chain: bool, right: int) -> None:
    tree, growths = Tree(), [Growth(DraftTreeConfig(policy=policy)) for _ in range(3)]
    for chance in (0.7, 0.2):
        tree.add(len(tree), ROOT, chance, chance)
    for at, growth in enumerate(growths):  # the likeliest is right, the other one, none
        growth.learn(tree, tree.children(), [at] if at < 2 else [], **told(draft_s=0.5, committed=1))
    assert [growth.goes_on([0.9], 1, chain=chain) for growth in growths] == [at <= right for at in range(3)]


def test_what_chains_miss_says_nothing_of_trees() -> None:
    growth, tree = Growth(DraftTreeConfig()), Tree()
    tree.add(0)
    growth.learn(tree, tree.children(), [], **told(draft_s=0.5, committed=1))
    assert growth.goes_on([0.9], 1)
    assert not growth.goes_on([0.9], 1, chain=True)


def test_how_many_tokens_a_pass_may_carry() -> None:
    fixed, growth = Growth(DraftTreeConfig(policy="tree")), Growth(DraftTreeConfig())
    tree = Tree()
    tree.add(0)
    assert growth.longest_lag == 32  # nothing is known
    for each in (fixed, growth):
        for carried in (0, 8):  # of 2 and 10 columns: a second more for each
            each.learn(tree, {}, [], **told(committed=9, target_s=2.0 + carried, carried=carried))
    assert fixed.longest_lag == 32
    mean = (2 * 0.95 + 10) / 1.95  # seconds of a pass
    assert growth.longest_lag == pytest.approx((2 * 8 * mean) ** 0.5)
    assert fixed.chosen(tree.part([0, 0])) == [0, 1]
    free = Growth(DraftTreeConfig())
    free.learn(tree, {}, [], **told(committed=5))  # a further column takes no time: 1/64 of a pass is taken for it
    assert free.longest_lag == pytest.approx((2 * 4 * 64) ** 0.5)
    free.learn(tree, {}, [], **told(committed=50))
    assert free.longest_lag == 32
    free = Growth(DraftTreeConfig())
    free.learn(tree, {}, [], **told(committed=0))
    assert free.longest_lag == 0


def test_drafts_are_learned_from_by_what_was_said() -> None:
    growth, tree = Growth(DraftTreeConfig()), Tree()
    for token, parent, probability in ((5, ROOT, 0.6), (6, ROOT, 0.25), (7, 1, 0.9), (8, 0, 0.05)):
        tree.add(token, parent, 1.0, probability)
    for _ in range(300):
        growth.compare(tree, [6, 4, 7])
    rates = {probability: growth.calibration.rate(probability) for probability in (0.6, 0.25, 0.9, 0.05)}
    assert rates[0.6] < 0.1  # another one was said
    assert rates[0.25] > 0.9
    assert rates[0.9] < 0.1  # not what was said behind it
    assert rates[0.05] == pytest.approx(0.05)  # nobody asked
