"""Marks of files: they tell, nearly without reading, whether a file is still the one that was read before."""

import os
import sys
from hashlib import blake2b
from io import FileIO

Mark = list[int | str]  # size, times of the last change of content and of inode in ns, inode, hash of a sample

_PIECE_BYTES = 4096
_PIECES = 32


def mark_of(file: FileIO) -> Mark:
    """The mark of an open file: 132 KiB at the most are read of it.

    The sample notices most files that were put in the place of others with the same size, times and inode: one in
    which less than a 32nd part differs may be missed. File systems do not let users set the second time, so that this
    takes a file system without it, or a clock that was set back.
    """
    status = os.fstat(file.fileno())
    last = max(status.st_size - _PIECE_BYTES, 0)
    starts = sorted({last * number // _PIECES for number in range(_PIECES + 1)})
    digest = blake2b(digest_size=16)
    for start in starts:
        digest.update(read_at(file, start, _PIECE_BYTES))
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, digest.hexdigest()]


def other_content(before: Mark, now: Mark) -> bool:
    """Whether a file has other content, as far as marks tell; it may have been copied, or given other rights."""
    return [before[0], before[1], before[-1]] != [now[0], now[1], now[-1]]


def read_at(file: FileIO, start: int, nbytes: int) -> bytes:
    """Up to `nbytes` of a file."""
    found = bytearray(nbytes)
    return bytes(found[: read_into(file, start, memoryview(found))])


def read_into(file: FileIO, start: int, target: memoryview) -> int:
    """Fill `target` from `start` on as far as the file goes; returns the number of bytes.

    A forked process shares the position in a file with its parent, so that it is not used.
    """
    done = 0
    if sys.platform == "win32":  # which has neither forks nor this call
        file.seek(start)
        while done < len(target) and (count := file.readinto(target[done:])):
            done += count
        return done
    if not hasattr(os, "preadv"):  # macOS
        while done < len(target) and (found := os.pread(file.fileno(), len(target) - done, start + done)):
            target[done : done + len(found)] = found
            done += len(found)
        return done
    while done < len(target) and (count := os.preadv(file.fileno(), [target[done:]], start + done)):
        done += count
    return done
