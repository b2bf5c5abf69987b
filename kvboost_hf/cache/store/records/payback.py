"""Tells whether storing text pays, where storing takes as long as computing some of it."""

from collections import OrderedDict

from kvboost_hf.cache.store.records.history import remember

# Storing so many tokens, or what takes as long as computing so many, tells whether it pays.
_STORED_AT_LEAST, _COMPUTED_AT_LEAST = 65_536, 4_096


class Payback:
    """Counts what was stored against what served prompts.

    Args:
        pays_for: How many tokens take as long to store as one takes to compute; None stores all that comes.
    """

    def __init__(self, pays_for: int | None) -> None:
        self._pays_for = pays_for
        self.clear()

    def clear(self) -> None:
        """Start over."""
        self._unpaid = 0  # tokens stored, less those that serving prompts has paid for
        self._unseen: OrderedDict[bytes, None] = OrderedDict()  # keys of what was not stored when it came first

    def admits(self, key: bytes) -> bool:
        """Whether a new chunk is to be stored: where storing has not paid, one that comes again."""
        if self._pays_for is None or self._unpaid < max(_STORED_AT_LEAST, _COMPUTED_AT_LEAST * self._pays_for):
            return True
        if key in self._unseen:
            del self._unseen[key]
            return True
        remember(self._unseen, key, None)
        return False

    def note_stored(self, tokens: int) -> None:
        """So many tokens were stored that nobody asked to store."""
        self._unpaid += tokens

    def note_served(self, tokens: int) -> None:
        """So many tokens served a prompt, which pays for what was stored before."""
        if self._pays_for is not None:
            self._unpaid = max(0, self._unpaid - self._pays_for * tokens)
