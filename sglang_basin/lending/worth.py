"""Does a pull pay against computing the tokens again? Decided from what was measured, with both times in the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 50.0
"""So many of the latest measurements carry nearly all of a line's weight."""

FRESH_S = 5.0
"""A link that nobody has used for so long is tried again, whatever it was like."""

TRIES = 4
"""So many reads are made before a link is judged. The very first one also opens the connection and does not count."""

REACH = 2.0
"""A link's reads say nothing about one that is larger than so many times their largest: what a small one takes is
mostly its fixed cost."""

READ_MAY_TAKE = 2.0
"""A pull pays as long as it takes no longer than so many times what computing would: it keeps one call waiting,
computing keeps all of prefill's calls waiting."""


@dataclass(slots=True)
class Line:
    """Time as a line over size, `fixed_s + size * slope_s`, fitted to measurements of which older ones fade away."""

    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def note(self, size: float, seconds: float) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self._weight = self._weight * keep + 1.0
        self._x = self._x * keep + size
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + size * size
        self._xy = self._xy * keep + size * seconds

    @property
    def known(self) -> bool:
        return self._x > 0.0

    @property
    def slope_s(self) -> float:
        """Seconds for one more unit. Measurements of one size, or a falling line, say only what a unit took overall."""
        overall = self._y / self._x if self.known else 0.0
        spread = self._weight * self._xx - self._x * self._x
        if spread <= 1e-6 * self._xx * self._weight:
            return overall
        fitted = (self._weight * self._xy - self._x * self._y) / spread
        return min(fitted, overall) if fitted > 0.0 else overall

    @property
    def fixed_s(self) -> float:
        return max(0.0, (self._y - self.slope_s * self._x) / self._weight) if self._weight else 0.0

    def seconds(self, size: float) -> float:
        return self.fixed_s + size * self.slope_s


@dataclass(slots=True)
class Link:
    """What reading from one peer has taken."""

    line: Line = field(default_factory=Line)
    reads: int = 0
    largest_bytes: int = 0
    last_s: float = float("-inf")

    def note(self, read_bytes: int, seconds: float, now_s: float) -> None:
        self.reads += 1
        self.last_s = now_s
        if self.reads > 1:
            self.line.note(read_bytes, seconds)
            self.largest_bytes = max(self.largest_bytes, read_bytes)

    def seconds(self, read_bytes: int, now_s: float) -> float | None:
        """What a read of this size will take, or None: it is to be tried."""
        if self.reads < TRIES or now_s - self.last_s > FRESH_S or read_bytes > REACH * self.largest_bytes:
            return None
        return self.line.seconds(read_bytes)


@dataclass(slots=True)
class Inflow:
    """How fast lent KV comes in while it is being read, from all peers together.

    Reads go on side by side, so each counts for the time by which it made the reading longer; what a read takes
    whatever its size is left out, since others fill it.
    """

    line: Line = field(default_factory=Line)
    reads: int = 0
    _read_until_s: float = float("-inf")

    def note(self, tokens: int, began_s: float, ended_s: float) -> None:
        """A read of so many tokens is through. The first one, as a link's, does not count."""
        longer_s = max(0.0, ended_s - max(began_s, self._read_until_s))
        self._read_until_s = max(self._read_until_s, ended_s)
        self.reads += 1
        if self.reads > 1:
            self.line.note(tokens, longer_s)

    @property
    def tokens_per_s(self) -> float | None:
        """None while too few reads have been made."""
        return 1.0 / self.line.slope_s if self.reads >= TRIES and self.line.slope_s > 0.0 else None


@dataclass(frozen=True, slots=True)
class Worth:
    """The decision, and the two times it compares; a time is None while nothing is known about it."""

    pull: bool
    pull_s: float | None
    compute_s: float | None

    def __str__(self) -> str:
        def shown(seconds: float | None) -> str:
            return "unknown" if seconds is None else f"{1e3 * seconds:.1f} ms"

        return f"reading takes {shown(self.pull_s)}, computing {shown(self.compute_s)}"


def worth(tokens: int, lent_bytes: int, link: Link, computing: Line, now_s: float) -> Worth:
    """Whether to pull `tokens` of `lent_bytes` over `link`; `computing` is prefill's time over the tokens of a batch.

    The tokens ride in a batch that runs anyway, so computing them costs its slope only. While one of the two times is
    not known, the pull is made: that is how it becomes known.
    """
    pull_s = link.seconds(lent_bytes, now_s)
    compute_s = tokens * computing.slope_s if computing.known else None
    pays = pull_s is None or compute_s is None or pull_s < READ_MAY_TAKE * compute_s
    return Worth(pays, pull_s, compute_s)
