"""Decides after how many passes the tokens of a draft model are read back to the host."""

_SELDOM = 4  # passes between two reads that are expensive
# Of a pass: a usual draft wastes as much on tokens that an earlier read would have avoided.
_EXPENSIVE = 0.25
_FADE = 0.9  # weight of earlier times after each read


class HostReads:
    """Reads each token where that is cheap compared to a pass, else only every few.

    A device that the host has waited for is idle until the next pass is launched: for a launch at most, and for the
    wait at most, by which the device was behind. Where there is nothing to wait for, as on a CPU, a read costs
    nothing.
    """

    def __init__(self) -> None:
        self._idle_s, self._pass_s = 0.0, 0.0

    @property
    def every(self) -> int:
        """Passes from one read to the next."""
        return _SELDOM if self._idle_s > _EXPENSIVE * self._pass_s else 1

    def learn(self, *, passes: int, launch_s: float, wait_s: float) -> None:
        """Learn from a read.

        Args:
            passes: Since the last read.
            launch_s: Seconds until all of them were launched.
            wait_s: Seconds from then until their tokens were on the host.
        """
        self._idle_s = _FADE * self._idle_s + min(launch_s / passes, wait_s)
        self._pass_s = _FADE * self._pass_s + (launch_s + wait_s) / passes
