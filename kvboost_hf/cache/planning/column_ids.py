"""Column ids: the int64 that represents a column of a prompt wherever prompts are compared, hashed and stored.

K/V of a text token depends on the tokens before it, so its token id is enough. K/V of an image, sound or video depends
on what is shown, and models with three-dimensional rotary positions shift the positions of text behind an image by an
amount that the image decides. A column id carries both, so that code that works on token ids needs no special case:

    text                         token id
    text with shifted positions  token id + (shift << 32)
    image, sound or video        a number below -2**62, from the hash of what is shown

Text behind an image keeps its token id (shift aside), because its history includes the image's column ids.
"""

from hashlib import shake_256

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import Tokens

_ID_BITS = 32
_MEDIA = -(2**62)  # ids of media are below this one, all others above


def shifted_ids(ids: Tokens, shifts: NDArray[np.int64]) -> Tokens:
    """Column ids of text `ids` whose positions are `shifts` more than their place in the row."""
    return ids + (shifts << _ID_BITS)


def media_ids(seed: bytes, columns: int) -> Tokens:
    """Column ids of `columns` columns of one image, sound or video, drawn from `seed`, a hash of all it shows."""
    drawn = np.frombuffer(shake_256(seed).digest(8 * columns), dtype="<u8")
    ids: Tokens = _MEDIA - 1 - (drawn >> np.uint64(2)).astype(np.int64)
    return ids


def is_text(column_ids: Tokens) -> bool:
    """Whether all columns are of text, so that their ids are those of tokens."""
    return np.array_equal(text_ids(column_ids), column_ids)


def text_ids(column_ids: Tokens) -> Tokens:
    """Token ids of text columns, and -1 for media."""
    return np.where(column_ids < _MEDIA, -1, column_ids & (2**_ID_BITS - 1))
