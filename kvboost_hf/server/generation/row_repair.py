"""`RowRepair`: the repair of a row whose moved K/V is made exact along with the steps of a batch.

    step    row 0   [ tainted tokens 40 to 55 | new token ]      a part of each row that has some, in order
            row 1   [ new token, as often     | new token ]      the others are filled up

The batch's copy of the K/V is repaired. When the row leaves, its own cache takes over what is exact.
"""

from dataclasses import dataclass

from kvboost_hf.config import Progressive


@dataclass(slots=True)
class RowRepair:
    """How far the repair of a row is.

    Args:
        start: The first tainted token when the row joined.
        progressive: How many tokens a step takes along: a number, or `"ride"`.

    Attributes:
        at: The first tainted token now. All behind it are tainted, too.
        count: Tokens that were computed again.
        done: No token is tainted any more, and new ones are exact.
    """

    start: int
    progressive: Progressive
    at: int = -1
    count: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        self.at = self.start

    def next(self, length: int, free: int) -> tuple[int, int]:
        """The tokens [start, stop) that the next step computes again.

        Args:
            length: Tokens of the row before the step.
            free: How many more tokens of each row a step can take.
        """
        if self.done:
            return length, length
        most = free if self.progressive == "ride" else int(self.progressive)
        return self.at, min(self.at + most, length)

    def advance(self, stop: int, length: int) -> None:
        """A step has computed all tokens before `stop` again, in a row that had `length` before it."""
        if not self.done:
            self.count += stop - self.at
            self.at, self.done = stop, stop == length

    def exact(self, length: int) -> int:
        """How many first tokens are exact, of `length`."""
        return length if self.done else self.at
