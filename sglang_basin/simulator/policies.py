"""Policies by name: `stock`, `basin`, and the published rivals, built from text options for the command and sweeps.

`basin` is the very `Door` that runs in the engine. Its predictor may be one that runs there too (`trained`, on the
numbers of calls alone, and `seen`), or one that exists in the simulator alone and knows the plan (`oracle`: see
`sglang_basin.simulator.oracle`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.interface import ServingPolicy
from sglang_basin.policy.pausing import PauseSettings
from sglang_basin.policy.prediction import PeakPredictor, PeaksSeen
from sglang_basin.policy.priority import ArrivalOrder, SizeAwareOrder
from sglang_basin.policy.reservation import law_named
from sglang_basin.policy.rivals import RIVALS
from sglang_basin.policy.shedding import SheddingSettings
from sglang_basin.replay.plan import Plan
from sglang_basin.simulator.oracle import NoisyOracle, OracleSettings
from sglang_basin.simulator.profile import HardwareProfile
from sglang_basin.simulator.simulation import PolicyFactory


class PolicyError(ValueError):
    """An unknown policy or option; the message lists the known ones."""


@dataclass(frozen=True, kw_only=True)
class BasinOptions:
    """`Door` and its parts. Names as in the parts' own settings, which say more."""

    enabled: bool = True
    law: Literal["current", "peak", "partial", "multiplex"] = "current"
    """With pausing the best (`benchmarks/sim_law.py`): who grows too much makes way for a while."""
    alpha: float = 0.75
    """Of `partial`. Peaks do not coincide."""
    law_share: float = 0.5
    epsilon: float = 0.05
    horizon_calls: float = 10.0
    budget_tokens: int | None = None
    budget_factor: float | None = None
    """The budget as a multiple of prefill's device pool, in place of `budget_tokens`."""
    knee_tokens: int | None = None
    knee_share: float = 0.9
    band: float = 0.0
    order: Literal["arrival", "size"] = "size"
    order_tokens_per_s: float = 10.0
    """The article's is 30; with 10 as much is served where the cache is short, and more where decode memory is."""
    peak_share: float = 0.5
    updates_order: bool = True
    shared_once: bool = True
    pausing: bool = True
    pause_above: float = 0.95
    pause_down_to: float = 0.80
    resume_below: float = 0.85
    pause_patience_s: float = 1800.0
    predictor: Literal["trained", "seen", "oracle", "none"] = "trained"
    model: str | None = None
    """`trained`: the model's file; the one that comes with Basin without it."""
    rank_correlation: float = 0.64
    learns: bool = False
    """The oracle's prediction gets better as the session runs."""
    shed: bool = False
    shed_head_wait_s: float = 120.0
    idle_timeout_s: float = 600.0
    hold_limit_s: float = 1e9
    """Clients that wait: the time-outs of the client decide. The engine's default is 240 s."""
    ticket_grace_s: float = 60.0
    max_queued: int | None = None


def _basin(
    options: BasinOptions, plan: Plan, profile: HardwareProfile, given: Callable[[], PeakPredictor] | None
) -> PolicyFactory:
    fixed = options.budget_tokens
    if options.budget_factor is not None:
        if fixed is not None:
            raise PolicyError("policy.budget_tokens and policy.budget_factor say the same thing: give one")
        fixed = round(options.budget_factor * profile.prefill.pool_tokens)
    noisy = OracleSettings(rank_correlation=options.rank_correlation, improves=options.learns)

    def predictor() -> PeakPredictor | None:
        if given is not None:
            return given()
        if options.predictor == "oracle":
            return NoisyOracle(plan, noisy)
        if options.predictor == "trained":
            from sglang_basin.predictor.model_file import default_model_path, load_model  # takes a second
            from sglang_basin.predictor.predictor import TrainedPredictor

            return TrainedPredictor(load_model(Path(options.model) if options.model else default_model_path()))
        return PeaksSeen() if options.predictor == "seen" else None

    pausing = PauseSettings(
        above_share=options.pause_above,
        down_to_share=options.pause_down_to,
        resume_share=options.resume_below,
        patience_s=options.pause_patience_s,
    )

    def build() -> ServingPolicy:
        return Door(
            DoorSettings(
                idle_timeout_s=options.idle_timeout_s,
                hold_limit_s=options.hold_limit_s,
                ticket_grace_s=options.ticket_grace_s,
                max_queued=options.max_queued,
                peak_share=options.peak_share,
                updates_order=options.updates_order,
                shared_once=options.shared_once,
                enabled=options.enabled,
            ),
            law=law_named(
                options.law,
                alpha=options.alpha,
                share=options.law_share,
                epsilon=options.epsilon,
                horizon_calls=options.horizon_calls,
            ),
            budget=Budget(
                BudgetSettings(
                    fixed_tokens=fixed,
                    knee_tokens=options.knee_tokens,
                    knee_share=options.knee_share,
                    band=options.band,
                ),
                profile.capacity_tokens,
            ),
            order=SizeAwareOrder(options.order_tokens_per_s) if options.order == "size" else ArrivalOrder(),
            predictor=predictor(),
            shedding=SheddingSettings(enabled=options.shed, head_wait_s=options.shed_head_wait_s),
            pausing=pausing if options.pausing else None,
        )

    build()  # wrong values are refused before the run
    return build


def policy_names() -> list[str]:
    return ["basin", *RIVALS]


def option_names(name: str) -> list[str]:
    """The options that a policy takes. Raises PolicyError for an unknown policy."""
    kind = BasinOptions if name == "basin" else type(_rival(name).published)
    return [field.name for field in dataclasses.fields(kind)]


def policy_factory(
    name: str,
    options: Mapping[str, Any],
    plan: Plan,
    profile: HardwareProfile,
    predictor: Callable[[], PeakPredictor] | None = None,
) -> PolicyFactory:
    """A factory of one policy object per prefill instance. Raises PolicyError.

    `options` are by field name; values may be text. A rival starts from its published settings, and what its authors
    would measure on the hardware comes from the profile. `predictor` makes basin's in place of its option.
    """
    for key in options:
        known = option_names(name)
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise PolicyError(f"policy {name} has no option {key!r}{hint}")
    try:
        if name == "basin":
            return _basin(msgspec.convert(dict(options), BasinOptions, strict=False), plan, profile, predictor)
        rival = _rival(name)
        published = {field.name: getattr(rival.published, field.name) for field in dataclasses.fields(rival.published)}
        measured = {
            "reload_s_per_token": profile.prefill.per_token_s,
            "reload_s_per_token2": profile.prefill.attention_s / 2,
        }
        given = {key: value for key, value in measured.items() if key in published} | dict(options)
        settings = msgspec.convert(published | given, type(rival.published), strict=False)
        rival.build(settings)
    except (msgspec.ValidationError, ValueError) as error:
        raise PolicyError(f"policy {name}: {error}") from None
    return lambda: rival.build(settings)


def _rival(name: str) -> Any:
    if name not in RIVALS:
        raise PolicyError(f"no policy {name!r}; known: {', '.join(policy_names())}")
    return RIVALS[name]
