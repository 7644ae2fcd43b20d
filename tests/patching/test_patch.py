"""Patches are read strictly, applied exactly, and stand as `git apply` would have them."""

from __future__ import annotations

import difflib
import subprocess
from pathlib import Path

import pytest
from example import FILE, FOLDER, MODULE, copied
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin import doctor
from sglang_basin.patching import __main__ as command
from sglang_basin.patching.patch import PatchError, apply, read_patch, sha256, undo
from sglang_basin.patching.series import FOLDER_VARIABLE, patched_text, patches_folder, read_series, standings, unlisted

FIRST = FOLDER / "0001-refuse-one-envelope.patch"
SECOND = FOLDER / "0002-sign.patch"

lines = st.lists(st.sampled_from(["a", "b", "c", "", "    deep", "\x0cform feed"]), max_size=30)


@given(lines, lines)
def test_any_edit_applies_and_is_undone(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str]
) -> None:
    before, after = ("".join(f"{line}\n" for line in ["", *text, "end"]) for text in (old, new))
    split = (text.split("\n")[:-1] for text in (before, after))
    diff = "".join(f"{line}\n" for line in difflib.unified_diff(*split, f"a/{FILE}", f"b/{FILE}", lineterm=""))
    if before == after:
        return
    path = tmp_path_factory.mktemp("edit") / "0001-x.patch"
    head = FIRST.read_text().split("\n---\n")[0]
    path.write_bytes(
        (head.replace(head.split("SHA256: ")[1][:64], sha256(before.encode())) + "\n---\n" + diff).encode()
    )
    changes = read_patch(path).changes
    assert apply(changes, before) == after
    assert undo(changes, after) == before


def test_header_is_read(tmp_path: Path) -> None:
    patch = read_patch(FIRST)
    assert patch.header["Subject"] == "Refuses one particular envelope"
    assert patch.header["Why-no-hook"].endswith("the test's example of a patch, of a module that imports quickly")
    assert [(change.path, change.module, len(change.hunks)) for change in patch.changes] == [(FILE, MODULE, 2)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Forwarded: no, an example\n", "", "the header lacks Forwarded"),
        ("Upstream-Version: 0.5.23", "Upstream-Version: 0.5.22", "Upstream-Version: must be 0.5.23, got 0.5.22"),
        ("Upstream-SHA256: d", "Upstream-SHA256: x", "Upstream-SHA256: expected 64 hex digits and a path"),
        (f" {FILE}\nFor", " sglang/other.py\nFor", f"{FILE}: the header lacks its Upstream-SHA256"),
        (f"--- a/{FILE}", "--- /dev/null", "only existing Python files of the package sglang"),
        (FILE, "other/module.py", "only existing Python files of the package sglang"),
        ("@@ -13,6 +13,9 @@", "@@ -13,9 +13,12 @@", "not a diff"),
    ],
)
def test_malformed_patches_are_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = FIRST.read_text()
    assert old in text
    path = tmp_path / FIRST.name
    path.write_text(text.replace(old, new))
    with pytest.raises(PatchError, match=message) as refused:
        read_patch(path)
    assert str(refused.value).startswith(FIRST.name)


def test_a_patch_without_a_diff_or_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0001-empty.patch"
    with pytest.raises(PatchError, match="cannot be read"):
        read_patch(path)
    path.write_text(FIRST.read_text().split("---\n")[0])
    with pytest.raises(PatchError, match="no diff behind the header"):
        read_patch(path)


def test_git_applies_the_series_to_a_checkout_with_the_same_result(tmp_path: Path) -> None:
    root = copied(tmp_path / "checkout")
    patches = read_series(FOLDER)
    (standing,) = standings(patches, root)
    expected = patched_text(standing.changes, root / FILE)
    assert standing.state == "applicable"
    for patch in patches:
        for check in (["--check"], []):
            subprocess.run(["git", "apply", *check, str(FOLDER / patch.name)], cwd=root, check=True, timeout=30)
    assert (root / FILE).read_text() == expected
    (standing,) = standings(patches, root)
    assert standing.state == "in file"


def test_a_file_that_is_not_upstreams_is_a_mismatch_even_where_hunks_would_fit(tmp_path: Path) -> None:
    root = copied(tmp_path)
    with (root / FILE).open("a") as file:
        file.write("# somebody's own line\n")
    (standing,) = standings(read_series(FOLDER), root)
    assert standing.state == "mismatch"
    assert "is not the file of sglang 0.5.23" in standing.detail
    assert standing.mend == "pip install --force-reinstall --no-deps sglang==0.5.23"


def test_a_hunk_that_does_not_fit_is_named_and_never_moved(tmp_path: Path) -> None:
    path = tmp_path / FIRST.name
    path.write_text(FIRST.read_text().replace("@@ -49,6 +52,8 @@", "@@ -48,6 +51,8 @@"))
    with pytest.raises(PatchError, match=f"{FIRST.name}: {FILE}: the hunk at line 48 does not fit"):
        patched_text(read_patch(path).changes, copied(tmp_path) / FILE)


def test_series_is_an_ordered_list_without_doubles(tmp_path: Path) -> None:
    assert [patch.name for patch in read_series(FOLDER)] == [FIRST.name, SECOND.name]
    with pytest.raises(PatchError, match="series: No such file"):
        read_series(tmp_path)
    (tmp_path / FIRST.name).write_bytes(FIRST.read_bytes())
    (tmp_path / "series").write_text("# nothing\n")
    assert unlisted(tmp_path, read_series(tmp_path)) == [FIRST.name]
    (tmp_path / "series").write_text(f"{FIRST.name}\n{FIRST.name} # again\n")
    with pytest.raises(PatchError, match="twice"):
        read_series(tmp_path)


def test_shipped_patches_fit_and_name_a_test_that_exists() -> None:
    root = Path(__file__).parent.parent.parent
    folder = patches_folder()
    assert folder == root / "patches"
    patches = read_series(folder)
    assert unlisted(folder, patches) == []
    for patch in patches:
        assert (root / patch.header["Test"].split(":")[0]).is_file(), patch.name


def test_doctor_and_command_tell_how_patches_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (finding,) = doctor.check_patches(FOLDER)
    assert (finding.status, finding.check) == ("OK", f"patch {FILE}")
    assert finding.detail == f"{FIRST.name}, {SECOND.name}: applies in memory at import"
    monkeypatch.setenv(FOLDER_VARIABLE, str(FOLDER))
    assert command.main(["--check"]) == 0
    assert f"{FILE}: fits, applied in memory at import" in capsys.readouterr().out
    assert command.main(["--show", MODULE]) == 0
    assert 'PATCHED_BY = ["0001", "0002"]' in capsys.readouterr().out

    text = FIRST.read_text()
    stale = text.replace(text.split("SHA256: ")[1][:64], "0" * 64)
    (tmp_path / FIRST.name).write_text(stale)
    (tmp_path / SECOND.name).write_bytes(SECOND.read_bytes())
    (tmp_path / "series").write_text(f"{FIRST.name}\n")
    assert [finding.status for finding in doctor.check_patches(tmp_path)] == ["FAIL", "FAIL"]
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert command.main([]) == 1
    shown = capsys.readouterr().out
    assert "DOES NOT FIT" in shown
    assert f"not in series: {SECOND.name}" in shown
