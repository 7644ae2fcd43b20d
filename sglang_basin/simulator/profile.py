"""Hardware profiles: what a deployment consists of and what its work costs. TOML files with their derivation.

The costs of one call are plain formulas, used by the instances while they simulate and by `HardwareProfile.unloaded_s`
for the yardstick of goodput. A lone session in the simulator takes exactly its unloaded time (a test holds this).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sglang_basin.replay.trace import Session

Tokens = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
SomeTokens = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10_000)]
TokensPerSecond = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

MAX_FILE_BYTES = 2**20


class ProfileError(ValueError):
    """A profile that cannot be used; the message names the file and the field."""


class PrefillProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill instances. A forward pass of new tokens i with c_i tokens before them takes

    `fixed_s` + `per_token_s` · Σ new_i + `attention_s` · Σ new_i · (c_i + new_i / 2).
    """

    instances: Count = 1
    pool_tokens: SomeTokens
    chunk_tokens: SomeTokens = 8192
    """New tokens of one forward pass at most."""
    fixed_s: Seconds
    per_token_s: Seconds
    attention_s: Seconds = 0.0
    """Per pair of a new token and a token that it attends to."""
    host_tokens: Tokens = 0
    """The host tier, write-through as SGLang's default: it holds what the device pool holds too. 0 for none."""
    host_load_tokens_per_s: TokensPerSecond = 1e6


class DecodeProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decode instances. A step takes `step_s` + `per_sequence_s` · sequences + `per_context_token_s` · Σ context."""

    instances: Count = 1
    pool_tokens: SomeTokens
    step_s: Annotated[float, msgspec.Meta(gt=0, le=100)]
    per_sequence_s: Seconds = 0.0
    per_context_token_s: Seconds = 0.0
    max_running: Count = 256
    reserve_tokens: Tokens = 512
    """Room kept for the output of each call that runs or is about to (SGLang's `num_reserved_decode_tokens`)."""
    allocation: Literal["early", "late"] = "early"
    """When a call's decode memory is reserved: before its prefill starts (SGLang's default), or after it ended."""
    lend: bool = False
    """Keep finished calls' KV in memory that running calls do not need, and write it back to prefill."""
    lend_share: Share = 0.5
    """Of the pool, at most."""
    resume_tokens_per_s: TokensPerSecond = 1e6
    """A retracted call's KV comes back from the host at this rate."""


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between prefill and decode."""

    fixed_s: Seconds
    """Per call, all that occupies neither side: the router, tokenising, bootstrap and hand-over."""
    tokens_per_s: TokensPerSecond
    """KV from prefill to decode. The KV of all chunks but the last goes out while the next one is computed."""
    write_back_tokens_per_s: TokensPerSecond
    """Lent KV from decode to prefill, overlapped with the computation of the rest."""


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment. `derivation` says where its numbers come from."""

    name: str
    derivation: str
    page_tokens: SomeTokens = 64
    prefill: PrefillProfile
    decode: DecodeProfile
    link: LinkProfile

    def __post_init__(self) -> None:
        page = self.page_tokens
        for field, tokens in (
            ("prefill.pool_tokens", self.prefill.pool_tokens),
            ("prefill.host_tokens", self.prefill.host_tokens),
            ("decode.pool_tokens", self.decode.pool_tokens),
        ):
            if tokens % page:
                raise ValueError(f"{field}: must be whole pages of {page} tokens, got {tokens}")

    @property
    def lendable_tokens(self) -> int:
        """The most that all decode instances together may keep of finished calls."""
        decode = self.decode
        return int(decode.pool_tokens * decode.lend_share) * decode.instances if decode.lend else 0

    @property
    def capacity_tokens(self) -> int:
        """Distinct tokens that one prefill instance can get back without computing them, at most."""
        prefill = self.prefill
        return max(prefill.pool_tokens, prefill.host_tokens) + self.lendable_tokens // prefill.instances

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Prefill alone: all forward passes of `new_tokens` after `cached_tokens`."""
        prefill = self.prefill
        passes = -(-new_tokens // prefill.chunk_tokens)
        pairs = new_tokens * (cached_tokens + 0.5 * new_tokens)
        return passes * prefill.fixed_s + prefill.per_token_s * new_tokens + prefill.attention_s * pairs

    def transfer_s(self, new_tokens: int, sent_tokens: int) -> float:
        """From the last pass's end to the first token on decode; `sent_tokens` of the prompt were not there yet."""
        chunk = self.prefill.chunk_tokens
        left = sent_tokens
        if new_tokens > chunk:
            passes = -(-new_tokens // chunk)
            left = min(sent_tokens, new_tokens - (passes - 1) * chunk)
        return self.link.fixed_s + left / self.link.tokens_per_s

    def decode_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Decode alone: the steps after the first token."""
        decode, steps = self.decode, output_tokens - 1
        first_s = decode.step_s + decode.per_sequence_s + decode.per_context_token_s * (prompt_tokens + 1)
        return steps * first_s + decode.per_context_token_s * (steps * (steps - 1) // 2)

    def call_s(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """One call on the idle deployment, with `cached_tokens` of its prompt in prefill's cache (whole pages)."""
        new_tokens = prompt_tokens - cached_tokens
        return (
            self.prefill_s(new_tokens, cached_tokens)
            + self.transfer_s(new_tokens, prompt_tokens)
            + self.decode_s(prompt_tokens, output_tokens)
        )

    def unloaded_s(self, session: Session) -> float:
        """A session on the idle deployment without lending, tool waits included.

        Prefill's cache holds the earlier prompts but no outputs: their KV was made on decode.
        """
        total_s = 0.0
        before_tokens = session.shared_prefix_tokens
        for index, call in enumerate(session.calls):
            known = call.cached_prefix_tokens if index else session.shared_prefix_tokens
            cached = min(known, before_tokens, call.prompt_tokens - 1) // self.page_tokens * self.page_tokens
            total_s += self.call_s(call.prompt_tokens, cached, call.output_tokens) + call.tool_s
            before_tokens = call.prompt_tokens
        return total_s

    def saturated_tokens_per_s(self, prompt_tokens: int) -> float:
        """What one prefill instance computes a second when nothing of such prompts is cached."""
        return prompt_tokens / self.prefill_s(prompt_tokens, 0)

    def changed(self, settings: dict[str, str]) -> HardwareProfile:
        """The profile with `section.field` (or `page_tokens`) set from text. Raises ProfileError."""
        if not settings:
            return self
        raw = msgspec.to_builtins(self)
        for key, text in settings.items():
            section, _, field = key.rpartition(".")
            table = raw.get(section) if section else raw
            if not isinstance(table, dict) or field not in table or isinstance(table[field], dict):
                raise ProfileError(f"profile has no field {key!r}; fields: {', '.join(sorted(_fields(raw)))}")
            table[field] = text
        try:
            return msgspec.convert(raw, HardwareProfile, strict=False)
        except msgspec.ValidationError as error:
            raise ProfileError(f"profile: {error}") from None


def _fields(raw: dict[str, object]) -> list[str]:
    named = []
    for key, value in raw.items():
        named += [f"{key}.{field}" for field in value] if isinstance(value, dict) else [key]
    return named


def shipped_profiles() -> dict[str, Path]:
    """The profiles inside this package by name."""
    folder = Path(str(resources.files("sglang_basin.simulator") / "profiles"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_profile(name: str) -> HardwareProfile:
    """A TOML file's path or the name of a shipped profile. Raises ProfileError."""
    shipped = shipped_profiles()
    path = shipped.get(name, Path(name))
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ProfileError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes")
        return msgspec.toml.decode(path.read_bytes(), type=HardwareProfile)
    except FileNotFoundError:
        known = ", ".join(shipped)
        raise ProfileError(f"no profile {name!r}: neither a file nor one of the shipped profiles ({known})") from None
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ProfileError(f"{path}: {error}") from None
