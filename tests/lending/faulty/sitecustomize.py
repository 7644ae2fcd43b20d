"""Makes reads of lent pages go wrong in a test's engines; on their PYTHONPATH, and imported when Python starts.

What is to happen stands in the file that BASIN_TEST_READS names: "", or "fail N" (reads of layer N fail) or "stall N"
(they do not return until the file says something else, as with a peer that has stopped).
"""

import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

TARGET = "sglang_basin.lending.transport"


def _mode() -> list[str]:
    return Path(os.environ["BASIN_TEST_READS"]).read_text().split()


def _spoil(module) -> None:
    original = module.MooncakeReads.read

    def read(self, plan, layer):
        mode = _mode()
        if mode == ["fail", str(layer)]:
            raise module.TransferFailed("the test said so")
        while mode == ["stall", str(layer)] == _mode():
            time.sleep(0.02)
        original(self, plan, layer)

    module.MooncakeReads.read = read


class _Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _spoil(module)

        spec.loader.exec_module = exec_module
        return spec


if "BASIN_TEST_READS" in os.environ:
    sys.meta_path.insert(0, _Finder())
