"""Groups prompts into batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A chunk behind others."""

    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)  # that are in no group further down


def group_by_prefix(
    rows: Sequence[Sequence[int]], chunk_size: int, max_batch_size: int | None = None
) -> list[list[int]]:
    """Group prompts that begin with the same chunks, those with the most in common first.

    A prompt goes where the longest chain of whole chunks is that another one, which is not yet in a group, has, too.
    One that shares no chunk with another stays alone.

    Args:
        rows: Token ids of each prompt.
        chunk_size: Tokens of a chunk.
        max_batch_size: The most prompts in a group; None for any number.

    Returns:
        Groups of indices into `rows`, each in ascending order, by their first index.

    Raises:
        ValueError: for a `chunk_size` or `max_batch_size` less than 1.

    Example:
        >>> group_by_prefix([[1, 2, 3, 4], [9, 9], [1, 2, 5, 6], [1, 2, 3, 4, 7]], chunk_size=2)
        [[0, 3], [1], [2]]
    """
    for name, value in (("chunk_size", chunk_size), ("max_batch_size", max_batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be 1 or more, got {value}.")
    root = _Node()
    for row, ids in enumerate(rows):
        node = root
        for start in range(0, len(ids) - chunk_size + 1, chunk_size):
            node = node.children.setdefault(tuple(ids[start : start + chunk_size]), _Node())
        node.rows.append(row)
    groups: list[list[int]] = []
    for node in _deepest_first(root):
        left = sorted(node.rows + [row for child in node.children.values() for row in child.rows])
        if node is not root and len(left) < 2:
            node.rows = left
            continue
        size = 1 if node is root else max_batch_size or len(left)
        groups += [left[at : at + size] for at in range(0, len(left), size)]
        node.rows = []
    return sorted(groups)


def _deepest_first(root: _Node) -> list[_Node]:
    """All nodes, each behind its children. Prompts may have more chunks than Python has stack."""
    found = [root]
    for node in found:
        found += node.children.values()
    return found[::-1]
