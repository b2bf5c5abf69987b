"""A tier on any file system or object store that fsspec knows, which several machines may share.

    index/<root>/<key>.<start>.<bytes>      empty; written first, so that what takes room is listed without reading it
    chunks/<key>.safetensors                the blob
    chunks/<key>.entry                      the entry; where there is one, there is a blob
    heads/<head>/<time>-<key>               empty; what begins alike can be listed, newest last
    notices/<time>-<id>                     a notice; listed once a second
    unfinished-<time>-<id>                  any of these, while it is written

A list may name what is gone. An object under a head is then dropped when it is met.
"""

import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from shutil import disk_usage
from typing import Any, NamedTuple
from uuid import uuid4

from fsspec.implementations.local import LocalFileSystem

from kvboost_hf import forks
from kvboost_hf.cache.planning.chunks import KEY_BYTES
from kvboost_hf.cache.tiers.base import MAX_ALIKE, Entry, Heard, RemoteTier, is_no_space, without_secrets
from kvboost_hf.cache.tiers.record import pack_entry, unpack_entry

_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # Windows has neither
_LISTED_EVERY_S = 1.0  # notices
_MAX_NOTICES = 4096
_UNFINISHED = re.compile(r"unfinished-(?:([0-9a-f]{16})-)?[0-9a-f]{32}")  # without a time, of an earlier release
_EXPIRES_NS = 3600 * 10**9  # what is older, by whatever clock, is of a process that was killed
# Where a file can be seen while it is written, and renaming it is one step. Object stores show what is complete.
_RENAMED = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs"})
_KEEPS_FULL = _RENAMED - {"hdfs"}  # `rmdir` leaves a folder with something in it; elsewhere it takes that, too


class _Listed(NamedTuple):
    """Fields of a name in the index."""

    path: str
    key: bytes
    start: int
    nbytes: int


class FilesystemTier(RemoteTier):
    """Blobs as files, or objects in a bucket. On a local disk prefer `DiskTier`, which keeps files from other users.

    Args:
        url: Any that fsspec knows, such as `s3://bucket/path`, `sftp://host/path` or `file:///path`. Of file systems
            besides these, memory and plain http, fsspec needs a package of their own.
        max_bytes: Budget, or None. What is there is listed once, when it is first needed, and counted from then on:
            several processes that write may exceed it together. What was used longest ago in this process goes first,
            also where a local disk is full before.
        storage_options: For fsspec: credentials, and how long to wait for answers, which only it can tell.
        cooldown_s: Seconds that it is left alone for after a failure, twice as many after each further one, up to 30.
            While only writing fails, as on a full disk or without the right to write, it is read from.

    Raises:
        ImportError: if fsspec needs a package for this URL that is not installed.
        ValueError: for a URL that fsspec does not know, one of several file systems (`simplecache::s3://…`), a path of
            this machine that is no folder, cannot be read or cannot be made, or a number that is not positive.
    """

    def __init__(
        self,
        url: str,
        *,
        max_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        cooldown_s: float = 1.0,
    ) -> None:
        super().__init__("filesystem", url, max_bytes, cooldown_s, Exception)
        self._fs, self._base = _file_system(url, storage_options or {})
        if isinstance(self._fs, LocalFileSystem):
            _require_folder(self._base)
        protocols = self._fs.protocol
        protocols = [protocols] if isinstance(protocols, str) else protocols
        self._renames = not _RENAMED.isdisjoint(protocols)
        self._drops_empty = not _KEEPS_FULL.isdisjoint(protocols)
        self._held: OrderedDict[bytes, _Listed] | None = None  # least recently used first; None until it is needed
        self._lock = forks.lock()  # of `_held`
        self._changing = forks.lock()  # while a chunk is written or given up: it is more than one file
        if self._renames:
            self._guard.call(None, self._remove_unfinished)

    def stats(self) -> Mapping[str, int | float | str]:
        """As those of any tier; `free_bytes` of a disk of this machine."""
        known = dict(super().stats())
        if isinstance(self._fs, LocalFileSystem):
            with suppress(OSError):
                known["free_bytes"] = disk_usage(self._base).free
        return known

    def close(self) -> None:
        """fsspec closes its connections by itself."""

    def _find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        paths = {self._entry_path(key): key for key in keys}
        found = {}
        for path, packed in self._contents(paths).items():
            if isinstance(packed, FileNotFoundError):
                continue
            try:
                entry = unpack_entry(_ours(packed))
            except ValueError:
                entry = None
            if entry is not None and entry.key == paths[path]:
                found[entry.key] = entry
            else:  # not ours, or of another version: nothing else could ever be written there
                self._clean([path])
        return {key: found[key] for key in keys if key in found}

    def _find_alike(self, heads: Sequence[bytes]) -> list[Entry]:
        listed = {key: path for head in heads for path, key in self._alike(head)[:MAX_ALIKE]}
        found = self._find(list(listed)) if listed else {}
        self._clean([path for key, path in listed.items() if key not in found])
        return list(found.values())

    def _alike(self, head: bytes) -> list[tuple[str, bytes]]:
        """Paths and keys of what is listed under a head, newest first."""
        found = []
        for path in sorted(self._listing(f"heads/{head.hex()}"), reverse=True):
            with suppress(ValueError):  # a file of somebody else's
                found.append((path, bytes.fromhex(path.rpartition("-")[2])))
        return found

    def _listing(self, folder: str) -> list[str]:
        """The paths of what is in a folder; of some file systems, such as that of ftp, `ls` has the names alone."""
        folder = f"{self._base}/{folder}".rstrip("/")
        with suppress(FileNotFoundError):
            listed = self._fs.ls(folder, detail=False)
            return [f"{folder}/{path.rstrip('/').rpartition('/')[2]}" for path in listed]
        return []

    def _keys(self, root: bytes | None) -> list[bytes]:
        if root is None or len(root) == KEY_BYTES:
            return [listed.key for listed in self._index("index" if root is None else f"index/{root.hex()}")]
        names = [path.rpartition("/")[2] for path in self._listing("index")]
        alike = [f"index/{name}" for name in names if name.startswith(root.hex())]
        return [listed.key for folder in alike for listed in self._index(folder)]

    def _read(self, key: bytes) -> memoryview | None:
        (content,) = self._contents([self._blob_path(key)]).values()
        if not isinstance(content, FileNotFoundError):
            return memoryview(_ours(content))
        with self._changing:  # another thread may have written it by now
            if not self._fs.exists(self._blob_path(key)):  # another process wrote it as this one gave it up
                self._clean([self._entry_path(key)])
        return None

    def _write(self, entry: Entry, blob: Sequence[memoryview]) -> bool:
        return self._writing.call(False, self._write_now, entry, blob)

    def _write_now(self, entry: Entry, blob: Sequence[memoryview]) -> bool:
        with self._changing:
            self._drop_links(f"index/{entry.root.hex()}", f"heads/{entry.head.hex()}")
            if not self._fs.exists(self._entry_path(entry.key)):
                self._make_room(entry.nbytes, self.max_bytes)
                try:
                    self._put_all(entry, blob)
                except OSError as error:
                    if not is_no_space(error):
                        raise
                    self._make_room(entry.nbytes, self._count()[1])
                    self._put_all(entry, blob)
        return True

    def _put_all(self, entry: Entry, blob: Sequence[memoryview]) -> None:
        listed = self._listed(entry)
        contents = {
            listed.path: b"",
            self._blob_path(entry.key): b"".join(blob),
            self._entry_path(entry.key): pack_entry(entry),
        }
        if entry.head:
            contents[f"{self._base}/heads/{entry.head.hex()}/{time.time_ns():016x}-{entry.key.hex()}"] = b""
        try:
            for path, content in contents.items():
                self._put(path, content)
        except Exception:
            with suppress(Exception):  # it would take room, and nobody would count it
                self._remove(reversed(contents))
            raise
        with self._lock:
            if self._held is not None:
                self._held[entry.key] = listed

    def _touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            if self._held is not None:
                held = self._held
                for key in sorted((key for key in keys if key in held), key=lambda key: -held[key].start):
                    held.move_to_end(key)

    def _delete(self, keys: Sequence[bytes]) -> bool:
        return self._writing.call(False, self._delete_now, keys)

    def _delete_now(self, keys: Sequence[bytes]) -> bool:
        with self._changing:
            self._drop_links()
            self._give_up([self._listed(entry) for entry in self._find(keys).values()])
        return True

    def _announce(self, notice: bytes) -> bool:
        return self._writing.call(False, self._announce_now, notice)

    def _announce_now(self, notice: bytes) -> bool:
        self._drop_links()
        self._put(f"{self._base}/notices/{time.time_ns():016x}-{uuid4().hex}", notice)
        return True

    def _heard(self, since: tuple[float, frozenset[str]] | None) -> Heard:
        """A place is when the notices were last listed, and their paths: clocks of others do not matter."""
        now = time.monotonic()
        listed_at, seen = since or (now - _LISTED_EVERY_S, frozenset())
        if now - listed_at < _LISTED_EVERY_S:
            return Heard(since)
        listed = frozenset(self._fs.find(f"{self._base}/notices"))
        new = sorted(listed - seen)
        found = {path: content for path, content in self._contents(new).items() if isinstance(content, bytes)}
        if len(listed) > _MAX_NOTICES:
            self._clean(sorted(listed)[: _MAX_NOTICES // 4])
        # Where none was seen that could still be there, so many have come that some may have gone again.
        whole = bool(seen & listed) if seen else len(listed) < _MAX_NOTICES // 2
        complete = since is None or (len(found) == len(new) and whole)
        return Heard((now, listed), [found[path] for path in new if path in found], complete)

    def _count(self) -> tuple[int, int]:
        self._scan()
        with self._lock:
            sizes = [listed.nbytes for listed in (self._held or {}).values()]
        return len(sizes), sum(sizes)

    def _scan(self) -> None:
        """List what is there, if that was not done yet; what continues a chunk is to go before the chunk itself."""
        if self._held is None:
            there = {listed.key: listed for listed in sorted(self._index("index"), key=lambda listed: -listed.start)}
            with self._lock:
                self._held = OrderedDict(there | (self._held or {}))

    def _make_room(self, nbytes: int, within: int | None) -> None:
        """Give up chunks until `nbytes` more are within a budget, if there is one."""
        if within is None:
            return
        excess = self._count()[1] + nbytes - within
        victims = []
        with self._lock:
            for listed in (self._held or {}).values():
                if excess <= 0:
                    break
                victims.append(listed)
                excess -= listed.nbytes
        self._give_up(victims)

    def _give_up(self, chunks: Sequence[_Listed]) -> None:
        entries = self._find([chunk.key for chunk in chunks]) if chunks else {}
        for chunk in chunks:
            key, entry = chunk.key, entries.get(chunk.key)
            heads = [path for path, alike in self._alike(entry.head) if alike == key] if entry and entry.head else []
            self._remove([*heads, self._entry_path(key), self._blob_path(key), chunk.path])
            with self._lock:
                if self._held is not None:
                    self._held.pop(key, None)

    def _index(self, folder: str) -> list[_Listed]:
        """Names in a folder of the index, or in all of them."""
        found = []
        for path in self._fs.find(f"{self._base}/{folder}"):
            with suppress(ValueError):  # a file of somebody else's
                key, start, nbytes = path.rpartition("/")[2].split(".")
                found.append(_Listed(path, bytes.fromhex(key), int(start), int(nbytes)))
        return found

    def _listed(self, entry: Entry) -> _Listed:
        name = f"{entry.key.hex()}.{entry.start}.{entry.nbytes}"
        return _Listed(f"{self._base}/index/{entry.root.hex()}/{name}", entry.key, entry.start, entry.nbytes)

    def _entry_path(self, key: bytes) -> str:
        return f"{self._base}/chunks/{key.hex()}.entry"

    def _blob_path(self, key: bytes) -> str:
        return f"{self._base}/chunks/{key.hex()}.safetensors"

    def _contents(self, paths: Collection[str]) -> dict[str, bytes | Exception]:
        """The contents of files, or why they cannot be had."""
        if paths and not isinstance(self._fs, LocalFileSystem):
            found: dict[str, bytes | Exception] = self._fs.cat(list(paths), on_error="return")
            return found
        contents: dict[str, bytes | Exception] = {}
        for path in paths:
            try:
                contents[path] = _content(path)
            except OSError as error:
                contents[path] = error
        return contents

    def _put(self, path: str, content: bytes) -> None:
        if not self._renames:
            self._fs.pipe_file(path, content)
            return
        unfinished = f"{self._base}/unfinished-{time.time_ns():016x}-{uuid4().hex}"
        try:
            if isinstance(self._fs, LocalFileSystem):
                _put_privately(unfinished, path, content)
            else:
                self._fs.makedirs(os.path.dirname(path), exist_ok=True)
                self._fs.pipe_file(unfinished, content)
                try:
                    self._fs.mv(unfinished, path)
                except Exception:  # the folder was empty, and another process has just removed it
                    self._fs.makedirs(os.path.dirname(path), exist_ok=True)
                    self._fs.mv(unfinished, path)
        except Exception:
            with suppress(Exception):
                self._fs.rm_file(unfinished)
            raise

    def _clean(self, paths: Sequence[str]) -> None:
        """Remove what is of no use to anybody, if the place can be written to."""
        if paths:
            self._writing.call(None, self._remove, paths)

    def _remove_unfinished(self) -> None:
        """Remove what killed processes were writing: it would take room, and nobody would count it."""
        now, left = time.time_ns(), []
        for path in self._listing(""):
            found = _UNFINISHED.fullmatch(path.rpartition("/")[2])
            if found is not None and abs(now - int(found[1] or "0", 16)) > _EXPIRES_NS:
                left.append(path)
        self._clean(left)

    def _drop_links(self, *folders: str) -> None:
        """None of our folders is a link: what is written and removed would be so wherever one leads to."""
        if isinstance(self._fs, LocalFileSystem):
            for folder in ("index", "chunks", "heads", "notices", *folders):
                if os.path.islink(path := f"{self._base}/{folder}"):
                    os.unlink(path)

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                self._fs.rm_file(path)
            except Exception:  # not always a `FileNotFoundError`
                if self._fs.exists(path):
                    raise
            folder = os.path.dirname(path)
            if self._drops_empty and os.path.dirname(folder) != self._base:  # of one head, or of one root
                with suppress(Exception):  # it is not empty
                    self._fs.rmdir(folder)


class _ForeignError(OSError):
    """In the place of a file is a link, a pipe or a device."""


def _content(path: str) -> bytes:
    """The content of a file of this machine; no link is followed, no pipe waited for. OSError: it cannot be had."""
    if os.path.islink(os.path.dirname(path)):
        raise FileNotFoundError(path)
    if os.path.islink(path):
        raise _ForeignError(path)
    with open(os.open(path, os.O_RDONLY | _AS_IT_IS), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _ForeignError(path)
        return file.read()


def _ours(content: bytes | Exception) -> bytes:
    """The content of a file, nothing for what nobody here has put there; else raises why it cannot be had."""
    if isinstance(content, Exception) and not isinstance(content, _ForeignError):
        raise content
    return content if isinstance(content, bytes) else b""


def _put_privately(unfinished: str, path: str, content: bytes) -> None:
    """Write a file of this machine for its owner alone, in folders that are made for its owner alone."""
    _make_privately(os.path.dirname(path))
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    try:
        os.replace(unfinished, path)
    except FileNotFoundError:  # the folder was empty, and another process has just removed it
        _make_privately(os.path.dirname(path))
        os.replace(unfinished, path)


def _require_folder(path: str) -> None:
    try:
        _make_privately(path)
        os.listdir(path)
    except OSError as error:
        raise ValueError(
            f"`url` must name a folder that can be read, or one that can be made, got {path!r} ({error.strerror}). "
            "Pass another one, or change who may use it."
        ) from error


def _make_privately(folder: str) -> None:
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for each in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(each, 0o700)


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    import fsspec

    shown = without_secrets(url)
    if not url.partition("://")[2] or any(letter in shown for letter in "*?["):
        raise ValueError(
            f"`url` must be a scheme and a place, without wildcards, got {shown!r}. Example: 's3://bucket/path'."
        )
    if "::" in url:
        raise ValueError(
            f"`url` must name one file system, got {shown!r}, a chain ('::'): caches in one keep what others remove, "
            "and archives cannot be written to and read. Pass the last of them alone."
        )
    try:
        # What other processes write must be seen: no listing may be kept.
        found = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
    except ImportError as error:
        raise ImportError(f"fsspec needs another package for {shown!r}: {error}") from error
    except ValueError as error:
        raise ValueError(
            f"`url` must begin with a scheme that fsspec knows, got {shown!r}. Example: 's3://bucket/path'."
        ) from error
    return found[0], found[1].rstrip("/")
