"""Makes reads of lent pages go wrong in a test's engines; on their PYTHONPATH, and imported when Python starts.

What is to happen stands in the file that BASIN_TEST_READS names: "", or "fail N" (reads of layer N fail), "stall N"
(they do not return until the file says something else, as with a peer that has stopped), or "slow MS" (each layer takes
so long, as over a slow link). While they are slow, the file beside it with `.timeline` in the end gets a line for each
layer that has come and for each layer whose KV a forward with a lent part goes on to read: what, layer, room, time.
"""

import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path


def _mode() -> list[str]:
    return Path(os.environ["BASIN_TEST_READS"]).read_text().split()


def _note(what, layer, room) -> None:
    with open(os.environ["BASIN_TEST_READS"] + ".timeline", "a") as timeline:
        timeline.write(f"{what} {layer} {room} {time.monotonic():.6f}\n")


def _spoil_reads(module) -> None:
    original = module.MooncakeReads.read

    def read(self, plan, layer):
        mode = _mode()
        if mode == ["fail", str(layer)]:
            raise module.TransferFailed("the test said so")
        while mode == ["stall", str(layer)] == _mode():
            time.sleep(0.02)
        original(self, plan, layer)
        if mode[:1] == ["slow"]:
            time.sleep(int(mode[1]) / 1e3)

    module.MooncakeReads.read = read


def _note_arrivals(module) -> None:
    original = module.Pull.__init__

    def __init__(self, layers, read, finally_, name, *rest):
        def read_and_note(layer):
            read(layer)
            if _mode()[:1] == ["slow"]:
                _note("arrived", layer, name)

        original(self, layers, read_and_note, finally_, name, *rest)

    module.Pull.__init__ = __init__


def _note_waits(module) -> None:
    original = module.Borrower.wait_for_layer

    def wait_for_layer(self, layer):
        original(self, layer)
        for part in self._forward[0]:
            if _mode()[:1] == ["slow"]:
                _note("computes", layer, part.req.bootstrap_room)

    module.Borrower.wait_for_layer = wait_for_layer


def _always_pull(module) -> None:
    """Whether a read pays depends on how fast the machine computes."""
    module.READ_MAY_TAKE = float("inf")


SPOILED = {
    "sglang_basin.lending.worth": _always_pull,
    "sglang_basin.lending.transport": _spoil_reads,
    "sglang_basin.lending.pull": _note_arrivals,
    "sglang_basin.lending.borrower": _note_waits,
}


class _Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in SPOILED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            SPOILED[name](module)

        spec.loader.exec_module = exec_module
        return spec


if "BASIN_TEST_READS" in os.environ:
    sys.meta_path.insert(0, _Finder())
