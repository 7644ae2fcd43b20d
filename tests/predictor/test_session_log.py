import io

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_sessions import made

from sglang_basin.predictor.recorded import read_recorded
from sglang_basin.predictor.session_log import MAX_CALLS, Entry, SessionLog, read_lines
from sglang_basin.predictor.text import read_task
from sglang_basin.predictor.training import fit_model
from sglang_basin.replay.trace import TraceError


def test_what_is_written_is_read(tmp_path):
    log, sessions = SessionLog(tmp_path / "log"), made(30)
    for session in sessions:
        log.append(Entry(session.calls, session.kin, session.task))
    log.append(Entry(((10, 1), (20, 2), (30, 3)), pauses_s=(0.25, 7.0)))
    *read, paused = read_recorded(tmp_path / "log")
    assert paused.pauses_s == (0.25, 7.0)
    assert [(one.calls, one.kin, one.task) for one in read] == [(one.calls, one.kin, one.task) for one in sessions]
    assert all(one.text is None for one in read)
    fit_model(read)


def test_no_text_unless_asked_for(tmp_path):
    secret = "rotate the credentials of the billing server"
    SessionLog(tmp_path / "a").append(Entry(((10, 1),), 3, read_task(secret)))
    written = (tmp_path / "a").read_text()
    assert not any(word in written for word in secret.split() if len(word) > 3)
    SessionLog(tmp_path / "b").append(Entry(((10, 1),), 3, read_task(secret), text=secret))
    assert secret in (tmp_path / "b").read_text()


def test_it_rotates(tmp_path):
    log = SessionLog(tmp_path / "log", max_bytes=4096, kept_files=3)
    for number in range(400):
        log.append(Entry(((1000 + number, 5), (2000, 10)), kin=number))
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["log", "log.1", "log.2"]
    assert all(file.stat().st_size <= 4096 for file in tmp_path.iterdir())
    kept = [one.kin for name in ("log.2", "log.1", "log") for one in read_recorded(tmp_path / name)]
    assert kept == list(range(kept[0], 400))


def test_a_torn_line_is_passed_over(tmp_path):
    path = tmp_path / "log"
    SessionLog(path).append(Entry(((10, 1),)))
    with path.open("ab") as file:
        file.write(b'{"calls":[[20,')
    SessionLog(path).append(Entry(((30, 1),)))
    assert [one.calls[0][0] for one in read_recorded(path)] == [10, 30]


def test_a_wrong_line_is_named(tmp_path):
    path = tmp_path / "log"
    SessionLog(path).append(Entry(((10, 1),)))
    with path.open("ab") as file:
        file.write(b'{"calls":[[-1,2]]}\n')
    with pytest.raises(TraceError, match=r"log:3: .*calls"):
        read_recorded(path)


def test_a_long_session_keeps_its_peak(tmp_path):
    calls = tuple((number, 1) for number in range(1, MAX_CALLS + 500))
    SessionLog(tmp_path / "log").append(Entry(calls))
    (read,) = read_recorded(tmp_path / "log")
    assert len(read.calls) == MAX_CALLS
    assert read.peak_tokens == MAX_CALLS + 500


def test_wrong_settings_and_entries(tmp_path):
    with pytest.raises(ValueError, match="max_bytes"):
        SessionLog(tmp_path / "log", max_bytes=10)
    with pytest.raises(ValueError, match="at least one call"):
        SessionLog(tmp_path / "log").append(Entry(()))


@given(st.binary(max_size=400))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(tmp_path, data):
    try:
        entries = list(read_lines(io.BytesIO(data), tmp_path / "log"))
    except TraceError as error:
        entries, refused = [], str(error)
    else:
        refused = "log:"
    assert "log:" in refused
    assert all(entry.calls for entry in entries)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no session"),
        (b"{\n", "x.jsonl:1"),
        (b'{"session_id":"a","calls":[]}\n', "calls"),
        (b"\xff\n", "x.jsonl:1"),
    ],
)
def test_a_wrong_trace_is_named(tmp_path, content, says):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_recorded(path)
