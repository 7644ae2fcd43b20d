"""Fingerprints of a prompt's prefixes: what `policy.lineage` knows sessions by.

The fingerprint of the first n tokens t₁ … tₙ is n·s + Σ tᵢ·kᵢ modulo 2⁶⁴, with a random 64-bit key kᵢ for each
position and a random odd step s (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast",
2014). Two different prefixes agree with a chance of at most 2⁻⁴⁶ for token ids below 2¹⁸, whatever the prompts are, as
nobody outside the process knows the keys. Sums over cells of 64 tokens are vectorised; prefixes within a cell are
computed on demand.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_basin.policy.lineage import CELL_TOKENS

_Tokens = npt.NDArray[np.int64]


class Fingerprints:
    """The keys of one process: 8 bytes a position, up to the longest prompt seen."""

    def __init__(self, seed: int | None = None) -> None:
        """`seed` is for tests; without one the keys are secret."""
        self._random = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
        self._keys = self._draw(16_384)
        self._step = self._draw(1) | 1

    def of(self, token_ids: array[int] | Sequence[int], tail_tokens: int = 0) -> PromptFingerprints:
        """The prefixes of a prompt without its last `tail_tokens` tokens.

        SGLang hands the scheduler an `array('q')`, which is read in place; other sequences are copied.
        """
        is_array = isinstance(token_ids, array) and token_ids.typecode == "q"
        tokens = np.frombuffer(token_ids, np.int64) if is_array else np.array(token_ids, np.int64)
        tokens = tokens[: max(0, len(tokens) - tail_tokens)]
        while len(self._keys) < len(tokens):
            self._keys = np.concatenate([self._keys, self._draw(len(self._keys))])
        return PromptFingerprints(tokens, self._keys, self._step)

    def _draw(self, count: int) -> _Tokens:
        return self._random.integers(np.iinfo(np.int64).min, np.iinfo(np.int64).max, count, endpoint=True)


class PromptFingerprints:
    """One prompt's; satisfies `policy.lineage.Prompt`. Valid as long as the token ids are not changed."""

    __slots__ = ("_keys", "_step", "_token_ids", "cells", "tokens")

    def __init__(self, token_ids: _Tokens, keys: _Tokens, step: _Tokens) -> None:
        self._token_ids = token_ids
        self._keys = keys
        self._step = step
        self.tokens = len(token_ids)
        shape = (self.tokens // CELL_TOKENS, CELL_TOKENS)
        whole = shape[0] * CELL_TOKENS
        sums = np.einsum("ij,ij->i", token_ids[:whole].reshape(shape), keys[:whole].reshape(shape))
        self.cells: list[int] = [0, *np.cumsum(sums + CELL_TOKENS * step).tolist()]

    def within(self, cell: int) -> list[int]:
        start = cell * CELL_TOKENS
        stop = min(start + CELL_TOKENS - 1, self.tokens)
        products = self._token_ids[start:stop] * self._keys[start:stop]
        return np.cumsum(np.concatenate([[self.cells[cell]], products + self._step])).tolist()
