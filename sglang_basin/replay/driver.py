"""The closed loop: each session calls, streams the answer, waits for its tool, and calls again.

One asyncio process drives all sessions. `run` opens them when the plan says and stops at the plan's end, at `stop`,
or when every session is done, whichever comes first; sessions still open then are `unfinished`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import aiohttp
import msgspec

from sglang_basin.replay.plan import Plan, PlannedSession
from sglang_basin.replay.prompts import ChatPrompt, TokenPrompt
from sglang_basin.replay.records import (
    CallOutcome,
    CallRecord,
    OpenedRecord,
    RecordWriter,
    RunRecord,
    RunResult,
    SessionOutcome,
    SessionRecord,
)
from sglang_basin.replay.stream import ChatAnswer, Failure, GenerateAnswer, ProtocolError, failure_of
from sglang_basin.replay.trace import Call
from sglang_basin.wire import END_FIELD, SESSION_HEADERS

MAX_ERROR_BODY_BYTES = 64 * 1024
RECENT_S = 30.0
"""Over how many seconds the progress line averages."""

REJECTING_STATUS = (429, 503)

_SESSION_OUTCOMES: Mapping[CallOutcome, SessionOutcome] = {
    "rejected": "rejected",
    "dropped": "dropped",
    "aborted": "failed",
    "timeout": "failed",
    "error": "failed",
}


class ServerError(RuntimeError):
    """The server cannot be used at all; the message says what was tried."""


@dataclass(frozen=True, kw_only=True)
class DriveSettings:
    """How calls are sent."""

    endpoint: Literal["generate", "chat"] = "generate"
    model: str = "default"
    """Named in chat calls only."""
    token_ids: tuple[int, int] = (16, 512)
    """Half-open range that prompts draw from. An id outside of the vocabulary kills a PD prefill server."""
    announce_end: bool = True
    """The last call says that its session ends with it, as an agent harness can."""
    retries: int = 0
    call_timeout_s: float = 600.0
    drain_s: float = 0.0
    """After the last arrival, sessions may go on for this long."""
    session_headers: tuple[str, ...] = SESSION_HEADERS[:1]
    """Request headers that carry the session's id, for a router that pins sessions by header."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in ("generate", "chat"):
            raise ValueError(f"endpoint must be generate or chat, got {self.endpoint!r}")
        if self.retries < 0:
            raise ValueError(f"retries must not be negative, got {self.retries!r}")
        if not self.call_timeout_s > 0:
            raise ValueError(f"call_timeout_s must be positive, got {self.call_timeout_s!r}")
        if self.drain_s < 0:
            raise ValueError(f"drain_s must not be negative, got {self.drain_s!r}")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A snapshot for whoever watches the run. Recent figures are None while nothing ended in the last 30 s."""

    elapsed_s: float
    end_s: float
    arrived: int
    planned: int
    live: int
    waiting: int
    """Live sessions whose first call has no token yet."""
    finished: int
    failed: int
    calls_ok: int
    recent_hit_rate: float | None
    recent_ttft_s: float | None


def retry_wait_s(record: CallRecord) -> float | None:
    """How long a client waits before it tries again, or None when it gives up: as the OpenAI and Anthropic SDKs do,
    refusals, lost connections, time-outs and 5xx answers before the first token are tried again, after Retry-After
    or 0.5 s doubling up to 8 s."""
    again = record.outcome in ("rejected", "dropped", "timeout") or (record.status or 0) >= 500
    if not again or record.outcome in ("ok", "cancelled") or record.first_token_at_s is not None:
        return None
    if record.retry_after_s is not None:
        return record.retry_after_s
    return min(8.0, 0.5 * 2.0**record.attempt)


class Driver:
    """Sends the calls of sessions to one server and hands each record to `writer`. An async context manager."""

    def __init__(self, url: str, settings: DriveSettings, writer: RecordWriter, *, seed: int, trace_name: str) -> None:
        path = "/generate" if settings.endpoint == "generate" else "/v1/chat/completions"
        self._url = url.rstrip("/") + path
        self._settings = settings
        self._writer = writer
        self._seed = seed
        self._trace_name = trace_name
        self._origin = time.perf_counter()
        self._waiting: set[str] = set()
        self._recent: deque[CallRecord] = deque()
        self.opened = self.ended = self.finished = self.failed = self.calls_ok = 0

    async def __aenter__(self) -> Driver:
        # A kept-alive connection that the server closes just as it is used again would look like a dropped call:
        # let go of them well before any server does (uvicorn: 5 s).
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
            headers={"Content-Type": "application/json", **self._settings.headers},
            read_bufsize=2**18,
        )
        self._origin = time.perf_counter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    def now_s(self) -> float:
        """Seconds since the driver was entered."""
        return time.perf_counter() - self._origin

    def progress(self, plan: Plan, end_s: float) -> Progress:
        now = self.now_s()
        while self._recent and self._recent[0].end_at_s < now - RECENT_S:
            self._recent.popleft()
        prompt_tokens = sum(record.prompt_tokens or 0 for record in self._recent)
        cached_tokens = sum(record.cached_tokens or 0 for record in self._recent)
        ttfts = sorted(record.ttft_s for record in self._recent if record.ttft_s is not None)
        return Progress(
            elapsed_s=now,
            end_s=end_s,
            arrived=self.opened,
            planned=len(plan.sessions),
            live=self.opened - self.ended,
            waiting=len(self._waiting),
            finished=self.finished,
            failed=self.failed,
            calls_ok=self.calls_ok,
            recent_hit_rate=cached_tokens / prompt_tokens if prompt_tokens else None,
            recent_ttft_s=ttfts[len(ttfts) // 2] if ttfts else None,
        )

    async def replay(
        self, planned: PlannedSession, *, skip_tools: bool = False, unloaded_s: float | None = None
    ) -> SessionRecord:
        """Replay one session from its first call on. However it ends, by cancellation too, it is recorded."""
        self.opened += 1
        self._waiting.add(planned.uid)
        outcome: SessionOutcome = "unfinished"
        calls_done = 0
        prompt = self._new_prompt(planned)
        opened = OpenedRecord(
            uid=planned.uid,
            trace_id=planned.session.trace_id,
            arrival_at_s=round(planned.arrival_s, 4),
            counted=planned.counted,
            calls_planned=len(planned.session.calls),
            peak_tokens=planned.session.peak_tokens,
            unloaded_s=unloaded_s,
        )
        self._writer.opened(opened)
        try:
            for index, call in enumerate(planned.session.calls):
                record = await self._call(planned, prompt, index, call)
                if record.outcome != "ok":
                    outcome = _SESSION_OUTCOMES[record.outcome]
                    break
                calls_done += 1
                if call.tool_s and not skip_tools:
                    await asyncio.sleep(call.tool_s)
            else:
                outcome = "finished"
        finally:
            session = opened.ended(round(self.now_s(), 4), outcome, calls_done)
            self._waiting.discard(planned.uid)
            self.ended += 1
            self.finished += outcome == "finished"
            self.failed += outcome not in ("finished", "unfinished")
            self._writer.session(session)
        return session

    def _new_prompt(self, planned: PlannedSession) -> TokenPrompt | ChatPrompt:
        shared_tokens = planned.session.shared_prefix_tokens
        if self._settings.endpoint == "chat":
            return ChatPrompt(
                seed=self._seed, trace_name=self._trace_name, uid=planned.uid, shared_prefix_tokens=shared_tokens
            )
        return TokenPrompt(
            seed=self._seed,
            trace_name=self._trace_name,
            uid=planned.uid,
            shared_prefix_tokens=shared_tokens,
            token_ids=self._settings.token_ids,
        )

    def _body(self, planned: PlannedSession, prompt: TokenPrompt | ChatPrompt, call: Call, last: bool) -> bytes:
        body: dict[str, Any] = {"stream": True, "session_id": planned.uid}
        if last and self._settings.announce_end:
            body["metadata"] = {END_FIELD: "true"}
        if isinstance(prompt, TokenPrompt):
            body["input_ids"] = prompt.next(call).tolist()
            body["sampling_params"] = {
                "max_new_tokens": call.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
        else:
            body |= {
                "model": self._settings.model,
                "messages": prompt.next(call),
                "max_tokens": call.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        return msgspec.json.encode(body)

    async def _call(
        self, planned: PlannedSession, prompt: TokenPrompt | ChatPrompt, index: int, call: Call
    ) -> CallRecord:
        """One call with its retries. Each attempt is recorded; the last one is returned."""
        body = self._body(planned, prompt, call, last=index == len(planned.session.calls) - 1)
        due_at_s = self.now_s() if index else planned.arrival_s
        for attempt in range(self._settings.retries + 1):
            record = CallRecord(
                uid=planned.uid,
                call=index,
                attempt=attempt,
                due_at_s=round(due_at_s, 4),
                sent_at_s=round(self.now_s(), 4),
                end_at_s=0.0,
                planned_prompt_tokens=call.prompt_tokens,
                planned_cached_tokens=call.cached_prefix_tokens if index else planned.session.shared_prefix_tokens,
                planned_output_tokens=call.output_tokens,
                outcome="cancelled",
            )
            record = await self._attempt(record, body, prompt)
            wait_s = retry_wait_s(record) if attempt < self._settings.retries else None
            self._note(msgspec.structs.replace(record, retried=wait_s is not None))
            if wait_s is None:
                break
            await asyncio.sleep(wait_s)
        return record

    def _note(self, record: CallRecord) -> None:
        self._writer.call(record)
        if record.outcome == "ok":
            self.calls_ok += 1
            self._recent.append(record)

    async def _attempt(self, draft: CallRecord, body: bytes, prompt: TokenPrompt | ChatPrompt) -> CallRecord:
        """Send one request and read its answer to the end. Never raises, except CancelledError after recording."""
        answer = ChatAnswer() if isinstance(prompt, ChatPrompt) else GenerateAnswer()
        arrivals: list[tuple[float, int]] = []
        outcome: CallOutcome = "ok"
        failure: Failure | None = None
        deadline = asyncio.timeout(self._settings.call_timeout_s)
        try:
            async with deadline:
                failure = await self._exchange(draft.uid, body, answer, arrivals)
        except asyncio.CancelledError:
            self._note(self._complete(draft, answer, arrivals, "cancelled", None))
            raise
        except TimeoutError as error:
            if deadline.expired():
                outcome, failure = "timeout", Failure(f"no end after {self._settings.call_timeout_s:g} s")
            else:  # aiohttp's own: the connection could not be made in time
                outcome, failure = "dropped", Failure(str(error) or "connecting timed out")
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            outcome, failure = "dropped", Failure(f"{type(error).__name__}: {error}")
        except ProtocolError as error:
            outcome, failure = "error", Failure(str(error))
        else:
            outcome = _judge(failure or answer.failure, answer.finished, bool(arrivals))
            failure = failure or answer.failure or (Failure("the stream ended early") if outcome != "ok" else None)
        if outcome == "ok":
            if isinstance(answer, GenerateAnswer) and isinstance(prompt, TokenPrompt):
                prompt.received(answer.output_ids)
            elif isinstance(answer, ChatAnswer) and isinstance(prompt, ChatPrompt):
                known = answer.prompt_tokens if answer.prompt_tokens is not None else draft.planned_prompt_tokens
                prompt.received(answer.text, known, answer.output_tokens)
        return self._complete(draft, answer, arrivals, outcome, failure)

    async def _exchange(
        self, uid: str, body: bytes, answer: GenerateAnswer | ChatAnswer, arrivals: list[tuple[float, int]]
    ) -> Failure | None:
        """POST and stream. `arrivals` gets (seconds since start, tokens) for each read that brought tokens."""
        headers = {name: uid for name in self._settings.session_headers}
        async with self._http.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                return await _read_failure(response)
            async for chunk in response.content.iter_any():
                if tokens := answer.feed(chunk):
                    arrivals.append((self.now_s(), tokens))
                    self._waiting.discard(uid)
        return None

    def _complete(
        self,
        draft: CallRecord,
        answer: GenerateAnswer | ChatAnswer,
        arrivals: list[tuple[float, int]],
        outcome: CallOutcome,
        failure: Failure | None,
    ) -> CallRecord:
        steps = [(tokens, round(at_s - before_s, 5)) for (before_s, _), (at_s, tokens) in itertools.pairwise(arrivals)]
        return msgspec.structs.replace(
            draft,
            first_token_at_s=round(arrivals[0][0], 4) if arrivals else None,
            end_at_s=round(self.now_s(), 4),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            steps=steps,
            outcome=outcome,
            status=failure.status if failure else None,
            retry_after_s=failure.retry_after_s if failure else None,
            error=failure.message if failure else None,
        )


def _judge(failure: Failure | None, finished: bool, any_token: bool) -> CallOutcome:
    """The outcome of an answer that was read to its end."""
    if failure is None:
        return "ok" if finished else "dropped"
    if failure.status in REJECTING_STATUS and not any_token:
        return "rejected"
    return "aborted" if failure.aborted or any_token else "error"


async def _read_failure(response: aiohttp.ClientResponse) -> Failure:
    text = await response.content.read(MAX_ERROR_BODY_BYTES)
    try:
        failure = failure_of(msgspec.json.decode(text), response.status)
    except (msgspec.DecodeError, UnicodeDecodeError):
        failure = failure_of(text.decode("utf-8", "replace") or response.reason, response.status)
    retry_after_s = failure.retry_after_s
    with contextlib.suppress(KeyError, ValueError):  # absent, or the date form
        retry_after_s = max(0.0, float(response.headers["Retry-After"]))
    return Failure(failure.message, response.status, retry_after_s, failure.aborted)


# ---- A whole run ---------------------------------------------------------------------------------------------------


async def check_server(url: str, timeout_s: float = 10.0) -> None:
    """Raise ServerError unless something answers HTTP at `url`."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http,
            http.get(url.rstrip("/") + "/health"),
        ):
            return
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ServerError(f"--url {url}: no HTTP server answers there ({error or type(error).__name__})") from None


async def served_model(url: str, timeout_s: float = 10.0) -> str:
    """The first model that `/v1/models` lists. Raises ServerError when there is none."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http,
            http.get(url.rstrip("/") + "/v1/models") as response,
        ):
            listed = msgspec.json.decode(await response.content.read(MAX_ERROR_BODY_BYTES))
        return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ServerError(f"--url {url}: /v1/models names no model ({error!r}); give one with --model") from None


def describe_run(plan: Plan, settings: DriveSettings, note: Mapping[str, Any] | None = None) -> RunRecord:
    """The run's first record."""
    profile = plan.profile
    return RunRecord(
        trace=plan.trace_name,
        seed=plan.seed,
        process=profile.process,
        rate_per_s=profile.rate_per_s,
        duration_s=profile.duration_s,
        tail_s=profile.tail_s,
        surge=dataclasses.astuple(profile.surge) if profile.surge else None,
        endpoint=settings.endpoint,
        planned_sessions=len(plan.sessions),
        started_at_unix_s=round(time.time(), 3),
        settings=dict(note or {}),
    )


async def run(
    plan: Plan,
    url: str,
    *,
    settings: DriveSettings | None = None,
    unloaded_s: Mapping[str, float] | None = None,
    records_path: Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    progress_every_s: float = 1.0,
    stop: asyncio.Event | None = None,
    note: Mapping[str, Any] | None = None,
) -> RunResult:
    """Replay a plan against the server at `url`.

    `unloaded_s` gives each trace session's unloaded time and is stamped on the session records. `stop` ends the run
    early (Ctrl-C); the result is then marked interrupted. `note` is kept in the run's record as it is.
    """
    settings = settings or DriveSettings()
    end_s = plan.profile.end_s + settings.drain_s
    writer = RecordWriter(describe_run(plan, settings, note), records_path)
    driver = Driver(url, settings, writer, seed=plan.seed, trace_name=plan.trace_name)
    stopped = stop or asyncio.Event()
    with writer:
        async with driver:
            opener = asyncio.create_task(_open_sessions(driver, plan, unloaded_s or {}))
            watcher = asyncio.create_task(_watch(driver, plan, end_s, on_progress, progress_every_s))
            stopper = asyncio.create_task(stopped.wait())
            try:
                left_s = end_s - driver.now_s()
                done, _ = await asyncio.wait(
                    (opener, watcher, stopper), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()  # a bug must not pass for the end of the run
            finally:
                elapsed_s = driver.now_s()
                for task in (opener, watcher, stopper):
                    task.cancel()
                await asyncio.gather(opener, watcher, stopper, return_exceptions=True)
            if on_progress:
                on_progress(driver.progress(plan, end_s))
        writer.end(round(elapsed_s, 4), stopped.is_set())
    return writer.result


async def _open_sessions(driver: Driver, plan: Plan, unloaded_s: Mapping[str, float]) -> None:
    """Open each session at its arrival; ends when the last one has ended. Cancelled, it ends those still open."""
    async with asyncio.TaskGroup() as sessions:
        for planned in plan.sessions:
            await asyncio.sleep(planned.arrival_s - driver.now_s())
            sessions.create_task(driver.replay(planned, unloaded_s=unloaded_s.get(planned.session.trace_id)))


async def _watch(
    driver: Driver, plan: Plan, end_s: float, show: Callable[[Progress], None] | None, every_s: float
) -> None:
    """Show the progress again and again, until cancelled."""
    while True:
        if show is not None:
            show(driver.progress(plan, end_s))
        await asyncio.sleep(every_s)
