"""Puts the patches into force in this process: a finder that hands patched source to Python's import.

It must stand before the modules are imported. SGLang loads plugins too late for that in its subprocesses, which import
everything first; so `launch_server` calls `activate` at its start and again, in each process that SGLang spawns, as the
first thing there (`multiprocessing` imports the main module before anything else). A process started another way gets
a clear refusal from `activate` in the plugin.

Tracebacks and `inspect` see the patched lines under the file's own name: they are put into `linecache`, where an entry
without a time is never compared with the file.
"""

from __future__ import annotations

import importlib.machinery
import io
import linecache
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType

from sglang_basin.patching.patch import FileChange, PatchError
from sglang_basin.patching.series import Standing, by_module, patched_text, patches_folder, read_series, sglang_root
from sglang_basin.patching.series import standings as find_standings


class PatchedLoader(importlib.machinery.SourceFileLoader):
    """Loads one file with its changes. Neither reads nor writes bytecode files."""

    def __init__(self, fullname: str, path: str, changes: tuple[FileChange, ...]) -> None:
        super().__init__(fullname, path)
        self.changes = changes

    def get_source(self, fullname: str) -> str:
        return patched_text(self.changes, Path(self.path))

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_source(fullname)
        linecache.cache[self.path] = (len(text), None, io.StringIO(text).readlines(), self.path)
        return compile(text, self.path, "exec", dont_inherit=True)


class PatchFinder(MetaPathFinder):
    """Finds what Python's own finder finds, and gives the modules of `standings` a `PatchedLoader`."""

    def __init__(self, standings: Mapping[str, Standing]) -> None:
        self.standings = standings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        standing = self.standings.get(fullname)
        if standing is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        spec.loader = PatchedLoader(fullname, spec.origin, standing.changes)
        spec.cached = None
        return spec


def activate() -> None:
    """Put the shipped patches into force in this process; again and again is the same as once.

    Raises PatchError listing every patch that does not fit the installed SGLang or whose module is imported already.
    """
    patches = read_series(patches_folder())
    if patches:
        install(find_standings(patches, sglang_root()))


def install(standings: Sequence[Standing]) -> None:
    """Put these into force. Raises PatchError, and changes nothing, unless all of them can be."""
    wrong = [f"{standing.detail}; mend: {standing.mend}" for standing in standings if standing.state == "mismatch"]
    modules = by_module(standings)
    wrong += [
        f"{', '.join(change.patch for change in standing.changes)}: {module} was imported before its patch; "
        f"mend: start SGLang by python -m sglang_basin.launch_server or launch_node"
        for module, standing in modules.items()
        if module in sys.modules and not is_patched(module)
    ]
    if wrong:
        raise PatchError("patches that cannot be applied:\n" + "\n".join(f"  - {line}" for line in wrong))
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, PatchFinder)]
    if modules:
        sys.meta_path.insert(0, PatchFinder(modules))


def is_patched(module: str) -> bool:
    """Whether the module is imported in this process and was patched then."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return isinstance(getattr(spec, "loader", None), PatchedLoader)
