"""A log file of bounded size: whole lines are appended, the oldest ones go.

When a file would outgrow its bound it becomes `NAME.1`, that one `NAME.2` and so on, and the oldest is deleted. What
is appended is written in one piece; a torn last line, as a crash or a full disk leaves it, is closed before the next
one, so that readers lose that line alone. Processes of one machine may share a file: they take turns by a lock on its
folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

LEAST_BYTES = 4096


class RotatingFile:
    """A file for appending. It may be moved or deleted by others at any time: it is opened for each append."""

    def __init__(self, path: Path, *, max_bytes: int, kept_files: int, header: bytes = b"") -> None:
        """`header` is a whole line that each file begins with. At most `kept_files` files of about `max_bytes` exist.
        Raises ValueError naming a wrong setting."""
        if max_bytes < LEAST_BYTES or kept_files < 1:
            raise ValueError(
                f"{path}: max_bytes must be at least {LEAST_BYTES} and kept_files 1, got {max_bytes}, {kept_files}"
            )
        self.path = path
        self._max_bytes = max_bytes
        self._kept_files = kept_files
        self._header = header

    def append(self, lines: bytes) -> None:
        """Add one or more whole lines. Raises OSError when the disk does not take them."""
        with self._turn():
            self._append(lines)

    def _append(self, lines: bytes) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and size + len(lines) > self._max_bytes:
            self._rotate()
            size = 0
        if size and not self._ends_whole():
            lines = b"\n" + lines
        with self.path.open("ab") as file:
            file.write(lines if size else self._header + lines)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Nobody else writes or rotates meanwhile."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: one writer per file, then
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _rotate(self) -> None:
        files = [self.path, *(self.path.with_name(f"{self.path.name}.{n}") for n in range(1, self._kept_files))]
        files[-1].unlink(missing_ok=True)
        for newer, older in reversed(list(itertools.pairwise(files))):
            if newer.exists():
                newer.replace(older)
