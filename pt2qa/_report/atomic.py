"""Writing a file atomically."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pt2qa.errors import ReportError


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part of it; text as UTF-8.

    The data go to a temporary file in the same folder, which is synced to disk and renamed over the target.
    Temporary files left by a killed process are removed by the next write of the same file.
    A link is followed: the file it points to is replaced.  A pipe or a device is written to directly.
    The new file has the permissions of the one that it replaces, else those that the umask gives.

    Args:
        path: the file to write; its folder exists.
        content: all of it.

    Raises:
        ReportError: the path is a folder, or in none.
    """
    # Names may hold lone surrogates, which UTF-8 lacks.
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ReportError(f"cannot write {path}: it is a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise ReportError(f"cannot write {path}: the folder {target.parent} does not exist; create it first")
    if target.exists() and not target.is_file():
        # A pipe or a device: a rename would put a file in its place.
        with _reported(f"write {path}"):
            target.write_bytes(data)
        return
    remove_abandoned(target)
    with _reported(f"write {path}"):
        temporary, file = _temporary(target)
        with file:
            try:
                _take_mode(file.fileno(), target)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        _sync_folder(target.parent)


def make_folder(folder: Path) -> None:
    """Create a folder to write to, if it is missing."""
    with _reported(f"create the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(f"cannot {what}: {error.strerror or error}") from error


def remove_abandoned(target: Path) -> None:
    """Remove what processes killed while writing this file left behind.

    A writer locks its temporary file, and the lock ends with its process; an unlocked one is abandoned.
    """
    pattern = re.compile(rf"{re.escape(_stem(target))}[0-9a-f]{{16}}\.tmp")
    with suppress(OSError):  # the writer reports a folder that cannot be read or written
        for name in [name for name in os.listdir(target.parent) if pattern.fullmatch(name)]:
            with open(target.with_name(name), "rb") as file:
                if _lock(file.fileno(), wait=False, without=False):
                    os.unlink(target.with_name(name))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file: one process at a time runs the block.  The file is removed afterwards."""
    with _reported(f"write {path}"):
        descriptor = _held(path)
    try:
        yield
    finally:
        # Removed while held: a process that waits for it sees that it is gone, and creates a new one.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _held(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, wait=True, without=True)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _stem(target: Path) -> str:
    return f".{target.name[:100]}."


def _temporary(target: Path) -> tuple[Path, BinaryIO]:
    """A new file beside the target, locked so that no process considers it abandoned."""
    while True:
        path = target.with_name(f"{_stem(target)}{secrets.token_hex(8)}.tmp")
        # Mode "x" refuses an existing file; unlike tempfile it sets the permissions given by the umask.
        file = open(path, "xb")  # noqa: SIM115 - the caller closes it, which releases the lock
        if _lock(file.fileno(), wait=False, without=True) and os.fstat(file.fileno()).st_nlink:
            return path, file
        # Another process saw it before it was locked, and removed it.
        file.close()


def _take_mode(descriptor: int, target: Path) -> None:
    """Give an open file the permissions of a target that exists, before there is anything to read in it."""
    mode = stat.S_IMODE(os.stat(target if target.exists() else descriptor).st_mode)
    # File systems without permissions refuse to change them.
    if mode != stat.S_IMODE(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, mode)


def _lock(descriptor: int, *, wait: bool, without: bool) -> bool:
    """Lock an open file; False if another process holds the lock, ``without`` if locks are not supported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have none
        return without
    return True


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
