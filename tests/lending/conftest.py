"""A real node with lending on: a prefill pool in which sessions evict each other, and a decode that keeps them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from stack import LOGS

from sglang_basin.config import BasinConfig
from sglang_basin.node import Node

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from lending_sessions import lending_node

PATIENCE_S = 1.0
DECODE_TOKENS = 40_000


@dataclass(frozen=True)
class Lending:
    """The node, and how the reads of its prefill are made to go wrong."""

    node: Node
    reads: Path

    def spoil(self, how: str) -> None:
        """See `faulty/sitecustomize`; "" lets them work again."""
        self.reads.write_text(how)

    @property
    def url(self) -> str:
        return self.node.url

    @property
    def prefill_url(self) -> str:
        return self.node.plan.of("prefill")[0].url

    @property
    def decode_url(self) -> str:
        return self.node.plan.of("decode")[0].url


def spoiled_by(reads: Path) -> dict[str, str]:
    """The environment of engines whose reads this file makes go wrong; see `faulty/sitecustomize`."""
    reads.write_text("")
    paths = [str(Path(__file__).parent / "faulty"), os.environ.get("PYTHONPATH", "")]
    return {"BASIN_TEST_READS": str(reads), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def timeline(reads: Path) -> dict[str, dict[str, dict[int, float]]]:
    """By call, while reads are slow: when layers of its part had come, and when a forward went on to compute with
    them."""
    seen: dict[str, dict[str, dict[int, float]]] = {}
    path = reads.with_suffix(".timeline")
    for line in path.read_text().splitlines() if path.exists() else ():
        what, layer, room, at_s = line.split()
        seen.setdefault(room, {"arrived": {}, "computes": {}})[what].setdefault(int(layer), float(at_s))
    return seen


@pytest.fixture(scope="module")
def lending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lending]:
    """Chunked prefill, page size 16."""
    reads = tmp_path_factory.mktemp("reads") / "how"
    with lending_node(
        decode_tokens=DECODE_TOKENS,
        engine_arguments=("--chunked-prefill-size", "512"),
        config=BasinConfig(admission="off", lending="on", lending_patience_s=PATIENCE_S),
        environment=spoiled_by(reads),
        logs=LOGS / "lending",
    ) as node:
        yield Lending(node, reads)
