"""What stands for a token where the tokens of two prompts are compared, hashed and stored.

K/V of a text token is told by the tokens up to it. That of an image, of sound or of video is told by what was shown,
and models with rotary positions in three dimensions count text after an image from a place that the image decides.
Both are carried by the *code* of a column, one int64, so that everything that works on tokens works on them unchanged:

    a text token             its id
    …with shifted positions  id + (shift << 32)
    a column of media        a number below -2**62, from the hash of what is shown there

Text after an image has its ordinary code (shift aside): its history tells the rest, as it does for text.
"""

from hashlib import blake2b, shake_256

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import Tokens

_ID_BITS = 32
_MEDIA = -(2**62)  # every code of media is below this one, every other is above


def shifted_codes(ids: Tokens, shifts: NDArray[np.int64]) -> Tokens:
    """Codes of text `ids` whose positions are `shifts` more than their place in the row."""
    return ids + (shifts << _ID_BITS)


def media_codes(seed: bytes, columns: int) -> Tokens:
    """Codes of `columns` columns that belong together, drawn from `seed`, which must tell all that is shown there."""
    drawn = np.frombuffer(shake_256(seed).digest(8 * columns), dtype="<u8")
    codes: Tokens = _MEDIA - 1 - (drawn >> np.uint64(2)).astype(np.int64)
    return codes


def shown_ids(codes: Tokens) -> Tokens:
    """The ids of text behind `codes`, and -1 for media."""
    return np.where(codes < _MEDIA, -1, codes & (2**_ID_BITS - 1))


def digest(*parts: bytes) -> bytes:
    """One hash of several byte strings, each with its length."""
    found = blake2b(digest_size=32)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()
