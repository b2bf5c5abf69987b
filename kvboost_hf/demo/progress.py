"""Shows how far a command is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

_LINE_EVERY_S = 10.0  # where no terminal is


@contextmanager
def progress(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, and a line every ten seconds elsewhere.

    Args:
        console: Where to.
        what: Is done.

    Yields:
        What to call with how much is done, and how much is to be done in all.
    """
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    begin = shown = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= _LINE_EVERY_S:
            shown = now
            console.print(f"{what}: {done} of {total} in {now - begin:.0f} s", highlight=False)

    yield line
