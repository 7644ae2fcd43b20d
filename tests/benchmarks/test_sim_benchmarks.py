"""The simulated benchmarks: the page says what the results say, the measures measure, and a script runs by itself."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import sim_all
import sim_held_out
import sim_hysteresis
import sim_intervention
import sim_knee
import sim_law
import sim_limits
import sim_readme
import sim_rooms
import sim_scenarios
import sim_speed

from sglang_basin.policy.interface import EngineView
from sglang_basin.policy.prediction import Prediction
from sglang_basin.policy.rivals import RIVALS
from sglang_basin.policy.sessions import Session as LiveSession
from sglang_basin.replay.arrivals import ArrivalProfile
from sglang_basin.replay.plan import Plan, build_plan
from sglang_basin.replay.trace import Call, Session
from sglang_basin.simulator.study import run_study

RESULTS = sorted(sim_rooms.RESULTS.glob("*.json"))
FINDINGS = sim_readme.read_findings(sim_rooms.RESULTS)


# ---- What is committed ---------------------------------------------------------------------------------------------


def test_page_is_what_the_results_say() -> None:
    assert sim_readme.PAGE.read_text(encoding="utf-8") == sim_readme.page(FINDINGS)


def test_every_script_has_its_result() -> None:
    scripts = {path.stem.removeprefix("sim_") for path in sim_readme.PAGE.parent.glob("sim_*.py")}
    scripts -= {"rooms", "held_out", "readme", "all", "lending"}  # the last one prints a table of the README
    assert scripts == {finding["name"] for finding in FINDINGS} - {"predictor_ablation"}
    assert scripts == set(sim_all.SCRIPTS)


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding["name"])
def test_result_says_how_it_was_made(finding: dict) -> None:
    made = finding["made_with"]
    assert made["command"].startswith(".venv/bin/python benchmarks/")
    assert made["seeds"]
    assert not made["quick"], "a first look is not a result"
    assert made["runs"] > 0
    assert {"python", "sglang-basin", "policies and simulator"} <= made["versions"].keys()
    assert finding["figures"]
    assert {figure["holds"] for figure in finding["figures"]} <= {"yes", "no", "partly"}
    for table in finding["tables"]:
        assert all(len(row) == len(table["columns"]) for row in table["rows"]), table["title"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_result_names_no_machine(path: Path) -> None:
    assert not re.search(r'"/|/home/|/root|/tmp|\.\./', path.read_text(encoding="utf-8"))


def test_plots_are_small_and_few() -> None:
    plots = sorted(sim_rooms.RESULTS.glob("*.png"))
    assert len(plots) <= 12
    assert all(path.stat().st_size <= 100 * 1024 for path in plots)
    assert {path.name for path in plots} >= {plot for finding in FINDINGS for plot in finding["plots"]}


# ---- Measures ------------------------------------------------------------------------------------------------------


def session(name: str, peak: int = 4000, shared: int = 0) -> Session:
    calls = (Call(peak // 2, 0, 10, 1.0), Call(peak - 10, peak // 2, 10, 0.0))
    return Session(name, calls, shared)


def plan_of(rate_per_s: float, duration_s: float) -> Plan:
    return build_plan([session("a")], ArrivalProfile(rate_per_s=rate_per_s, duration_s=duration_s, process="fixed"), 1)


def series(until_s: float, **columns: object) -> dict:
    """Samples each half minute; a column is a number or a function of time."""
    times = [30.0 * n for n in range(1, int(until_s / 30) + 1)]
    return {"at_s": times} | {
        name: [value(at_s) if callable(value) else value for at_s in times] for name, value in columns.items()
    }


@pytest.mark.parametrize(("leave_share", "stuck"), [(1.0, False), (0.8, False), (0.7, True), (0.0, True)])
def test_stuck_is_leaving_more_slowly_than_coming(leave_share: float, stuck: bool) -> None:
    plan = plan_of(0.1, 3600.0)
    told = series(3600.0, hit_rate=0.9, finished_sessions=lambda at_s: int(0.1 * leave_share * at_s))
    end = sim_rooms.how_it_ends(told, plan)
    assert end.arrived == 180
    assert end.stuck is stuck
    assert end.hit_rate == pytest.approx(0.9)


def test_recovery_is_counted_from_the_end_of_the_surge_and_must_last() -> None:
    def hits(at_s: float) -> float:
        back = at_s >= 1500 + 240
        dip = 1900 <= at_s < 1930
        return 0.95 if at_s < 900 or (back and not dip) else 0.3

    result = {"series": series(5400.0, hit_rate=hits, waiting_sessions=0)}
    assert sim_rooms.recovered_after_s(result) == 1950 - 1500  # the dip at 1900 s starts the ten minutes anew


def test_no_recovery_while_sessions_wait_at_the_door() -> None:
    told = series(5400.0, hit_rate=0.95, waiting_sessions=lambda at_s: 0 if at_s < 900 else 50)
    assert sim_rooms.recovered_after_s({"series": told}) is None


def test_knee_is_where_hits_fall_for_good() -> None:
    told = series(
        6000.0,
        hit_rate=lambda at_s: 0.95 if at_s <= 3000 or at_s > 5900 else 0.85 if at_s <= 4000 else 0.2,
        working_set_tokens=lambda at_s: at_s if at_s <= 5900 else 500.0,
        live_sessions=11,
    )
    knee = sim_knee.find_knee(sim_knee.samples({"series": told}, 1000, 0))
    assert knee == sim_knee.Knee(pytest.approx(3.0), pytest.approx(4.0))
    distinct = sim_knee.find_knee(sim_knee.samples({"series": told}, 1000, 50))
    assert distinct == sim_knee.Knee(pytest.approx(2.5), pytest.approx(3.5))


def test_no_knee_without_a_collapse() -> None:
    told = series(6000.0, hit_rate=0.95, working_set_tokens=lambda at_s: at_s, live_sessions=3)
    assert sim_knee.find_knee(sim_knee.samples({"series": told}, 1000, 0)) is None


@pytest.mark.parametrize(
    ("hits_fall_s", "calls_wait_s", "first"),
    [(2000, 4000, "cache"), (4000, 2000, "decode"), (10**9, 10**9, "neither")],
)
def test_the_limit_met_first(hits_fall_s: float, calls_wait_s: float, first: str) -> None:
    told = series(
        5760.0,
        hit_rate=lambda at_s: 0.95 if at_s < hits_fall_s else 0.1,
        decode_waiting_calls=lambda at_s: 0 if at_s < calls_wait_s else 5,
    )
    assert sim_limits.met_first({"series": told}) == first


def test_geometric_mean_is_not_hidden_by_one_zero() -> None:
    assert sim_rooms.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert sim_rooms.geometric_mean([0.0, 1.0]) == pytest.approx(0.1)


def test_spread_names_extremes_only_if_they_differ() -> None:
    assert sim_rooms.spread([1.0, 1.0]) == "1"
    assert sim_rooms.spread([1.0, 2.0, 6.0]) == "3 (1 to 6)"


# ---- Loads and settings --------------------------------------------------------------------------------------------


def test_stepped_load_has_each_steps_rate() -> None:
    one = sim_rooms.case(
        sim_rooms.TERMINAL,
        policy="stock",
        counted_s=20_000.0,
        tail_s=0.0,
        steps_per_min=[(0.0, 3.0), (10_000.0, 12.0)],
    )
    plan = one.plan()
    times = [planned.arrival_s for planned in plan.sessions]
    assert times == sorted(times)
    early, late = sum(at_s < 10_000 for at_s in times), sum(at_s >= 10_000 for at_s in times)
    assert early == pytest.approx(500, rel=0.15)
    assert late == pytest.approx(2000, rel=0.1)
    assert len({planned.uid for planned in plan.sessions}) == len(times)
    assert one.plan() == plan


def test_a_case_is_kept_by_all_that_decides_it() -> None:
    base = sim_rooms.GRID[0].case("basin", {}, 1)
    others = [
        sim_rooms.GRID[0].case("basin", {}, 2),
        sim_rooms.GRID[0].case("basin", {"alpha": "0.3"}, 1),
        sim_rooms.GRID[0].case("basin", {"shared_once": "false"}, 1),
        sim_rooms.GRID[1].case("basin", {}, 1),
        dataclasses.replace(base, steps=((0.0, 1.0),)),
    ]
    keys = {sim_rooms._key(sim_rooms.run_case, one) for one in [base, *others]}
    assert len(keys) == 1 + len(others)
    assert sim_rooms._key(sim_rooms.run_case, sim_rooms.GRID[0].case("basin", {}, 1)) in keys


def test_the_trained_predictor_has_not_seen_the_tasks_it_predicts() -> None:
    workload = sim_rooms.TERMINAL
    one = sim_rooms.case(workload, options=sim_rooms.TRAINED, rate_per_min=2.0, counted_s=600.0, tail_s=0.0)
    halves = sim_held_out.halves_of(one.settings.trace, one.settings.scaling)
    tasks: dict[int, set[str]] = {0: set(), 1: set()}
    for side, recorded in halves.sessions.values():
        tasks[side].add(recorded.group)
    assert tasks[0]
    assert tasks[1]
    assert not tasks[0] & tasks[1]

    plan = one.plan()
    door = sim_rooms.policy_of(one, plan)()
    predictor = door._predictor
    assert isinstance(predictor, sim_held_out.HeldOut)
    for planned in plan.sessions:
        session = LiveSession(planned.uid, 0.0, planned.session.calls[0].prompt_tokens, 0.0, calls_seen=1)
        session.prediction = predictor.predict(session)
        assert session.prediction.at(0.9) >= session.prediction.at(0.5) > 0
        side = halves.sessions[planned.session.trace_id][0]
        assert predictor._by_side[1 - side]._kept.find(planned.uid) is not None
        assert predictor._by_side[side]._kept.find(planned.uid) is None


@pytest.mark.parametrize("name", RIVALS)
def test_swept_settings_are_the_rivals_own(name: str) -> None:
    """What the scripts pass as text builds the very settings of the sweep."""
    rival = RIVALS[name]
    one = sim_rooms.GRID[0]
    hardware = one.case(name, {}, 1).settings.hardware()
    for settings in rival.sweep:
        options = sim_scenarios.as_options(settings, rival.published)
        built = sim_rooms.policy_factory(name, options, plan_of(0.1, 60.0), hardware)()
        taken = getattr(built, "settings", rival.published)
        for key in options:
            assert getattr(taken, key) == getattr(settings, key), (name, key)


def test_benchmarks_run_basins_defaults() -> None:
    """What they write out is what `--policy basin` does by itself."""
    one = sim_rooms.GRID[0].case("basin", {}, 1)
    plan, hardware = one.plan(), one.settings.hardware()
    default, written = (
        sim_rooms.policy_factory("basin", given, plan, hardware)() for given in ({}, dict(sim_rooms.DEFAULT))
    )
    live = LiveSession("a", 0.0, 10_000, 0.0, first_tokens=10_000)
    live.prediction = Prediction((12_000.0, 20_000.0, 30_000.0, 45_000.0, 60_000.0))
    assert default.law.reserve(live) == written.law.reserve(live)
    assert default.law.z == written.law.z
    assert default.budget.settings == written.budget.settings
    assert default.settings == written.settings
    assert default._by == written._by


def test_law_settings_have_names_of_their_own() -> None:
    names = [one.name for one in sim_law.settings(quick=False)]
    assert len(set(names)) == len(names)


def test_hit_rates_are_split_at_the_collapse() -> None:
    told = [(600.0, 1.65, 0.9), (630.0, 1.62, 0.8), (660.0, 1.95, 0.5), (900.0, 1.68, 0.55), (1300.0, 1.61, 0.2)]
    parts = sim_hysteresis.split(told, 1.6)
    assert (parts.before, parts.after) == ([0.9, 0.8], [0.2])  # the ten minutes after the fall are neither
    never = sim_hysteresis.split(told[:2], 1.6)
    assert (never.before, never.after) == ([0.9, 0.8], [])


def test_a_state_lasts_until_the_rate_is_well_past_the_border() -> None:
    rates = [0.9, 0.9, 0.58, 0.9, 0.3, 0.65, 0.3, 0.9]
    told = [(100.0 * number, 1.5, rate) for number, rate in enumerate(rates)]
    assert sim_hysteresis.stays_s(told, 0.0) == ([400.0, 0.0], [300.0])


def test_deployments_that_take_turns_do_what_each_does_alone() -> None:
    one = sim_speed.settings(sim_rooms.TERMINAL, "stock", {}, 1, True)
    one = dataclasses.replace(one, duration_s=300.0, shared_prefix_tokens=None)
    alone = run_study(dataclasses.replace(one, seed=1)).log.digest()
    run = sim_speed.Simulation(
        one.plan(), one.hardware(), sim_speed.policy_factory("stock", {}, one.plan(), one.hardware())
    )
    run._push(run._arrival(0))
    run._push(((sim_speed.TICK_S, run.on_tick, None),))
    while sim_speed._some_events(run):
        pass
    run._close()
    assert run.log.digest() == alone


def test_limit_lets_everybody_in_while_it_is_off() -> None:
    door = sim_hysteresis.Limit(10_000, opens=True)
    view = EngineView(
        cache_tokens=10_000,
        host_tokens=0,
        lent_tokens=0,
        cache_used_share=1.0,
        hit_rate=None,
        prefill_waiting_calls=0,
        decode_tokens=10_000,
        decode_used_share=0.0,
        decode_waiting_calls=0,
    )
    before, within, after = 1.0, sim_hysteresis.OPEN_FROM_S, sim_hysteresis.OPEN_TO_S

    def answers(now_s: float) -> list[str]:
        door.observe(view, now_s)
        names = [f"{now_s}/{number}" for number in range(5)]
        return [type(door.call(name, name, 5_000, now_s)).__name__ for name in names]

    assert answers(before) == ["Admit"] * 3 + ["Queue"] * 2
    assert len(door.poll(before)) == 0
    door.observe(view, within)
    assert len(door.poll(within)) == 2
    assert answers(within) == ["Admit"] * 5
    assert answers(after) == ["Queue"] * 5


# ---- Scripts -------------------------------------------------------------------------------------------------------


def run_script(module: object, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict:
    monkeypatch.setattr(sim_rooms, "CACHE", folder / "cache")
    monkeypatch.setattr(sys, "argv", ["sim.py", "--quick", "--jobs", "1", "--results", str(folder)])
    module.main()  # type: ignore[attr-defined]
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_script_runs_alone_and_resumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_script(sim_knee, monkeypatch, tmp_path)
    assert "1.9" in capsys.readouterr().out
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(kept) == first["made_with"]["runs"]
    assert run_script(sim_knee, monkeypatch, tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == kept
    assert (tmp_path / "knee.png").stat().st_size > 1000


def test_ending_the_burst_ends_it_and_nothing_else() -> None:
    shape = {"profile": "h100-1p1d", "policy": "stock", "counted_s": 1800.0, "tail_s": 0.0, "seed": 1}
    regular = sim_rooms.case(sim_rooms.CODE_SMALL, rate_per_min=2.0, **shape)
    plan = sim_intervention.with_burst(
        regular.plan(), sim_rooms.case(sim_rooms.CODE_SMALL, rate_per_min=6.0, **shape).plan()
    )
    hardware = regular.settings.hardware()
    run = sim_intervention.Intervened(
        plan, hardware, sim_rooms.policy_factory("stock", {}, plan, hardware), checked=True
    )
    run.ended_s = 1500.0
    log = run.run()
    ends = {planned.uid: log.session_end_s[number] for number, planned in enumerate(plan.sessions)}
    burst = [end for uid, end in ends.items() if uid.startswith("burst")]
    assert len(burst) > 40
    assert max(burst) == 1500.0
    assert sum(end == 1500.0 for end in burst) > 3
    assert 1500.0 not in [end for uid, end in ends.items() if not uid.startswith("burst")]
    assert sum(end > 1500.0 for uid, end in ends.items() if not uid.startswith("burst")) > 3
