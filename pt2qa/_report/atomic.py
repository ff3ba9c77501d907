"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pt2qa.errors import ReportError


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part of it.

    The data go to a temporary file in the same folder, are synced to the disk, and take the file's name by one rename.
    What a process that was killed has left of such a file is removed by the next that writes it.
    A link is followed: the file it points to is replaced.  A pipe or a device is written to.

    Raises:
        ReportError: the folder does not exist, the path is a folder, or the disk refuses.  Nothing is left behind.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ReportError(f"cannot write {path}: it is a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise ReportError(f"cannot write {path}: the folder {target.parent} does not exist; create it first")
    if target.exists() and not target.is_file():
        # A pipe or a device: a rename would put a file in its place.
        try:
            target.write_bytes(data)
        except OSError as error:
            raise ReportError(f"cannot write {path}: {error.strerror or error}") from error
        return
    remove_abandoned(target)
    try:
        temporary, file = _temporary(target)
        with file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        _sync_folder(target.parent)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error


def remove_abandoned(target: Path) -> None:
    """Remove what processes that were killed while they wrote this file have left behind.

    Whoever writes holds a lock on what he writes, which ends with his process; what is not locked belongs to nobody.
    """
    pattern = re.compile(rf"{re.escape(_stem(target))}[0-9a-f]{{16}}\.tmp")
    with suppress(OSError):  # a folder that cannot be read or written is the writer's to report
        for name in [name for name in os.listdir(target.parent) if pattern.fullmatch(name)]:
            with open(target.with_name(name), "rb") as file:
                if _lock(file.fileno(), wait=False, without=False):
                    os.unlink(target.with_name(name))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only process in this block, of all that name the same file; it is there only as long as it is needed.

    Raises:
        ReportError: the file cannot be made.
    """
    try:
        descriptor = _held(path)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        yield
    finally:
        # Removed while it is held: who waits for it sees that it is gone, and makes a new one.
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
    """A new file beside the target, locked, so that nobody takes it for abandoned."""
    while True:
        path = target.with_name(f"{_stem(target)}{secrets.token_hex(8)}.tmp")
        # Mode "x" refuses a file that is there; unlike tempfile it gives the permissions that the umask asks for.
        file = open(path, "xb")  # noqa: SIM115 - the caller closes it, and with it ends the lock
        if _lock(file.fileno(), wait=False, without=True) and os.fstat(file.fileno()).st_nlink:
            return path, file
        # Somebody else looked at it before it was locked, and has removed it.
        file.close()


def _lock(descriptor: int, *, wait: bool, without: bool) -> bool:
    """Lock an open file; False where another process holds it, and ``without`` where there are no locks."""
    if sys.platform == "win32":
        return without
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have none
        return without
    return True


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
