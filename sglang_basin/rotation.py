"""A log file of bounded size: whole lines are appended, the oldest ones go.

When a file would outgrow its bound it becomes `NAME.1`, that one `NAME.2` and so on, and the oldest is deleted. What
is appended is written in one piece; a torn last line, as a crash or a full disk leaves it, is closed before the next
one, so that readers lose that line alone.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

LEAST_BYTES = 4096


class RotatingFile:
    """One writer per file. The file may be moved or deleted by others at any time: it is opened for each append."""

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
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and size + len(lines) > self._max_bytes:
            self._rotate()
            size = 0
        if size and not self._ends_whole():
            lines = b"\n" + lines
        with self.path.open("ab") as file:
            file.write(lines if size else self._header + lines)

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
