import subprocess
import sys
import threading
import time

import pytest
from made_sessions import made

from sglang_basin.policy.budget import Budget, BudgetSettings
from sglang_basin.policy.decisions import Queue
from sglang_basin.policy.door import Door, DoorSettings
from sglang_basin.policy.prediction import PeaksSeen
from sglang_basin.policy.reservation import law_named
from sglang_basin.policy.sessions import Session
from sglang_basin.predictor.deployed import MAX_LOGGED_CALLS, DeployedPredictor, SessionLogThread
from sglang_basin.predictor.model_file import ModelFileError, default_model_path
from sglang_basin.predictor.payload import task_payload
from sglang_basin.predictor.predictor import TrainedPredictor
from sglang_basin.predictor.recorded import read_recorded
from sglang_basin.predictor.seen import SeenPredictor
from sglang_basin.predictor.session_log import SessionLog

LONG = task_payload({"model": "m", "messages": [{"role": "user", "content": "task 1 refactor everything alpha"}]})
SHORT = task_payload({"model": "m", "messages": [{"role": "user", "content": "task 2 rename one alpha"}]})


def door_with(predictor, tokens=10**9, **settings):
    return Door(
        DoorSettings(idle_timeout_s=600.0, hold_limit_s=60.0, **settings),
        law=law_named("current"),
        budget=Budget(BudgetSettings(fixed_tokens=tokens), tokens),
        predictor=predictor,
    )


def serve(door, name, calls, start_s=0.0, ends=True):
    for number, (prompt, output) in enumerate(calls):
        last = ends and number == len(calls) - 1
        door.call(f"{name}/{number}", name, prompt, start_s + number, ends_session=last)
        door.finish(f"{name}/{number}", output, start_s + number + 0.5)


def test_what_the_request_tells_is_used(model):
    deployed = DeployedPredictor(TrainedPredictor(model))
    trained = TrainedPredictor(model)
    for name, payload, text in (
        ("long", LONG, "task 1 refactor everything alpha"),
        ("short", SHORT, "task 2 rename one alpha"),
    ):
        deployed.describe(name, payload)
        trained.describe(name, text=text, kin=int(payload["kin"], 16))
        session = Session(name, 0.0, 2000, 0.0, calls_seen=1, first_tokens=2000)
        assert deployed.predict(session) == trained.predict(session)
    assert deployed.counts.failures == deployed.counts.fallbacks == 0


def test_a_score_from_the_http_process_counts_as_one_made_here(model):
    """And one that cannot be is counted, not used."""
    body = {"model": "m", "messages": [{"role": "user", "content": "task 1 refactor everything alpha"}]}
    scored = task_payload(body, text_score=model.text)
    assert "terms" not in scored
    deployed = DeployedPredictor(TrainedPredictor(model))
    sessions = {"terms": LONG, "score": scored, "foreign": {**scored, "score": 1e9}, "nothing": None}
    tokens = {}
    for name, payload in sessions.items():
        deployed.describe(name, payload)
        tokens[name] = deployed.predict(Session(name, 0.0, 2000, 0.0, calls_seen=1, first_tokens=2000)).tokens
    assert tokens["score"] == tokens["terms"]
    assert tokens["foreign"] == tokens["nothing"] != tokens["terms"]
    assert deployed.counts.failures == 1


def test_sessions_are_logged_as_they_were_served(model, tmp_path):
    deployed = DeployedPredictor(TrainedPredictor(model), SessionLogThread(SessionLog(tmp_path / "log")))
    door = door_with(deployed)
    deployed.describe("a", LONG)
    serve(door, "a", [(1000, 50), (1200, 0), (1500, 70)])
    serve(door, "b", [(700, 10)], start_s=10.0)
    serve(door, "a", [(400, 5)], start_s=20.0)  # the name again: another session
    deployed.close()
    one, two, three = read_recorded(tmp_path / "log")
    assert one.calls == ((1000, 50), (1200, 0), (1500, 70))
    assert one.pauses_s == (0.5, 0.5)
    assert (f"{one.kin:016x}", f"{one.task.fingerprint:016x}") == (LONG["kin"], LONG["task"])
    assert (two.calls, two.kin, two.task) == (((700, 10),), None, None)
    assert (three.calls, three.task) == (((400, 5),), None)
    assert (deployed.log.written, deployed.log.lost) == (3, 0)


def test_a_long_session_keeps_its_peak_in_the_log(model, tmp_path):
    deployed = DeployedPredictor(TrainedPredictor(model), SessionLogThread(SessionLog(tmp_path / "log")))
    calls = [(100 + number, 3) for number in range(MAX_LOGGED_CALLS + 40)]
    calls[MAX_LOGGED_CALLS + 20] = (9000, 17)
    serve(door_with(deployed), "a", calls)
    deployed.close()
    (read,) = read_recorded(tmp_path / "log")
    assert len(read.calls) == MAX_LOGGED_CALLS
    assert read.calls[: MAX_LOGGED_CALLS - 1] == tuple(calls[: MAX_LOGGED_CALLS - 1])
    assert read.peak_tokens == 9017


def test_sessions_turned_away_are_forgotten(model, tmp_path):
    deployed = DeployedPredictor(TrainedPredictor(model), SessionLogThread(SessionLog(tmp_path / "log")))
    door = door_with(deployed, tokens=1000)
    for name in ("a", "b", "c"):
        deployed.describe(name, LONG)
    assert not isinstance(door.call("1", "a", 900, 0.0), Queue)
    door.call("2", "b", 900, 1.0)
    assert isinstance(door.call("3", "c", 900, 2.0), Queue)
    assert len(deployed.predictor) == len(deployed._logged) == 3
    door.poll(70.0)  # held for too long
    assert set(deployed._logged) == {"a", "b"}
    assert len(deployed.predictor) == 2


class Full(SessionLog):
    def append(self, entry):
        raise OSError(28, "No space left on device")


class Slow(SessionLog):
    def __init__(self, path, gate):
        super().__init__(path)
        self.gate = gate

    def append(self, entry):
        assert self.gate.wait(30)
        super().append(entry)


def test_a_full_disk_costs_lines_and_nothing_else(model, tmp_path):
    deployed = DeployedPredictor(TrainedPredictor(model), SessionLogThread(Full(tmp_path / "log")))
    door = door_with(deployed)
    for name in "abc":
        serve(door, name, [(700, 10)])
    deployed.close()
    assert (deployed.log.written, deployed.log.lost) == (0, 3)
    assert "No space left" in deployed.last_failure
    assert deployed.counts.learned == 3
    assert deployed.counts.failures == 0


def test_a_slow_disk_never_makes_the_scheduler_wait(model, tmp_path):
    gate = threading.Event()
    log = SessionLogThread(Slow(tmp_path / "log", gate), most_waiting=4)
    deployed = DeployedPredictor(TrainedPredictor(model), log)
    door = door_with(deployed)
    started = time.perf_counter()
    for number in range(10):
        serve(door, str(number), [(700, 10)])
    assert time.perf_counter() - started < 5
    assert deployed.log.lost >= 5  # four wait, and one may be under way
    gate.set()
    deployed.close(30.0)
    assert deployed.log.written + deployed.log.lost == 10


class Broken:
    def guess(self, *_):
        raise RuntimeError("out of order")

    subject = learn = guess


@pytest.mark.parametrize("predictor", [SeenPredictor(), TrainedPredictor(Broken())])
def test_without_a_working_model_it_is_peaks_seen_and_the_log_goes_on(predictor, tmp_path):
    deployed, seen = DeployedPredictor(predictor, SessionLogThread(SessionLog(tmp_path / "log"))), PeaksSeen()
    for number, one in enumerate(made(20)):
        deployed.describe(str(number), LONG)
        serve(door_with(deployed), str(number), one.calls)
        seen.learn(Session(str(number), 0.0, 0, 0.0, peak_tokens=one.peak_tokens))
    asked = Session("x", 0.0, 3000, 0.0, calls_seen=1)
    assert deployed.predict(asked) == seen.predict(asked)
    deployed.close()
    assert len(read_recorded(tmp_path / "log")) == 20
    assert deployed.counts.fallbacks == deployed.counts.predictions
    assert (deployed.counts.failures > 0) == isinstance(predictor, TrainedPredictor)


@pytest.mark.parametrize("payload", [{"kin": 7}, {"terms": "!"}, {"surprise": 1}])
def test_a_foreign_payload_is_counted_and_the_call_goes_on(model, payload):
    deployed = DeployedPredictor(TrainedPredictor(model))
    deployed.describe("a", payload)
    assert deployed.counts.failures == 1
    assert deployed.last_failure.startswith("ValueError: task payload")
    assert deployed.predict(Session("a", 0.0, 3000, 0.0, calls_seen=1)).at(0.9) >= 3000
    for nothing in (None, 7, "x"):
        deployed.describe("a", nothing)
    assert deployed.counts.failures == 1


def test_its_tables_are_bounded(model, tmp_path):
    trained = TrainedPredictor(model, max_sessions=10)
    deployed = DeployedPredictor(trained, SessionLogThread(SessionLog(tmp_path / "log")), max_sessions=10)
    for number in range(100):
        deployed.describe(str(number), LONG)
        deployed.predict(Session(str(number), 0.0, 3000, 0.0, calls_seen=1))
    assert len(deployed._logged) == len(deployed.predictor) == 10
    deployed.close()


def test_from_files(tmp_path):
    deployed = DeployedPredictor.from_files(default_model_path(), tmp_path / "log")
    serve(door_with(deployed), "a", [(1000, 50)])
    deployed.close()
    assert deployed.counts.fallbacks == 0
    assert len(read_recorded(tmp_path / "log")) == 1
    assert DeployedPredictor.from_files(None).log is None


def test_wrong_files_stop_the_start(tmp_path):
    (tmp_path / "model").write_bytes(b"no model")
    with pytest.raises(ModelFileError, match="model"):
        DeployedPredictor.from_files(tmp_path / "model")
    with pytest.raises(OSError, match="log"):
        DeployedPredictor.from_files(None, tmp_path / "no such folder" / "log")


def test_where_the_compiled_code_cannot_be_loaded_it_is_peaks_seen_and_counted():
    """As where NumPy is newer than numba knows."""
    code = (
        "import sys; sys.modules['numba'] = None; "
        "from sglang_basin.config import BasinConfig; from sglang_basin.engine.door import predictor_for; "
        "from sglang_basin.policy.sessions import Session; from sglang_basin.policy.prediction import PeaksSeen; "
        "deployed, asked = predictor_for(BasinConfig()), Session('x', 0.0, 3000, 0.0, calls_seen=1); "
        "assert deployed.predict(asked) == PeaksSeen().predict(asked); "
        "assert (deployed.counts.failures, deployed.counts.fallbacks) == (1, 1), deployed.counts; "
        "assert 'numba' in deployed.last_failure, deployed.last_failure"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
