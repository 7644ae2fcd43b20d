"""The fluid model of an agent-serving deployment: how many sessions it carries, and where it stops coming back.

N live sessions each repeat: a tool run, then a call that is prefilled and decoded. Their working set is N x mean
context; the more of it the cache holds, the cheaper a prefill. With X(N) calls finished a second and K calls per
session,

    dN/dt = lambda(t) - X(N) / K

X(N) / K, the *completion curve*, rises with N while the cache holds the working set, and falls once it no longer does.
It crosses an arrival rate first rising, at the *stable point*, where a small surplus of sessions is worked off, and
then falling, at the *tipping point*, beyond which more sessions mean fewer completions and N grows although nothing
else arrives. A surge is survived if it ends before N has reached the tipping point (DESIGN, section 1).

X(N) is that of a closed loop in which prefill queues, with s the prefill of a call at the hit rate of N:

    N = X * (away + s / (1 - X * s / servers)),     away = tool + decode + rest

bounded by decode's memory, which holds a call's context from its admission to its end. The hit rate falls from what
the new tokens of each call leave to what all sessions share, half of the way down at the knee (1.9 x the cache).

The model knows means only: no variance, no order of queues, no growth of a session's context, and no memory, so a hit
rate that depends on the past as well as on N (hysteresis) is not in it. It says where the trap is; the simulator says
how deep it is.

All rates are per second, all times seconds, N is a real number.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KNEE = 1.9
"""The hit rate collapses once the working set exceeds this times the cache (the article's measurement)."""


class DeploymentError(ValueError):
    """A deployment description that cannot be used; the message names the field and the mend."""


def _described(text: str, *, unit: str, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "unit": unit})


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A deployment and its load, by means. `metadata["help"]` of each field describes it; raises DeploymentError."""

    cache_tokens: float = _described("all memory that can give a prefix back: device, host, lent", unit="tokens")
    mean_context_tokens: float = _described("context of a live session, averaged over its life", unit="tokens")
    calls_per_session: float = _described("model calls of a session", unit="calls")
    new_tokens_per_call: float = _described("prompt tokens that the session has not sent before", unit="tokens")
    output_tokens_per_call: float = _described("tokens decoded per call", unit="tokens")
    tool_s: float = _described("from the end of a call to the session's next one", unit="s")
    prefill_new_token_s: float = _described("prefill of a token that is not cached", unit="s")
    prefill_cached_token_s: float = _described("prefill of a cached token (match, attention)", unit="s", default=0.0)
    prefill_fixed_s: float = _described("prefill of a call, whatever its length", unit="s", default=0.0)
    prefill_instances: float = _described("prefill instances that share the load", unit="instances", default=1)
    decode_step_s: float = _described("one decode step at the batch that is usual here", unit="s")
    decode_tokens: float = _described("KV pools of all decode instances", unit="tokens")
    decode_slots: float = _described("calls that decode runs at once at most", unit="calls", default=math.inf)
    rest_s: float = _described("router, transfer and what else a call takes", unit="s", default=0.0)
    shared_tokens: float = _described("prefix that all sessions share, always cached", unit="tokens", default=0)
    knee: float = _described("working set over cache at which half of the hit rate is lost", unit="", default=KNEE)
    knee_sharpness: float = _described("how steeply the hit rate falls there", unit="", default=12.0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise DeploymentError(f"{field.name}: must be a number, got {value!r}")
            if math.isinf(value) and field.name != "decode_slots":
                raise DeploymentError(f"{field.name}: must be finite, got {value}")
            if field.name in _MAY_BE_ZERO:
                if value < 0:
                    raise DeploymentError(f"{field.name}: must be at least 0, got {value:g}")
            elif value <= 0:
                raise DeploymentError(f"{field.name}: must be above 0, got {value:g} ({field.metadata['help']})")
        if self.new_tokens_per_call > self.mean_context_tokens:
            raise DeploymentError(
                f"new_tokens_per_call: must be at most mean_context_tokens ({self.mean_context_tokens:g}), of which"
                f" they are a part, got {self.new_tokens_per_call:g}"
            )
        if self.shared_tokens + self.new_tokens_per_call > self.mean_context_tokens:
            raise DeploymentError(
                f"shared_tokens: must be at most mean_context_tokens - new_tokens_per_call"
                f" ({self.mean_context_tokens - self.new_tokens_per_call:g}), got {self.shared_tokens:g}"
            )
        if not self.prefill_s(0.0) > 0:
            raise DeploymentError("prefill_new_token_s: a prefill must take time; give it, or prefill_fixed_s, above 0")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str) -> Deployment:
        """Build from field names; `source` names the place in errors. Raises DeploymentError."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
                raise DeploymentError(f"{source}: unknown field {key!r}{hint}")
        missing = [
            f"{name} ({field.metadata['help']})"
            for name, field in known.items()
            if field.default is dataclasses.MISSING and name not in values
        ]
        if missing:
            raise DeploymentError(f"{source}: missing {', '.join(missing)}")
        try:
            return cls(**values)
        except DeploymentError as error:
            raise DeploymentError(f"{source}: {error}") from None

    # What a call costs at a hit rate.

    @property
    def best_hit_rate(self) -> float:
        """Everything but the new tokens is cached."""
        return 1 - self.new_tokens_per_call / self.mean_context_tokens

    @property
    def worst_hit_rate(self) -> float:
        """Only what all sessions share is cached."""
        return self.shared_tokens / self.mean_context_tokens

    @property
    def decode_s(self) -> float:
        return self.output_tokens_per_call * self.decode_step_s

    def prefill_s(self, sessions: float) -> float:
        """Prefill of a call with so many sessions live, without waiting."""
        hit_rate = self.hit_rate(sessions)
        return self.prefill_fixed_s + self.mean_context_tokens * (
            (1 - hit_rate) * self.prefill_new_token_s + hit_rate * self.prefill_cached_token_s
        )

    # What so many sessions do.

    def hit_rate(self, sessions: float) -> float:
        """Cached over prompt tokens; falls with the number of live sessions."""
        best, worst = self.best_hit_rate, self.worst_hit_rate
        load = sessions * self.mean_context_tokens / (self.knee * self.cache_tokens)
        if load <= 0:
            return best
        lost = 1 / (1 + math.exp(-max(-700.0, min(700.0, self.knee_sharpness * math.log(load)))))
        return best - (best - worst) * lost

    def calls_per_s(self, sessions: float) -> float:
        """X(N): calls that N live sessions finish a second."""
        return min(self._cycle_calls_per_s(sessions), self._decode_calls_per_s(sessions))

    def completions_per_s(self, sessions: float) -> float:
        """X(N) / K: the completion curve."""
        return self.calls_per_s(sessions) / self.calls_per_session

    @property
    def completions_at_the_end_per_s(self) -> float:
        """Where the completion curve goes as N grows without bound: no hits, prefill or decode never idle."""
        prefill_s = self.prefill_fixed_s + self.mean_context_tokens * (
            (1 - self.worst_hit_rate) * self.prefill_new_token_s + self.worst_hit_rate * self.prefill_cached_token_s
        )
        slots = min(self.decode_slots, self.decode_tokens / self.mean_context_tokens)
        calls = min(self.prefill_instances / prefill_s, slots / (prefill_s + self.decode_s))
        return calls / self.calls_per_session

    def _cycle_calls_per_s(self, sessions: float) -> float:
        """The smaller root of N = X (away + s / (1 - X u)) with u = s / servers, in the form that loses no digits."""
        if sessions <= 0:
            return 0.0
        prefill_s = self.prefill_s(sessions)
        away_s = self.tool_s + self.decode_s + self.rest_s
        per_server_s = prefill_s / self.prefill_instances
        total = away_s + prefill_s + sessions * per_server_s
        root = math.hypot(
            away_s + prefill_s - sessions * per_server_s, 2 * math.sqrt(sessions * per_server_s * prefill_s)
        )
        return 2 * sessions / (total + root)

    def _decode_calls_per_s(self, sessions: float) -> float:
        """Little's law over decode's places: a call holds one while it is prefilled and decoded."""
        slots = min(self.decode_slots, self.decode_tokens / self.mean_context_tokens)
        return slots / (self.prefill_s(sessions) + self.decode_s)


_MAY_BE_ZERO = frozenset(
    ("tool_s", "prefill_new_token_s", "prefill_cached_token_s", "prefill_fixed_s", "rest_s", "shared_tokens")
)


# Which limit is met first.


@dataclass(frozen=True, slots=True)
class Limits:
    """How many live sessions each of the two memories carries, and which one is full first."""

    cache_sessions: float
    """N_cache = knee x cache / mean context."""
    decode_sessions: float
    """N_decode = decode's memory / (mean context x share of the sessions that are being served)."""
    served_share: float
    """Of a session's time while nothing queues, what it spends in prefill and decode."""

    @property
    def first(self) -> str:
        """`cache`: a surge can tip the deployment over. `decode`: calls queue before the cache overflows."""
        return "cache" if self.cache_sessions < self.decode_sessions else "decode"


def limits(deployment: Deployment) -> Limits:
    """The article's which-limit-first test, from a deployment description alone."""
    served_s = deployment.prefill_s(0.0) + deployment.decode_s
    share = served_s / (served_s + deployment.tool_s + deployment.rest_s)
    context = deployment.mean_context_tokens
    return Limits(
        cache_sessions=deployment.knee * deployment.cache_tokens / context,
        decode_sessions=min(deployment.decode_slots, deployment.decode_tokens / context) / share,
        served_share=share,
    )


# Equilibria.

GRID = 4000
"""Points of the scan for sign changes: the curve bends over a few percent of N, a hundred points at the knee."""


@dataclass(frozen=True, slots=True)
class Equilibrium:
    """Where as many sessions finish as arrive. Stable if a small surplus of sessions is worked off."""

    sessions: float
    stable: bool


@dataclass(frozen=True, slots=True)
class Peak:
    """The most sessions that the deployment finishes a second, and with how many of them live."""

    sessions: float
    completions_per_s: float


def scan(deployment: Deployment) -> list[float]:
    """Numbers of sessions to look at: geometric, from far below the first session to far beyond every bend."""
    saturation = deployment.prefill_instances * _loop_s(deployment, math.inf) / deployment.prefill_s(0.0)
    high = 50 * max(1.0, limits(deployment).cache_sessions, saturation)
    low = min(1e-3, 1e-3 * limits(deployment).cache_sessions)
    ratio = (high / low) ** (1 / (GRID - 1))
    return [low * ratio**i for i in range(GRID)]


def _loop_s(deployment: Deployment, sessions: float) -> float:
    """From one call of a session to its next if nothing queues."""
    return deployment.tool_s + deployment.decode_s + deployment.rest_s + deployment.prefill_s(sessions)


def peak(deployment: Deployment) -> Peak:
    """The top of the completion curve: the scan's best point, refined by golden sections between its neighbours."""
    points = scan(deployment)
    best = max(range(len(points)), key=lambda i: deployment.completions_per_s(points[i]))
    low, high = points[max(0, best - 1)], points[min(len(points) - 1, best + 1)]
    sessions = max(_top(deployment.completions_per_s, low, high), points[best], key=deployment.completions_per_s)
    return Peak(sessions, deployment.completions_per_s(sessions))


def _top(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that rises and then falls between two points is highest, by golden sections."""
    shrink = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9 * high:
        left, right = high - shrink * (high - low), low + shrink * (high - low)
        if function(left) < function(right):
            low = left
        else:
            high = right
    return max(low, high, key=function)


def equilibria(deployment: Deployment, arrivals_per_s: float) -> list[Equilibrium]:
    """All crossings of the completion curve with an arrival rate, ascending; stable and unstable ones alternate.

    The first one is stable. None: more arrive than the deployment can ever finish.
    """
    if not arrivals_per_s > 0:
        raise ValueError(f"arrivals_per_s: must be above 0, got {arrivals_per_s}")

    def surplus(sessions: float) -> float:
        return deployment.completions_per_s(sessions) - arrivals_per_s

    points = scan(deployment)
    curve = [surplus(at) for at in points]
    bends = []
    for i in range(1, GRID - 1):  # a rate just below a top, or just above a dip, crosses on both sides of it
        if curve[i - 1] <= curve[i] >= curve[i + 1]:
            bends.append(_top(surplus, points[i - 1], points[i + 1]))
        elif curve[i - 1] >= curve[i] <= curve[i + 1]:
            bends.append(_top(lambda at: -surplus(at), points[i - 1], points[i + 1]))
    if curve[0] > 0:
        bends.append(0.0)
    known = sorted([*zip(points, curve, strict=True), *((at, surplus(at)) for at in bends)])
    found = []
    for (low, below), (high, above) in itertools.pairwise(known):
        if (below < 0) != (above < 0):
            found.append(Equilibrium(_bisect(surplus, low, high), stable=above >= 0))
    return found


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """A sign change of a continuous function between two points that differ in sign, to the last digits."""
    negative_low = function(low) < 0
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if (function(middle) < 0) == negative_low:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def stable_point(deployment: Deployment, arrivals_per_s: float) -> float | None:
    """Live sessions in the long run, if nothing disturbs them; None when more arrive than can ever finish."""
    found = equilibria(deployment, arrivals_per_s)
    return found[0].sessions if found else None


def tipping_point(deployment: Deployment, arrivals_per_s: float) -> float | None:
    """Live sessions from where on they become ever more; None when every surplus is worked off."""
    return next((point.sessions for point in equilibria(deployment, arrivals_per_s) if not point.stable), None)


# Surges.


@dataclass(frozen=True, slots=True, kw_only=True)
class Surge:
    """The arrival rate is (1 + extra) x the base rate from `from_s` to `to_s`."""

    extra: float
    from_s: float
    to_s: float

    def __post_init__(self) -> None:
        if not self.extra >= -1:
            raise ValueError(f"extra: a rate cannot fall by more than all of it, got {self.extra}")
        if not 0 <= self.from_s <= self.to_s < math.inf:
            raise ValueError(f"from_s: must be between 0 and to_s, got {self.from_s} to {self.to_s}")


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a deployment after a surge."""

    sessions_before: float
    sessions_after: float
    """Live sessions at the moment at which the surge ends."""
    tipping: float | None
    recovers: bool
    recovered_s: float | None
    """How long after the surge's end N is within 5 % of the stable point again; None when it is stuck."""


def trajectory(
    deployment: Deployment,
    arrivals_per_s: Callable[[float], float],
    *,
    start_sessions: float,
    until_s: float,
    breaks_s: Sequence[float] = (),
    step_s: float = 1.0,
) -> list[tuple[float, float]]:
    """(time, N) from 0 to `until_s` by the classical Runge-Kutta method.

    `breaks_s` are the jumps of the arrival rate: steps end on them, and within a step the rate is taken a little inside
    of its ends, so that no step mixes the rates of both sides. Steps are at most `step_s` and at most half of the
    shortest life of a session, beyond which the method would not be stable.
    """
    if not step_s > 0:
        raise ValueError(f"step_s: must be above 0, got {step_s}")
    step_s = min(step_s, 0.5 * deployment.calls_per_session * _loop_s(deployment, 0.0))
    edges = sorted({0.0, until_s, *(at for at in breaks_s if 0 < at < until_s)})
    time_s, sessions = 0.0, start_sessions
    path = [(time_s, sessions)]
    for end_s in edges[1:]:
        steps = max(1, math.ceil((end_s - time_s) / step_s))
        begin_s, length_s = time_s, (end_s - time_s) / steps
        for i in range(steps):
            at_s = begin_s + i * length_s
            inside_s = 1e-6 * length_s
            rates = [arrivals_per_s(at_s + t) for t in (inside_s, length_s / 2, length_s - inside_s)]
            sessions = _runge_kutta(deployment, sessions, rates, length_s)
            time_s = at_s + length_s
            path.append((time_s, sessions))
        time_s = end_s
        path[-1] = (end_s, sessions)
    return path


def _runge_kutta(deployment: Deployment, sessions: float, rates: Sequence[float], length_s: float) -> float:
    first, middle, last = rates
    finish = deployment.completions_per_s
    k1 = first - finish(sessions)
    k2 = middle - finish(sessions + length_s / 2 * k1)
    k3 = middle - finish(sessions + length_s / 2 * k2)
    k4 = last - finish(sessions + length_s * k3)
    return max(0.0, sessions + length_s / 6 * (k1 + 2 * k2 + 2 * k3 + k4))


def fate(deployment: Deployment, arrivals_per_s: float, surge: Surge, *, step_s: float = 1.0) -> Fate | None:
    """What a surge from the stable point does; None when the base rate alone is more than can ever finish."""
    found = equilibria(deployment, arrivals_per_s)
    if not found:
        return None
    before, tipping = found[0].sessions, found[1].sessions if len(found) > 1 else None
    after = _after_surge(deployment, arrivals_per_s, surge, before, step_s)
    recovers = tipping is None or after < tipping
    recovered_s = _recovery_s(deployment, arrivals_per_s, after, before) if recovers else None
    return Fate(before, after, tipping, recovers, recovered_s)


def largest_surge(deployment: Deployment, arrivals_per_s: float, duration_s: float) -> float | None:
    """The extra share of a surge of this length up to which the deployment recovers, to 0.1 %.

    Infinity when it recovers from a hundredfold rate; None when the base rate alone cannot be sustained.
    """
    found = equilibria(deployment, arrivals_per_s)
    if not found:
        return None
    if len(found) == 1:
        return math.inf
    before, tipping = found[0].sessions, found[1].sessions

    def recovers(extra: float) -> bool:
        surge = Surge(extra=extra, from_s=0.0, to_s=duration_s)
        return _after_surge(deployment, arrivals_per_s, surge, before, duration_s / 500) < tipping

    low, high = 0.0, 99.0
    if recovers(high):
        return math.inf
    while high - low > 0.001 * (1 + low):
        middle = (low + high) / 2
        if recovers(middle):
            low = middle
        else:
            high = middle
    return low


def _after_surge(deployment: Deployment, arrivals_per_s: float, surge: Surge, sessions: float, step_s: float) -> float:
    rate = (1 + surge.extra) * arrivals_per_s
    return trajectory(
        deployment, lambda _: rate, start_sessions=sessions, until_s=surge.to_s - surge.from_s, step_s=step_s
    )[-1][1]


def _recovery_s(deployment: Deployment, arrivals_per_s: float, sessions: float, stable: float) -> float:
    """Until N is within 5 % of the stable point again: the integral of dN / (lambda - X(N)/K) over the way there."""
    near = max(0.95 * stable, min(1.05 * stable, sessions))
    if near == sessions:
        return 0.0
    try:
        return _integral(lambda n: 1 / (arrivals_per_s - deployment.completions_per_s(n)), sessions, near)
    except ZeroDivisionError:
        return math.inf  # the curve comes as near to the rate as digits can tell


def _integral(function: Callable[[float], float], low: float, high: float) -> float:
    """Simpson's rule, each interval halved until both halves agree with the whole to six digits, or forty times."""

    def refined(low: float, high: float, ends: tuple[float, float, float], whole: float, depth: int) -> float:
        middle = (low + high) / 2
        left, right = function((low + middle) / 2), function((middle + high) / 2)
        first = (middle - low) / 6 * (ends[0] + 4 * left + ends[1])
        second = (high - middle) / 6 * (ends[1] + 4 * right + ends[2])
        if depth == 0 or abs(first + second - whole) <= 1e-6 * abs(whole):
            return first + second
        return refined(low, middle, (ends[0], left, ends[1]), first, depth - 1) + refined(
            middle, high, (ends[1], right, ends[2]), second, depth - 1
        )

    ends = (function(low), function((low + high) / 2), function(high))
    return refined(low, high, ends, (high - low) / 6 * (ends[0] + 4 * ends[1] + ends[2]), 40)
