"""Recorded agent sessions: the trace file, its checks, and scaling to small machines.

A trace is JSON lines (`.jsonl`, or gzip of it), one session a line. Only numbers are read: per call the prompt,
cached-prefix and output tokens and the tool wait that followed. Fields this package does not know are skipped, so
traces may carry more (task text, where the run came from).

Where to read on: `plan` draws sessions from a trace, `prompts` turns a session's numbers into token ids.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec

MAX_LINE_BYTES = 32 * 2**20
MAX_FILE_BYTES = 2 * 2**30
"""Of the decompressed file: a small gzip must not fill the disk or the memory."""


class TraceError(ValueError):
    """A trace that cannot be used; the message names the file, the line and the field."""


# ---- The file's own form -------------------------------------------------------------------------------------------

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=10_000_000)]


class _RecordedCall(msgspec.Struct, frozen=True):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
    output_tokens: _Tokens
    cached_prefix_tokens: _Tokens = 0
    tool_s: _Seconds | None = None
    gap_s: _Seconds | None = None
    gen_s: _Seconds | None = None


class _RecordedSession(msgspec.Struct, frozen=True):
    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    calls: Annotated[list[_RecordedCall], msgspec.Meta(min_length=1, max_length=100_000)]
    shared_prefix_tokens: _Tokens = 0


_decoder = msgspec.json.Decoder(_RecordedSession)


# ---- What the rest of the package works with -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One model call. `cached_prefix_tokens` of the prompt's first tokens equal the previous prompt + output."""

    prompt_tokens: int
    cached_prefix_tokens: int
    output_tokens: int
    tool_s: float
    """Seconds from the end of this call to the start of the next one; 0 after the last call."""

    @property
    def context_tokens(self) -> int:
        """The session's context once this call has ended."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Session:
    """A recorded session. `shared_prefix_tokens` of its first prompt are the same for all sessions of the trace."""

    trace_id: str
    calls: tuple[Call, ...]
    shared_prefix_tokens: int = 0

    @property
    def peak_tokens(self) -> int:
        return max(call.context_tokens for call in self.calls)

    @property
    def tool_s(self) -> float:
        return math.fsum(call.tool_s for call in self.calls)


def _tool_wait_s(call: _RecordedCall) -> float:
    """The recorded wait. Where only the gap between two calls' starts is known, that gap less the generation: an
    upper bound when the generation time was not recorded either."""
    if call.tool_s is not None:
        return call.tool_s
    return max(0.0, (call.gap_s or 0.0) - (call.gen_s or 0.0))


def _session(recorded: _RecordedSession) -> Session:
    """Check what a schema cannot say. Raises ValueError that names the call."""
    calls: list[Call] = []
    context_tokens = 0
    for index, call in enumerate(recorded.calls):
        if call.cached_prefix_tokens > min(context_tokens, call.prompt_tokens):
            raise ValueError(
                f"calls[{index}].cached_prefix_tokens is {call.cached_prefix_tokens}, more than its prompt "
                f"({call.prompt_tokens}) or the previous prompt + output ({context_tokens}) holds"
            )
        last = index == len(recorded.calls) - 1
        calls.append(
            Call(
                prompt_tokens=call.prompt_tokens,
                cached_prefix_tokens=call.cached_prefix_tokens,
                output_tokens=max(1, call.output_tokens),
                tool_s=0.0 if last else _tool_wait_s(call),
            )
        )
        context_tokens = calls[-1].context_tokens
    return Session(recorded.session_id, tuple(calls), recorded.shared_prefix_tokens)


# ---- Reading -------------------------------------------------------------------------------------------------------


def shipped_traces() -> dict[str, Path]:
    """The traces inside this package by bare name."""
    folder = Path(str(resources.files("sglang_basin.replay") / "data"))
    return {path.name.removesuffix(".jsonl.gz"): path for path in sorted(folder.glob("*.jsonl.gz"))}


def find_trace(name: str) -> Path:
    """A file path, or the bare name of a shipped trace. Raises TraceError when it is neither."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_traces()
    if name in shipped:
        return shipped[name]
    raise TraceError(f"no trace {name!r}: neither a file nor one of the shipped traces ({', '.join(shipped)})")


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    read_bytes = 0
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        read_bytes += len(line)
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{path}:{number}: the line is longer than {MAX_LINE_BYTES:,} bytes")
        if read_bytes > MAX_FILE_BYTES:
            raise TraceError(f"{path}:{number}: the trace is larger than {MAX_FILE_BYTES:,} bytes")
        if line.strip():
            yield number, line


def read_trace(path: Path) -> list[Session]:
    """All sessions of a file, in its order. Raises TraceError with the file and, where there is one, the line."""
    sessions: list[Session] = []
    seen: dict[str, int] = {}
    number = 0
    try:
        with cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as file:
            for number, line in _lines(file, path):
                session = _session(_decoder.decode(line))
                if (first := seen.setdefault(session.trace_id, number)) != number:
                    raise ValueError(f"session_id {session.trace_id!r} was already on line {first}")
                sessions.append(session)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: broken gzip after line {number} ({error})") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except TraceError:
        raise
    except (msgspec.DecodeError, ValueError) as error:  # also wrong UTF-8 and a field of the wrong type
        raise TraceError(f"{path}:{number}: {error}") from None
    if not sessions:
        raise TraceError(f"{path}: no session in it")
    return sessions


# ---- Scaling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How recorded sessions shrink (or grow). The caps apply to the scaled numbers."""

    tokens: float = 1.0
    time: float = 1.0
    max_calls: int | None = None
    tool_cap_s: float | None = None
    max_context_tokens: int | None = None
    """A session ends before the first call whose prompt + output would be longer."""

    def __post_init__(self) -> None:
        for name in ("tokens", "time"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"scaling of {name} must be positive, got {getattr(self, name)!r}")
        if self.max_calls is not None and self.max_calls < 1:
            raise ValueError(f"max_calls must be at least 1, got {self.max_calls!r}")
        if self.tool_cap_s is not None and self.tool_cap_s < 0:
            raise ValueError(f"tool_cap_s must not be negative, got {self.tool_cap_s!r}")


def _scaled_prefix(recorded_tokens: int, before: Call, scaled: Call, factor: float) -> int:
    """The cached prefix on the scaled context. The ends of the previous prompt and of its output are kept exactly:
    a prompt that extended the whole context still does so after rounding."""
    if recorded_tokens <= before.prompt_tokens:
        at_end = recorded_tokens == before.prompt_tokens
        return scaled.prompt_tokens if at_end else min(round(recorded_tokens * factor), scaled.prompt_tokens)
    into_output = recorded_tokens - before.prompt_tokens
    if into_output == before.output_tokens:
        return scaled.context_tokens
    return scaled.prompt_tokens + min(round(into_output * factor), scaled.output_tokens)


def scale_session(session: Session, scaling: Scaling) -> Session | None:
    """The session as it will be replayed, or None when not even its first call fits `max_context_tokens`.

    The ends of prompts and outputs follow `factor × recorded` in absolute terms, so rounding does not add up over the
    calls; each output has at least one token, and a prompt that grew still grows by at least one.
    """
    calls: list[Call] = []
    cap_s = math.inf if scaling.tool_cap_s is None else scaling.tool_cap_s
    for index, call in enumerate(session.calls[: scaling.max_calls]):
        cached_tokens = 0
        if index:
            cached_tokens = _scaled_prefix(
                call.cached_prefix_tokens, session.calls[index - 1], calls[-1], scaling.tokens
            )
        grew = call.prompt_tokens > call.cached_prefix_tokens
        prompt_tokens = max(round(call.prompt_tokens * scaling.tokens), cached_tokens + grew, 1)
        scaled = Call(
            prompt_tokens=prompt_tokens,
            cached_prefix_tokens=cached_tokens,
            output_tokens=max(1, round(call.context_tokens * scaling.tokens) - prompt_tokens),
            tool_s=min(call.tool_s * scaling.time, cap_s),
        )
        if scaling.max_context_tokens is not None and scaled.context_tokens > scaling.max_context_tokens:
            break
        calls.append(scaled)
    if not calls:
        return None
    calls[-1] = replace(calls[-1], tool_s=0.0)
    shared_tokens = min(round(session.shared_prefix_tokens * scaling.tokens), calls[0].prompt_tokens)
    return Session(session.trace_id, tuple(calls), shared_tokens)


def scale_trace(sessions: Sequence[Session], scaling: Scaling) -> list[Session]:
    """All sessions scaled. Raises TraceError when none of them fits."""
    scaled = [made for session in sessions if (made := scale_session(session, scaling)) is not None]
    if not scaled:
        raise TraceError(f"no session has a first call of at most {scaling.max_context_tokens} tokens")
    return scaled
