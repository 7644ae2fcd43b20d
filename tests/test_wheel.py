"""What the wheel contains, and that nothing of ours hides the PyPI package `kernels` that SGLang imports."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The wheel's files, built from this checkout."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_kernels_are_in_the_wheel_under_their_own_name(names: set[str]) -> None:
    assert {"basin_kernels/__init__.py", "basin_kernels/page_copy.py", "basin_kernels/heads.py"} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sglang_basin", "basin_kernels"}


def test_the_folder_kernels_does_not_shadow_the_package_that_sglang_needs() -> None:
    ask = "import kernels; print(kernels.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert Path(found.stdout.strip()).is_file()
    assert ROOT / "kernels" not in Path(found.stdout.strip()).parents
