"""Tells whether the process that writes a file of the disk tier will ever finish.

A wrong answer costs the blob, no more.
"""

import os
import time

_EXPIRES_NS = 120 * 10**9

in_flight: set[str] = set()  # tokens of what this process is writing


def signature() -> tuple[str, int, int]:
    """This host, this process, and now."""
    return os.uname().nodename, os.getpid(), time.time_ns()


def is_dead(token: str, host: str, pid: int, since: int) -> bool:
    """Whether the writer that signed so was killed, or is stuck."""
    this_host, this_pid, now = signature()
    if not -_EXPIRES_NS < now - since < _EXPIRES_NS:
        return True
    if host != this_host:
        return False
    if pid == this_pid:
        return token not in in_flight  # another one had this number before
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
