"""An intervention: a burst of short sessions in minutes 15 to 25, all ended at minute 25 or left to finish.

    .venv/bin/python benchmarks/sim_intervention.py [--quick] [--seeds 1,2,3]

Article: short burst sessions at four times the base rate. Ending them all at minute 25 recovers within two minutes;
letting them finish leaves 1.7 times as many regular sessions live by minute 50.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from matplotlib.figure import Figure as Plot
from sim_rooms import (
    CODE_SMALL,
    SURGE_FROM_S,
    SURGE_TO_S,
    Case,
    Figure,
    Finding,
    Table,
    case,
    holds,
    parse,
    publish,
    run_all,
    save_plot,
    spread,
)

from sglang_basin.replay.plan import Plan, PlannedSession
from sglang_basin.replay.trace import Scaling
from sglang_basin.simulator import Simulation, policy_factory
from sglang_basin.simulator.calls import NONE, Event, Events, SimSession
from sglang_basin.simulator.calls import OVER as CALL_OVER
from sglang_basin.simulator.records import Log, Outcome

RATE_PER_MIN, BURST_TIMES, BURST_CALLS = 3.3, 4.0, 20
END_S = 4200.0
ARMS = ("no burst", "ended at minute 25", "left to finish", "ended at minute 21")
ENDED_S = {"ended at minute 25": SURGE_TO_S, "ended at minute 21": 1260.0}
"""The earlier one tells whether it is the time spent beyond the tipping point that keeps a deployment there."""
BURST = "burst"


class Intervened(Simulation):
    """At `ended_s` every burst session is ended: its call is aborted as if its client had left."""

    ended_s: float | None = None

    def run(self) -> Log:
        if self.ended_s is not None:
            self._push(((self.ended_s, self.on_intervention, None),))
        return super().run()

    def on_intervention(self, now_s: float, _nothing: None) -> Events:
        events: list[Event] = []
        for session in list(self.live_sessions.values()):
            if not session.uid.startswith(BURST):
                continue
            if session.in_flight is not None:
                events += self._abort(now_s, session.in_flight)
                session.in_flight.stage = CALL_OVER
                session.in_flight = None
            self._ended(now_s, session, Outcome.CANCELLED)
        return events

    def on_call(self, now_s: float, session: SimSession) -> Events:
        known = session.uid in self.live_sessions
        return super().on_call(now_s, session) if known else NONE


def with_burst(plan: Plan, burst: Plan, to_s: float = SURGE_TO_S) -> Plan:
    """Both plans' sessions in order of arrival, the burst's known by their ids."""
    short = [
        PlannedSession(f"{BURST}-{number:05d}", planned.arrival_s, planned.session, False)
        for number, planned in enumerate(burst.sessions)
        if SURGE_FROM_S <= planned.arrival_s < to_s
    ]
    sessions = sorted([*plan.sessions, *short], key=lambda planned: planned.arrival_s)
    return dataclasses.replace(plan, sessions=tuple(sessions))


def run_arm(subject: dict[str, Any]) -> dict[str, Any]:
    """Regular sessions live, by half minute, and their hit rate."""
    one: Case = subject["case"]
    plan, hardware = one.plan(), one.settings.hardware()
    if subject["arm"] != "no burst":
        burst: Case = subject["burst"]
        plan = with_burst(plan, burst.plan(), ENDED_S.get(subject["arm"], SURGE_TO_S))
    simulation = Intervened(
        plan, hardware, policy_factory(one.settings.policy, one.settings.policy_options, plan, hardware)
    )
    simulation.ended_s = ENDED_S.get(subject["arm"])
    log = simulation.run()
    lives = [
        (planned.arrival_s, log.session_end_s[number] if log.session_end_s[number] >= 0 else float("inf"))
        for number, planned in enumerate(plan.sessions)
        if not planned.uid.startswith(BURST)
    ]
    series = log.series()
    regular = [sum(start <= at_s < end for start, end in lives) for at_s in series["at_s"] if at_s is not None]
    return {
        "at_s": series["at_s"],
        "regular": regular,
        "hit_rate": series["hit_rate"],
        "burst_sessions": len(plan.sessions) - len(lives),
    }


def back_after_s(result: dict[str, Any], ended_s: float = SURGE_TO_S) -> float | None:
    """Seconds after the burst's end until a minute's hit rate is at 0.9 of what it was before, and stays for five."""
    rates = list(zip(result["at_s"], result["hit_rate"], strict=True))
    healthy = statistics.fmean(rate for at_s, rate in rates if 300 <= at_s < SURGE_FROM_S and rate is not None)
    since: float | None = None
    for at_s, rate in rates:
        if at_s < ended_s or rate is None:
            continue
        since = (at_s if since is None else since) if rate >= 0.9 * healthy else None
        if since is not None and at_s - since >= 300:
            return float(since - ended_s)
    return None


def main() -> None:
    options = parse(__doc__, (1, 2, 3, 4, 5))
    short = dataclasses.replace(CODE_SMALL, scaling=Scaling(tokens=CODE_SMALL.scaling.tokens, max_calls=BURST_CALLS))
    keys = [(arm, seed) for arm in ARMS for seed in options.seeds]
    subjects = []
    for arm, seed in keys:
        shape = {"profile": "h100-1p1d", "policy": "stock", "counted_s": END_S, "tail_s": 0.0}
        regular = case(CODE_SMALL, rate_per_min=RATE_PER_MIN, seed=seed, **shape)
        burst = case(short, rate_per_min=BURST_TIMES * RATE_PER_MIN, seed=1000 + seed, **shape)
        subjects.append({"arm": arm, "case": regular, "burst": burst})
    results = dict(zip(keys, run_all(subjects, options.jobs, run_arm), strict=True))

    def live(arm: str, minute: float) -> list[float]:
        return [
            next(
                count
                for at_s, count in zip(results[arm, seed]["at_s"], results[arm, seed]["regular"], strict=True)
                if at_s >= 60 * minute
            )
            for seed in options.seeds
        ]

    times = {
        arm: [back_after_s(results[arm, seed], ENDED_S.get(arm, SURGE_TO_S)) for seed in options.seeds]
        for arm in ARMS[1:]
    }
    ended, left = (statistics.fmean(live(arm, 50)) for arm in ARMS[1:3])
    by_end = {
        minute: ", ".join(
            f"{count:.0f}{'' if time_s is not None else ' (never back)'}"
            for count, time_s in zip(live(arm, minute), times[arm], strict=True)
        )
        for arm, minute in ((ARMS[1], 25), (ARMS[3], 21))
    }
    quick = [time_s for time_s in times[ARMS[1]] if time_s is not None]
    figures = [
        Figure(
            what="burst ended at minute 25: recovers within",
            article="2 min",
            ours=(f"{spread([time_s / 60 for time_s in quick], '.1f')} min" if quick else "never")
            + f" ({len(quick)} of {len(options.seeds)} seeds)",
            holds=holds(len(quick) == len(options.seeds) and max(quick) <= 180, bool(quick)),
            cause="ending the burst leaves the regular sessions that have piled up, and their number decides: live at "
            f"minute 25, by seed: {by_end[25]}. Ended at minute 21 instead, live then: {by_end[21]}",
        ),
        Figure(
            what="regular sessions live at minute 50, left to finish over ended",
            article="1.7",
            ours=f"{left / ended:.1f}",
            holds=holds(left / ended >= 1.5, left > ended),
        ),
    ]
    rows = [
        [arm, *[spread(live(arm, minute)) for minute in (14, 25, 30, 50, 65)], _told(times.get(arm, []))]
        for arm in ARMS
    ]
    plot = Plot(figsize=(8, 3.4), layout="constrained")
    axes = plot.add_subplot()
    for arm, colour in zip(ARMS, ("0.6", "tab:green", "tab:red", "tab:olive"), strict=True):
        for number, seed in enumerate(options.seeds):
            at_min = [at_s / 60 for at_s in results[arm, seed]["at_s"]]
            label = arm if not number else None
            axes.plot(at_min, results[arm, seed]["regular"], color=colour, linewidth=0.8, label=label)
    axes.axvspan(15, 25, color="0.93")
    axes.set_xlabel("minutes")
    axes.set_ylabel("regular sessions live")
    axes.legend(fontsize=8)
    publish(
        Finding(
            name="intervention",
            rank=2,
            title="An intervention",
            method=f"Stock on 1P1D H100 at {RATE_PER_MIN} sessions/min. In minutes 15 to 25 sessions of at most "
            f"{BURST_CALLS} calls come on top, at {BURST_TIMES:g} times that rate.",
            figures=figures,
            tables=[
                Table(
                    title="Regular sessions live",
                    columns=["burst", "min 14", "min 25", "min 30", "min 50", "min 65", "hit rate back after"],
                    rows=rows,
                )
            ],
            plots=[save_plot(plot, options, "intervention")],
            numbers={"burst_sessions": [results[ARMS[1], seed]["burst_sessions"] for seed in options.seeds]},
        ),
        options,
        [CODE_SMALL],
        len(subjects),
    )


def _told(times_s: list[float | None]) -> str:
    return ", ".join("never" if time_s is None else f"{time_s / 60:.1f} min" for time_s in times_s) or "-"


if __name__ == "__main__":
    main()
