import gzip
import json

import pytest
from made_sessions import made

from sglang_basin.fit_predictor import main
from sglang_basin.predictor.model_file import load_model


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "made.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number, session in enumerate(made(24)):
            calls = [{"prompt_tokens": prompt, "output_tokens": output} for prompt, output in session.calls]
            line = {"session_id": str(number), "task_id": f"t{number // 2}", "task_text": session.text, "calls": calls}
            file.write(json.dumps(line) + "\n")
    return path


def test_fit_report_and_score(trace, tmp_path, capsys):
    model, scores, plots = tmp_path / "m.npz", tmp_path / "scores.json", tmp_path / "plots"
    fit = ["--trace", trace, "--out", model, "--json", scores, "--plots", plots, "--folds", 2]
    assert main([str(word) for word in fit]) == 0
    printed = capsys.readouterr().out
    for words in ("basin, unseen tasks", "baseline, repeated tasks", "fitted on 25% of the sessions", "P90 cover"):
        assert words in printed
    parts = json.loads(scores.read_text())["parts"]
    assert {(part["method"], part["split"]) for part in parts} >= {
        (method, split)
        for method in ("basin", "baseline", "context alone")
        for split in ("unseen tasks", "repeated tasks")
    }
    assert sorted(file.name for file in plots.iterdir()) == ["by_call.png", "learning_curve.png", "predicted.png"]
    load_model(model)

    assert main(["--eval", str(trace), "--model", str(model), "--json", "-"]) == 0
    scored = json.loads(capsys.readouterr().out)["files"][str(trace)]
    assert set(scored) == {"as fitted", "learning as it serves"}
    assert scored["as fitted"][0]["sessions"] == 24


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "--trace"),
        (["--trace", "x"], 2, "--out"),
        (["--trace", "x", "--eval", "y"], 2, "either"),
        (["--eval", "x", "--out", "m"], 2, "--out and --plots"),
        (["--trace", "x", "--out", "/no/such/folder/m"], 2, "does not exist"),
        (["--trace", "absent.jsonl", "--out", "m"], 1, "absent.jsonl"),
        (["--eval", "swe_bench_lmcache", "--model", "absent.npz"], 1, "absent.npz"),
        (["--eval", "swe_bench_lmcache", "--folds", "1"], 2, "--folds"),
    ],
)
def test_wrong_use(words, code, says, capsys):
    assert main(words) == code
    assert says in capsys.readouterr().err
