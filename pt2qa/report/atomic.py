"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pt2qa.errors import ReportError


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part of it.

    The data go to a temporary file in the same folder, are synced to the disk, and take the file's name by one rename.
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
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            _write_synced(temporary, data)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error


def _write_synced(path: Path, data: bytes) -> None:
    # Mode "x" refuses a file that is already there; unlike tempfile it gives the permissions that the umask asks for.
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
