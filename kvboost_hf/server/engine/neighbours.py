"""Plans of host memory that know of other servers here: what one has promised itself, no other one takes."""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

if sys.platform != "win32":
    import fcntl


class MemoryPlans:
    """The plans of all servers of this user on this machine, a file for each process.

    A plan counts as long as its process runs: the bytes that it may still come to use.

    They are beside the temporary files. On Windows none are known.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._uid = os.getuid() if sys.platform != "win32" else 0
        self._folder = folder or Path(tempfile.gettempdir()) / f"kvboost_hf-{self._uid}"
        self._own = self._folder / f"plan-{os.getpid()}.json"

    @contextmanager
    def locked(self) -> Iterator[int]:
        """While nobody else plans: yields the bytes that other servers may still come to use.

        Where the folder cannot be had, no other server is known.
        """
        if sys.platform == "win32":
            yield 0
            return
        try:
            self._folder.mkdir(0o700, exist_ok=True)
            found = self._folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != self._uid or found.st_mode & 0o022:
                raise PermissionError(f"{self._folder} is no folder of this user alone.")
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield 0
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield sum(map(self._left, self._folder.glob("plan-*.json")))
        finally:
            os.close(lock)

    def claim(self, nbytes: int) -> None:
        """Note that this process may come to use so many bytes more than it does now."""
        process = psutil.Process()
        peak = process.memory_info().rss + nbytes
        with suppress(OSError):
            file = os.open(self._own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(file, "w") as plan:
                json.dump({"since": process.create_time(), "peak": peak}, plan)

    def release(self) -> None:
        """Forget the plan of this process."""
        self._own.unlink(missing_ok=True)

    def _left(self, path: Path) -> int:
        """Bytes that the process of a plan may still come to use; the plan is removed if that has ended."""
        if path == self._own:
            return 0
        try:
            plan = json.loads(path.read_text("utf-8"))
            process = psutil.Process(int(path.stem.removeprefix("plan-")))
            if abs(process.create_time() - plan["since"]) < 1:
                left: int = int(plan["peak"]) - process.memory_info().rss
                return max(0, left)
        except (OSError, ValueError, TypeError, KeyError, psutil.Error):
            pass
        with suppress(OSError):
            path.unlink()
        return 0
