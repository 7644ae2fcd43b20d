import dataclasses
import json
import os
import re

import msgspec
import pytest
from loads import hardware, plan_of, session

from sglang_basin.policy.rivals.stock import Stock
from sglang_basin.replay.summary import summarize as summarize_replay
from sglang_basin.replay.trace import Scaling
from sglang_basin.simulate import main
from sglang_basin.simulator import sweep
from sglang_basin.simulator.measured import as_run_result
from sglang_basin.simulator.policies import PolicyError, policy_factory
from sglang_basin.simulator.profile import ProfileError, read_profile, shipped_profiles
from sglang_basin.simulator.records import summarize
from sglang_basin.simulator.simulation import ClientSettings, simulate
from sglang_basin.simulator.study import StudySettings, run_study

LOAD = ["--trace", "swe_bench", "--rate", "6/min", "--duration", "4m", "--surge", "+100%", "--from", "1m", "--to", "2m"]


def settings(**more):
    return StudySettings(
        trace="swe_bench", profile="h100-1p1d", policy="stock", rate_per_s=0.1, duration_s=240.0, **more
    )


def test_same_seed_same_bytes_apart_from_what_it_cost(tmp_path):
    texts = []
    for name in ("a.json", "b.json"):
        assert main([*LOAD, "--policy", "basin", "--json", str(tmp_path / name)]) == 0
        text = (tmp_path / name).read_text()
        texts.append(text[: text.index('"cost"')])
    assert texts[0] == texts[1]
    cost = json.loads((tmp_path / "a.json").read_text())["cost"]
    assert cost["times_real_time"] > 0
    assert cost["peak_memory_mib"] > 10
    assert main([*LOAD, "--policy", "basin", "--seed", "2", "--json", str(tmp_path / "c.json")]) == 0
    assert json.loads((tmp_path / "c.json").read_text())["result"]["digest"] not in texts[0]


@pytest.mark.parametrize("policy", ["stock", "basin"])
def test_the_summary_is_that_of_replay_on_the_same_run(policy):
    """One number may differ: a call's step times are known to the simulator by their sum only."""
    base = settings(
        profile_changes={"prefill.pool_tokens": "96000"}, client=ClientSettings(call_timeout_s=60.0, retries=2)
    )
    study = run_study(dataclasses.replace(base, policy=policy))
    ours = summarize(study.log, study.unloaded_s)
    theirs = summarize_replay(as_run_result(study.log, study.unloaded_s))
    for name, value in theirs.as_dict().items():
        if name != "tpot_p50_s":
            assert getattr(ours, name) == pytest.approx(value), name
    assert ours.tpot_p50_s == pytest.approx(theirs.tpot_p50_s, rel=0.1)


def test_a_sweep_runs_each_setting_once_and_resumes(tmp_path, capsys):
    arguments = [*LOAD, "--sweep", "policy=stock,basin", "--seeds", "1,2", "--jobs", "2", "--results", str(tmp_path)]
    assert main(arguments) == 0
    first = capsys.readouterr()
    files = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 4
    assert re.search(r"policy=stock +2 ", first.out)
    os.remove(tmp_path / min(files))
    assert main(arguments) == 0
    again = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert set(again) == set(files)
    assert sum(again[name] != files[name] for name in files) == 1
    assert "3 of 4" in capsys.readouterr().err


def test_a_result_is_not_taken_for_that_of_other_settings(tmp_path):
    keys = {
        settings().key(),
        settings(seed=2).key(),
        settings(profile_changes={"decode.lend": "true"}).key(),
        settings(policy_options={"idle_timeout_s": "60"}).key(),
        settings(shared_prefix_tokens=100).key(),
    }
    assert len(keys) == 5
    assert settings().key() == settings().key()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "bassin"], "no policy 'bassin'; known: basin, stock"),
        (["--set", "policy.alhpa=1"], "did you mean 'alpha'"),
        (["--set", "policy.law=partial", "--set", "policy.alpha=2"], "alpha: must be between 0 and 1"),
        (["--set", "policy.alpha"], "write KEY=VALUE"),
        (["--set", "profil.decode.lend=true"], "not a setting"),
        (["--sweep", "rate=fast"], "not a positive rate"),
        (["--seeds", "1,two"], "write whole numbers"),
        (["--sweep", "policy=stock,nothing"], "no policy 'nothing'"),
    ],
)
def test_wrong_settings_are_refused_by_name(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*LOAD, *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_files_are_refused_by_name(tmp_path, capsys):
    assert main(["--profile", "h300", *LOAD]) == 1
    assert "shipped profiles (cpu-demo, h100-1p1d, h200-1p3d)" in capsys.readouterr().err
    broken = tmp_path / "p.toml"
    text = shipped_profiles()["h100-1p1d"].read_text()
    broken.write_text(text.replace("step_s", "stepp_s"))
    with pytest.raises(ProfileError, match="stepp_s"):
        read_profile(str(broken))
    broken.write_text(text.replace("pool_tokens = 336_000", "pool_tokens = 336_001", 1))
    with pytest.raises(ProfileError, match="whole pages of 64"):
        read_profile(str(broken))


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_shipped_profiles_say_where_they_come_from(name):
    profile = read_profile(name)
    assert profile.name == name
    assert len(profile.derivation) > 20


def test_profile_fields_change_by_text():
    profile = read_profile("h200-1p3d").changed({"decode.lend": "true", "prefill.host_tokens": "640"})
    assert profile.decode.lend
    assert profile.prefill.host_tokens == 640
    with pytest.raises(ProfileError, match=r"no field 'decode\.lends'"):
        profile.changed({"decode.lends": "true"})


def test_a_sweep_key_changes_what_it_names():
    base = settings()
    assert sweep.with_setting(base, "policy.alpha", "0.5").policy_options == {"alpha": "0.5"}
    assert sweep.with_setting(base, "profile.decode.lend", "true").profile_changes == {"decode.lend": "true"}
    assert sweep.with_setting(base, "rate", "30/min").rate_per_s == 0.5
    assert sweep.with_setting(base, "retries", "3").client.retries == 3


def test_rivals_take_the_hardware_and_options_from_text():
    profile = hardware()
    plan = plan_of((0.0, session("a", (100, 0, 5, 0.0))))
    policy = policy_factory("continuum", {"reload_factor": "2"}, plan, profile)()
    assert policy.name == "continuum"
    with pytest.raises(PolicyError, match="reload_factor"):
        policy_factory("continuum", {"reload_factor": "much"}, plan, profile)


def test_a_measured_run_is_simulated_on_its_own_plan(tmp_path, capsys):
    base = settings(tail_s=30.0)
    study = run_study(base)
    result = as_run_result(study.log, study.unloaded_s)
    lines = [msgspec.json.encode(record) for record in (result.run, *result.calls, *result.sessions)]
    path = tmp_path / "calls.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    common = ["--trace", "swe_bench", "--profile", "h100-1p1d", "--policy", "stock", "--measured", str(path)]
    assert main(common) == 0
    told = capsys.readouterr().out
    assert re.search(r"measured +simulated", told)
    row = next(line for line in told.splitlines() if line.startswith("sessions finished"))
    assert row.split()[-1] == row.split()[-2]
    assert main([*common, "--scale-tokens", "1/2"]) == 1
    assert "give the trace and scaling of that run" in capsys.readouterr().err


def test_retries_come_back_as_sdks_do_and_give_up_after_the_last():
    class Refuses(Stock):
        def _arrived(self, program, call, now_s):
            return None

    plan = plan_of((0.0, session("a", (100, 0, 5, 0.0))))
    log = simulate(plan, hardware(), Refuses, client=ClientSettings(call_timeout_s=10.0, retries=2))
    assert list(log.call_end_s) == [10.0, 20.5, 31.5]
    assert list(log.call_retried) == [1, 1, 0]
    assert list(log.call_due_s) == [0.0] * 3


def test_a_fit_recovers_the_costs_of_the_run_it_was_given(tmp_path, capsys):
    """Measured is a simulated run of a slower machine; the fit starts from the shipped profile."""
    slower = {
        "prefill.per_token_s": "2e-3",
        "prefill.attention_s": "1e-7",
        "link.fixed_s": "0.2",
        "decode.step_s": "0.02",
    }
    study = run_study(settings(profile_changes=slower, scaling=Scaling(tokens=0.1)))
    result = as_run_result(study.log, study.unloaded_s)
    path, fitted = tmp_path / "calls.jsonl", tmp_path / "fitted.toml"
    records = (result.run, *result.calls, *result.sessions)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    common = ["--trace", "swe_bench", "--scale-tokens", "0.1", "--profile", "h100-1p1d", "--policy", "stock"]
    assert main([*common, "--measured", str(path), "--fit", str(fitted)]) == 0
    assert "median error" in capsys.readouterr().out
    profile = read_profile(str(fitted))
    assert profile.prefill.per_token_s == pytest.approx(2e-3, rel=0.05)
    assert profile.prefill.fixed_s + profile.link.fixed_s == pytest.approx(0.212, rel=0.05)
    assert profile.decode.step_s == pytest.approx(0.02, rel=0.05)
    assert profile.prefill.pool_tokens == read_profile("h100-1p1d").prefill.pool_tokens


def test_a_fit_to_next_to_nothing_is_refused(tmp_path, capsys):
    study = run_study(settings(scaling=Scaling(max_calls=1)))
    result = as_run_result(study.log, study.unloaded_s)
    path = tmp_path / "calls.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in (result.run, *result.calls[:5])))
    common = ["--trace", "swe_bench", "--max-calls", "1", "--profile", "h100-1p1d", "--policy", "stock"]
    assert main([*common, "--measured", str(path), "--fit", str(tmp_path / "f.toml")]) == 1
    assert "a fit needs 20" in capsys.readouterr().err
