"""How often a draft looks at its tokens: pure Python, no tensors."""

_SELDOM = 4  # passes between two looks that are dear
_DEAR = 0.25  # of a pass: a draft of usual length wastes as much on what it would not have drafted, had it looked
_FADE = 0.9  # what the times of a look still count after the next one


class Looks:
    """Looks at each token where that costs little of a pass, else every few.

    A device that was waited for is idle until the next pass is launched. That takes no longer than a launch, nor than
    the wait, by which the device was behind. Where there is nothing to wait for, as on a CPU, a look costs nothing.
    """

    def __init__(self) -> None:
        self._idle_s, self._pass_s = 0.0, 0.0

    @property
    def every(self) -> int:
        """Passes from one look to the next."""
        return _SELDOM if self._idle_s > _DEAR * self._pass_s else 1

    def learn(self, *, passes: int, launch_s: float, wait_s: float) -> None:
        """What a look took.

        Args:
            passes: Since the last one.
            launch_s: Seconds until all of them were launched.
            wait_s: Seconds until their tokens were on the host then.
        """
        self._idle_s = _FADE * self._idle_s + min(launch_s / passes, wait_s)
        self._pass_s = _FADE * self._pass_s + (launch_s + wait_s) / passes
