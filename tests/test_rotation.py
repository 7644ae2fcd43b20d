"""The rotating file: what was appended is there, in order, up to the bound; nothing else."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.rotation import LEAST_BYTES, RotatingFile

HEADER = b"# a header\n"


def read_back(path: Path) -> list[bytes]:
    """The lines of all files, oldest first, without the headers."""
    files = sorted(path.parent.glob(f"{path.name}*"), key=lambda file: int(file.suffix[1:] or 0), reverse=True)
    lines = []
    for file in files:
        first, *rest = file.read_bytes().splitlines(keepends=True)
        assert first == HEADER
        lines += rest
    return lines


@given(st.lists(st.integers(1, 1500), max_size=60), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_files_hold_the_last_lines_within_their_bound(lengths: list[int], kept_files: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        file = RotatingFile(path, max_bytes=LEAST_BYTES, kept_files=kept_files, header=HEADER)
        lines = [f"{number}:".encode() + b"x" * length + b"\n" for number, length in enumerate(lengths)]
        for line in lines:
            file.append(line)
        found = read_back(path)
        assert found == lines[len(lines) - len(found) :]
        sizes = [each.stat().st_size for each in Path(folder).iterdir()]
        assert len(sizes) <= kept_files
        assert all(size <= LEAST_BYTES + len(HEADER) for size in sizes)
        if sum(len(line) + len(HEADER) for line in lines) < LEAST_BYTES:
            assert found == lines


def test_a_torn_line_is_closed_so_that_the_next_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = RotatingFile(path, max_bytes=LEAST_BYTES, kept_files=2, header=HEADER)
    file.append(b"whole\n")
    with path.open("ab") as other:
        other.write(b"tor")
    file.append(b"next\n")
    assert path.read_bytes() == HEADER + b"whole\ntor\nnext\n"


def test_a_file_taken_away_is_begun_again(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", max_bytes=LEAST_BYTES, kept_files=2, header=HEADER)
    file.append(b"one\n")
    file.path.rename(tmp_path / "elsewhere")
    file.append(b"two\n")
    assert file.path.read_bytes() == HEADER + b"two\n"


def test_a_full_disk_is_the_callers_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        RotatingFile(Path("/dev/full"), max_bytes=LEAST_BYTES, kept_files=2).append(b"line\n")


@pytest.mark.parametrize(("max_bytes", "kept_files"), [(LEAST_BYTES - 1, 2), (LEAST_BYTES, 0)])
def test_wrong_bounds_are_named(tmp_path: Path, max_bytes: int, kept_files: int) -> None:
    with pytest.raises(ValueError, match=rf"max_bytes .* got {max_bytes}, {kept_files}"):
        RotatingFile(tmp_path / "log", max_bytes=max_bytes, kept_files=kept_files)


def _append(path: Path, writer: int, lines: int, kept_files: int) -> None:
    file = RotatingFile(path, max_bytes=LEAST_BYTES, kept_files=kept_files, header=HEADER)
    for number in range(lines):
        file.append(b"%d:%d:%s\n" % (writer, number, b"x" * 400))


def test_processes_that_share_a_file_lose_nothing_of_each_other(tmp_path: Path) -> None:
    path, lines, kept_files = tmp_path / "log", 200, 100
    writers = [multiprocessing.Process(target=_append, args=(path, writer, lines, kept_files)) for writer in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = [tuple(map(int, line.split(b":")[:2])) for line in read_back(path)]
    for number in range(len(writers)):
        assert [line for line in found if line[0] == number] == [(number, line) for line in range(lines)]
