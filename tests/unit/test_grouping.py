"""Which prompts go into one batch."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.internals.engine import group_by_prefix

ROWS = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12)


def shared(a: list[int], b: list[int], size: int) -> int:
    """Whole chunks that two rows begin with."""
    count = 0
    while (count + 1) * size <= min(len(a), len(b)) and a[: (count + 1) * size] == b[: (count + 1) * size]:
        count += 1
    return count


def test_the_longest_chain_wins() -> None:
    rows = [[1, 1, 2, 2], [1, 1, 3, 3], [1, 1, 2, 2, 5], [9], [1, 1, 3, 3, 4, 4], [1, 1, 7, 7]]
    assert group_by_prefix(rows, 2) == [[0, 2], [1, 4], [3], [5]]


def test_those_left_over_meet_where_they_part() -> None:
    assert group_by_prefix([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 7]], 1) == [[0, 1], [2, 3]]


def test_groups_may_have_a_limit() -> None:
    assert group_by_prefix([[1]] * 5, 1, max_batch_size=2) == [[0, 1], [2, 3], [4]]


def test_prompts_may_have_more_chunks_than_the_stack_has_frames() -> None:
    assert group_by_prefix([[1] * 5000, [1] * 5000], 1) == [[0, 1]]


def test_sizes_are_checked() -> None:
    for sizes in ({"chunk_size": 0}, {"chunk_size": 1, "max_batch_size": 0}):
        with pytest.raises(ValueError, match="1 or more, got 0"):
            group_by_prefix([[1]], **sizes)


@given(ROWS, st.integers(1, 3))
def test_every_row_is_in_one_group_with_those_that_share_most(rows: list[list[int]], size: int) -> None:
    groups = group_by_prefix(rows, size)
    assert sorted(row for group in groups for row in group) == list(range(len(rows)))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    place = {row: at for at, group in enumerate(groups) for row in group}
    chains = [[shared(a, b, size) if i != j else 0 for j, b in enumerate(rows)] for i, a in enumerate(rows)]
    for group in groups:
        assert len(group) == 1 or all(chains[a][b] for a in group for b in group if a != b)
    for i, j in combinations(range(len(rows)), 2):
        if chains[i][j] and chains[i][j] == max(chains[i]) == max(chains[j]):
            assert place[i] == place[j]
    alone = [group[0] for group in groups if len(group) == 1]
    assert not any(chains[i][j] for i, j in combinations(alone, 2))
