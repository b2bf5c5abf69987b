"""Finds the columns at which every prompt is cut with `ReusePolicy(reproducible=True)`, whether or not it is reused.

Matrix products of other shapes round differently. So the last bits of a token's K/V depend on the forward that
computes it. With fixed pieces that forward is the same each time: columns [k * PIECE, (k + 1) * PIECE), behind all
columns before them.
"""

PIECE = 256  # columns


def whole_pieces(columns: int) -> int:
    """The last column, at most `columns`, at which a piece ends.

    Example:
        >>> whole_pieces(700)
        512
    """
    return columns - columns % PIECE


def piece_ends(filled: int, limit: int) -> list[int]:
    """The columns behind `filled`, up to `limit`, at which pieces end.

    Args:
        filled: Columns that are there, in whole pieces.
        limit: The first column whose logits are wanted.
    """
    return list(range(filled + PIECE, limit + 1, PIECE))
