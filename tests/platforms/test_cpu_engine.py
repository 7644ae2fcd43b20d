"""One real SGLang server on the CPU platform, host tier included: answers, cache hits, endpoints, pinning."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from sglang_basin.platforms.profiles import PROFILES
from sglang_basin.platforms.tiny_model import ModelSpec, build

pytestmark = [pytest.mark.stack, pytest.mark.first]

POOL_TOKENS = 4096
PAGE_TOKENS = 16
START_LIMIT_S = 240
CORE = str(min(os.sched_getaffinity(0)))


class Server:
    def __init__(self, url, process, folder):
        self.url, self.process, self.folder = url, process, folder

    def post(self, path, **body):
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def generate(self, prompt, count=16):
        """The new token ids and the tokens of the prompt that came from the cache, as (device, host)."""
        sampling = {"temperature": 0, "max_new_tokens": count}
        answer = json.loads(self.post("/generate", input_ids=prompt, sampling_params=sampling))
        cached = answer["meta_info"]["cached_tokens_details"] or {}
        assert sum(cached.get(tier, 0) for tier in ("device", "host")) == answer["meta_info"]["cached_tokens"]
        return answer["output_ids"], (cached.get("device", 0), cached.get("host", 0))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = build(ModelSpec(hidden=128, layers=2, dtype="float32"))
    log = tmp_path_factory.mktemp("engine") / "server.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    profile = PROFILES["cpu"]
    command = [
        *(sys.executable, "-m", "sglang.launch_server", *profile.engine_arguments("both")),
        *("--model-path", str(folder), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--max-total-tokens", str(POOL_TOKENS), "--page-size", str(PAGE_TOKENS)),
        *("--enable-metrics", "--enable-cache-report", "--random-seed", "1"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    ]
    environment = {**os.environ, **profile.environment(role="both", cores=CORE)}
    environment.pop("BASIN_CONFIG", None)
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield Server(url, process, folder)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _wait_until_healthy(url, process, log):
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5) as answer:
            if answer.status == 200:
                return
        if process.poll() is not None:
            break
        time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    pytest.fail(f"the server did not become healthy (exit code {process.poll()}); its log ends:\n{tail}")


def prompt_of(tokens, seed):
    numbers = random.Random(seed)
    return [numbers.randrange(300, 2048) for _ in range(tokens)]


def test_tokens_are_those_of_an_independent_implementation(server):
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(server.folder)
    for tokens in (5, 333, 1200):
        prompt = prompt_of(tokens, seed=tokens)
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, tokens:].tolist()
        cold, cached = server.generate(prompt)
        assert (cold, cached) == (expected, (0, 0))
        again, cached = server.generate(prompt)
        assert again == expected
        assert sum(cached) == (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_a_grown_conversation_hits_what_was_computed(server):
    prompt = prompt_of(500, seed=1)
    answer, _ = server.generate(prompt, count=40)
    _, cached = server.generate([*prompt, *answer, *prompt_of(60, seed=2)])
    assert sum(cached) == (500 + 40 - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_evicted_context_comes_back_from_the_host_tier(server):
    prompt = prompt_of(1600, seed=3)
    expected, _ = server.generate(prompt)
    for seed in range(10, 14):  # together more than the pool
        server.generate(prompt_of(1600, seed=seed))
    answer, (device, host) = server.generate(prompt)
    assert host > 0, "nothing was loaded back from the host tier"
    assert device + host == 1599 // PAGE_TOKENS * PAGE_TOKENS
    assert answer == expected


def test_chat_streams_what_it_answers(server):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
    whole = json.loads(server.post("/v1/chat/completions", **body))
    assert whole["usage"]["completion_tokens"] == 12
    text = server.post("/v1/chat/completions", **body, stream=True, stream_options={"include_usage": True})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert len([piece for piece in pieces if piece]) > 3, "not streamed"  # a busy server joins some tokens
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == 12


def test_metrics_count_the_cached_tokens(server):
    server.generate(prompt_of(100, seed=5))
    server.generate(prompt_of(100, seed=5))
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    cached = [float(line.split()[-1]) for line in lines if line.startswith("sglang:cached_tokens_total")]
    assert sum(cached) >= 96


def test_the_model_runs_on_the_named_core_alone(server):
    (scheduler,) = [p for p in psutil.Process(server.process.pid).children(recursive=True) if "scheduler" in p.name()]
    affinities = {tuple(sorted(os.sched_getaffinity(thread.id))) for thread in scheduler.threads()}
    assert affinities == {(int(CORE),)}
