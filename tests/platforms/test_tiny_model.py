"""Tiny models: the same spec gives the same bytes, and the answer depends on the context."""

import concurrent.futures
import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_basin.platforms.tiny_model import (
    SPECIAL_TOKENS,
    ModelSpec,
    _bfloat16_bits,
    build,
    fast_dtype,
    main,
    train_tokenizer,
)

SMALL = ModelSpec(hidden=64, layers=2, vocab=1024, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(2048)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_same_spec_same_bytes_in_another_process(tmp_path):
    here = build(SMALL, tmp_path / "here")
    flags = ["--hidden", "64", "--layers", "2", "--vocab", "1024", "--dtype", "float32"]
    command = [sys.executable, "-m", "sglang_basin.platforms.tiny_model", *flags, "--out", str(tmp_path / "there")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert printed == str(tmp_path / "there")
    assert digests(here) == digests(tmp_path / "there")


def test_another_seed_is_another_model(tmp_path):
    first = digests(build(SMALL, tmp_path / "a"))
    other = ModelSpec(hidden=64, layers=2, vocab=1024, dtype="float32", seed=8)
    second = digests(build(other, tmp_path / "b"))
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}
    assert SMALL.name() != other.name()


def test_cached_model_is_built_once_even_by_many_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: build(SMALL), range(4)))
    assert folders == {tmp_path / "basin" / SMALL.name()}
    assert [path.name for path in (tmp_path / "basin").iterdir()] == [SMALL.name()]  # no scratch left
    stamp = (folders.pop() / "model.safetensors").stat().st_mtime_ns
    assert (build(SMALL) / "model.safetensors").stat().st_mtime_ns == stamp


def test_out_never_overwrites(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="--out"):
        build(SMALL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", 0),
        ("hidden", "640"),
        ("layers", -1),
        ("kv_heads", 3),
        ("vocab", 100_000),
        ("dtype", "float16"),
        ("seed", True),
    ],
)
def test_impossible_specs_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        ModelSpec(**{"hidden": 256, "layers": 2, field: value})


def test_command_line_names_the_wrong_flag(capsys):
    with pytest.raises(SystemExit):
        main(["--hidden", "64", "--layers", "0"])
    assert "layers: must be" in capsys.readouterr().err


def test_largest_vocabulary_is_within_the_training_text():
    assert train_tokenizer(3072).get_vocab_size() == 3072


@given(text=st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_tokenizer_is_lossless(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(token < 2048 for token in ids)


def test_bfloat16_rounds_as_torch_does():
    import torch

    values = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (_bfloat16_bits(values) == expected).all()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The small model as transformers, SGLang's model-loading peer, reads it."""
    transformers = pytest.importorskip("transformers")
    folder = build(SMALL, tmp_path_factory.mktemp("model") / "small")
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


def test_answer_depends_on_a_token_far_back(loaded):
    import torch

    model, _ = loaded
    prompt = torch.randint(300, 1024, (1, 400), generator=torch.Generator().manual_seed(1))
    changed = prompt.clone()
    changed[0, 3:19] = torch.randint(300, 1024, (16,), generator=torch.Generator().manual_seed(2))
    answers = [model.generate(ids, max_new_tokens=16, do_sample=False)[0, 400:].tolist() for ids in (prompt, changed)]
    assert answers[0] != answers[1]
    assert all(len(set(answer)) > 4 for answer in answers)  # not one token over and over


def test_greedy_answers_avoid_special_tokens_and_broken_characters(loaded):
    import torch

    model, tokenizer = loaded
    with torch.inference_mode():
        logits = model(torch.randint(0, 1024, (2, 200), generator=torch.Generator().manual_seed(3))).logits
    chosen = logits.argmax(-1).flatten().tolist()
    assert not set(chosen) & {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    assert all("\ufffd" not in tokenizer.decode([token]) for token in chosen)


def test_chat_template_extends_from_call_to_call(loaded):
    _, tokenizer = loaded
    call = {"type": "function", "function": {"name": "run", "arguments": {"command": "make test"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Fix the bug."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42 passed"},
        {"role": "assistant", "content": "Done."},
    ]
    tools = [{"type": "function", "function": {"name": "run", "parameters": {}}}]

    def render(count, **options):
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, tools=tools, **options)

    for count in range(1, len(messages)):
        assert render(count + 1).startswith(render(count))
    assert render(5).startswith(render(4, add_generation_prompt=True))
    assert json.dumps("make test") in render(3)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu sse2 avx2 avx512f avx512_vnni", "float32"),
        ("fpu avx512f avx512_bf16 amx_tile", "bfloat16"),
        ("fpu avx512f amx_bf16", "bfloat16"),
    ],
)
def test_bfloat16_is_taken_where_the_cpu_has_it(tmp_path, flags, dtype):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n")
    assert fast_dtype(tmp_path / "cpuinfo") == dtype
    assert fast_dtype(tmp_path / "nothing") == "float32"
