"""Texts that run together: whatever comes and goes, each keeps its tokens, and shares what it can."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals.server import PrefixTree
from tests.internals.top import common_prefix

LEAST = 3
texts = st.lists(st.integers(0, 1), max_size=14).map(tuple)
steps = st.lists(st.tuples(st.sampled_from("ab"), texts, st.integers(0, 5)), max_size=25)


@settings(max_examples=400, deadline=None)
@given(steps)
def test_texts_that_come_and_go(steps: list[tuple[str, tuple[int, ...], int]]) -> None:
    tree: PrefixTree[tuple[int, ...]] = PrefixTree(LEAST)
    known: list[tuple[str, tuple[int, ...], int]] = []  # owner, tokens, how many are in parts
    held: list[tuple[int, ...]] = []
    for owner, tokens, place in steps:
        if place < len(known) and place % 2:
            tree.remove(place)
            for each in (known, held):
                each[place] = each[-1]  # type: ignore[assignment]
                each.pop()
        else:
            held.append(tuple(10 * token for token in tokens))
            known.append((owner, tokens, tree.add(owner, tokens, held[-1])))
        assert len(tree) == len(known)
        paths = [tree.path(text) for text in range(len(known))]
        for (_, tokens, placed), path in zip(known, paths, strict=True):
            assert len(tokens) - placed < LEAST
            assert tuple(token for part in path for token in part.tokens) == tokens[:placed]
            assert tuple(each for part in path for each in part.held[part.start : part.stop]) == tuple(
                10 * token for token in tokens[:placed]
            )
            assert all(any(part.held is each for each in held) for part in path)  # of no text that has left
            assert [part.start for part in path] == [0, *(part.stop for part in path)][: len(path)]
        parts = {id(part): part for path in paths for part in path}
        for name, part in parts.items():
            assert len(part.texts) == sum(any(id(each) == name for each in path) for path in paths)
            assert all(len(each.texts) < len(part.texts) for each in part.below)  # there is none to join
        for i, (owner, tokens, placed) in enumerate(known):
            for j, (other, theirs, their_placed) in enumerate(known[:i]):
                shared = sum(len(part.tokens) for part in paths[i] if any(part is each for each in paths[j]))
                alike = common_prefix(tokens[:placed], theirs[:their_placed]) if owner == other else 0
                assert alike - LEAST < shared <= alike or shared == alike == 0


def test_a_tree_that_is_left_holds_nothing() -> None:
    tree: PrefixTree[str] = PrefixTree(2)
    for text in ("abcd", "abce", "abxx", "q"):
        tree.add(None, text, text)  # type: ignore[arg-type]
    assert ["".join(part.tokens) for part in tree.path(0)] == ["ab", "c", "d"]  # type: ignore[arg-type]
    for _ in range(4):
        tree.remove(0)
    assert not tree._roots
    assert not len(tree)
