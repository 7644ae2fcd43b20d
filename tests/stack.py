"""The real stacks that the test session shares: one prefill, one decode, a router, a tiny float32 model.

`basin` runs with admission on and a budget of `BUDGET_TOKENS`; `stock` is plain SGLang of the same model, started
only for the tests that compare the two. Logs stay under out/test-logs: look there when one of these fails.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

from sglang_basin.config import BasinConfig
from sglang_basin.node import Node, NodeOptions, running_node
from sglang_basin.platforms.tiny_model import ModelSpec, build

BUDGET_TOKENS = 2_000
POOL_TOKENS = 16_000
MAX_RUNNING = 12
"""Calls that an engine runs at once, fewer than its pool has room for."""
IDLE_TIMEOUT_S = 20.0
HOLD_LIMIT_S = 12.0
TICKET_GRACE_S = 4.0
FINAL_GRACE_S = 2.0

MODEL = ModelSpec(hidden=128, layers=2, vocab=2048, dtype="float32", seed=7)
ENGINE_ARGUMENTS = (
    *("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING)),
    *("--page-size", "16", "--enable-metrics", "--tool-call-parser", "qwen"),
    *("--dtype", MODEL.dtype),  # with SGLang's default, a float32 model runs in float16
)
LOGS = Path(__file__).parent.parent / "out" / "test-logs"


@dataclass(frozen=True)
class Stack:
    """A running node and what tests do with it."""

    node: Node

    @property
    def url(self) -> str:
        return self.node.url

    @property
    def prefill_url(self) -> str:
        return self.node.plan.of("prefill")[0].url

    @property
    def decode_url(self) -> str:
        return self.node.plan.of("decode")[0].url

    def metric(self, side: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples on one side ("prefill" or "decode") that carry these labels."""
        return self.samples(side)(name, **labels)

    def samples(self, side: str) -> Callable[..., float]:
        """All metrics of one side as they are now: a function of name and labels, as `metric`."""
        text = requests.get((self.prefill_url if side == "prefill" else self.decode_url) + "/metrics", timeout=20).text
        lines = text.splitlines()

        def sample(name: str, **labels: str) -> float:
            total = 0.0
            for line in lines:
                found = re.match(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", line)
                if found and all(f'{key}="{value}"' in (found.group(1) or "") for key, value in labels.items()):
                    total += float(found.group(2))
            return total

        return sample

    def until(self, done: Callable[[], bool], what: str, timeout_s: float = 30.0, *, whole: bool = True) -> None:
        """Wait for a condition of the running stack, `whole` unless the test killed a part; fails naming `what`."""
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            if whole:
                self.node.check()
            time.sleep(0.1)


@contextlib.contextmanager
def running(
    name: str,
    config: BasinConfig | None,
    *,
    decode: int = 1,
    arguments: tuple[str, ...] = (),
    prefill_arguments: tuple[str, ...] = (),
    decode_arguments: tuple[str, ...] = (),
) -> Iterator[Stack]:
    """A node of the test model, torn down by process group whatever happens."""
    options = NodeOptions(
        model_path=str(build(MODEL)),
        decode=decode,
        config=config,
        engine_arguments=(*ENGINE_ARGUMENTS, *arguments),
        prefill_arguments=prefill_arguments,
        decode_arguments=decode_arguments,
        port=0,
        log_dir=LOGS / name,
    )
    with running_node(options, ready_timeout_s=280) as node:
        yield Stack(node)
