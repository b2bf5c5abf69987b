"""The output of commands: results to a file, or to standard output for `-`, and progress on standard error."""

import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

STANDARD_OUTPUT = Path("-")
_REWRITE_S = 0.5  # on a terminal
_FIRST_LINE_S, _LINE_EVERY_S = 2.0, 10.0  # elsewhere: logs stay short


def output_path(text: str) -> Path:
    """The path that an argument of a command line names: a writable file, or `-`.

    Raises:
        ValueError: the folder does not exist, or the file cannot be written.
    """
    if text == str(STANDARD_OUTPUT):
        return STANDARD_OUTPUT
    try:
        path = Path(text).resolve()
        place = path if path.exists() else path.parent
        can_be = path.parent.is_dir() and not path.is_dir() and os.access(place, os.W_OK)
    except OSError:  # its name is too long, say
        can_be = False
    if not can_be:
        raise ValueError(f"{text!r} cannot be written: name a file in a folder that there is.")
    return path


def write(path: Path, text: str) -> None:
    """Write text to a file, or to standard output.

    Raises:
        OSError: it cannot be written, for want of room, say.
    """
    if path == STANDARD_OUTPUT:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as files, for escapes would change what is written
        sys.stdout.write(text + "\n")
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}. Make room, or name another file.") from error


def say(console: Any, text: str, end: str = "\n") -> None:
    """Print text as it is: without markup, colours of its own, or wrapping.

    Args:
        console: A console of rich.
        text: To print.
        end: Behind it.
    """
    console.print(text, end=end, highlight=False, markup=False, soft_wrap=True)


def written(*paths: Path | None) -> list[str]:
    """A line for each file that was written.

    Args:
        paths: Given on the command line; None for no file.
    """
    return [f"Written: {path}" for path in paths if path not in (None, STANDARD_OUTPUT)]


class Progress:
    """Shows the progress of a command until its context ends; a thread writes, so that a long step is seen to go on.

    On a terminal one line is rewritten, and is gone in the end. Elsewhere there is a line after two seconds, and then
    one every ten. What takes less time shows nothing.

    Args:
        what: The command does first.
        write: Takes each line in place of standard error, as what is no terminal does.
    """

    def __init__(self, what: str = "starting", write: Callable[[str], object] | None = None) -> None:
        self._what, self._done, self._total = what, 0, 0
        self._begin = time.monotonic()
        self._stderr: TextIO = sys.stderr
        self._terminal = write is None and self._stderr.isatty()
        self._write = write or (self._rewrite if self._terminal else self._line)
        self._bar: tqdm | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.close()

    def show(self, what: str, done: int = 0, total: int = 0) -> None:
        """Say what the command is doing now, how much of it is done, and how much there is; 0 if that is unknown."""
        self._what, self._done, self._total = what, done, total

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the line off the terminal inside the context, so that results can be printed."""
        with tqdm.external_write_mode(file=self._stderr) if self._terminal else nullcontext():
            yield

    @property
    def seconds(self) -> float:
        """Since the command began."""
        return time.monotonic() - self._begin

    def _run(self) -> None:
        wait = _REWRITE_S if self._terminal else _FIRST_LINE_S
        while not self._ended.wait(wait):
            try:
                self._write(self._text())
            except (OSError, ValueError):  # nobody reads it any longer
                return
            wait = _REWRITE_S if self._terminal else _LINE_EVERY_S

    def _text(self) -> str:
        counted = f": {self._done:,} of {self._total:,}" if self._total else ""
        return f"{self._what}{counted} ({duration(self.seconds)})"

    def _line(self, text: str) -> None:
        self._stderr.write(f"{text}\n")
        self._stderr.flush()

    def _rewrite(self, text: str) -> None:
        columns, lines = shutil.get_terminal_size()
        if self._bar is None:  # of tqdm, which keeps it apart from the bars of downloads
            # The size is given because tqdm takes that of a terminal of unknown size, such as `script` makes, to be 0.
            self._bar = tqdm(bar_format="{desc}", leave=False, file=self._stderr, ncols=columns, nrows=lines)
        self._bar.set_description_str(text[: columns - 1])


def duration(seconds: float) -> str:
    """Seconds for a person.

    Example:
        >>> duration(3.6), duration(200)
        ('4 s', '3 min 20 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
