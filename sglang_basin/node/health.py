"""Whether engines answer and the router routes: plain polls over HTTP, each bounded in time."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A node's own addresses never go through a proxy of the environment."""


def engine_is_up(url: str, timeout_s: float = 2.0) -> bool:
    """Whether a SGLang server has loaded its model and warmed up."""
    return _get(f"{url}/health", timeout_s) is not None


def registered_workers(url: str, timeout_s: float = 2.0) -> dict[str, bool]:
    """The router's workers and whether it takes each for healthy; empty while it does not answer.

    Its own `/health` turns green some seconds before its workers are registered, so it says nothing.
    """
    return {name: bool(worker.get("is_healthy")) for name, worker in workers(url, timeout_s).items()}


def workers(url: str, timeout_s: float = 2.0) -> dict[str, dict[str, Any]]:
    """What the router says about its workers, by URL; empty while it does not answer."""
    try:
        answer = json.loads(_get(f"{url}/workers", timeout_s) or "{}")
        return {worker["url"]: dict(worker) for worker in answer.get("workers", [])}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def replace_worker(url: str, worker_id: str, spec: Mapping[str, Any], timeout_s: float = 5.0) -> str | None:
    """Have the router register a worker anew; None when it will, else what came back instead."""
    try:
        _send("PUT", f"{url}/workers/{worker_id}", spec, timeout_s)
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
    except OSError as error:
        return str(error)
    return None


def generate_one_token(url: str, timeout_s: float = 60.0) -> str | None:
    """Send the smallest real request through the router; None when it worked, else what came back instead."""
    body = {"text": "ready?", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    try:
        answer = json.loads(post(f"{url}/generate", body, timeout_s))
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        return str(error)
    return None if isinstance(answer, dict) and "text" in answer else f"unexpected answer {str(answer)[:200]}"


def post(url: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
    """POST JSON. Raises urllib.error.HTTPError or OSError."""
    return _send("POST", url, body, timeout_s)


def _send(method: str, url: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers, method=method)
    with _DIRECT.open(request, timeout=timeout_s) as answer:
        return answer.read()


def _get(url: str, timeout_s: float) -> bytes | None:
    try:
        with _DIRECT.open(url, timeout=timeout_s) as answer:
            return answer.read() if answer.status == 200 else None
    except OSError:  # includes urllib.error.URLError and HTTPError
        return None
