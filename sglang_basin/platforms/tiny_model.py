"""Tiny random models that a CPU serves at an agent's pace: Qwen3's architecture, with a tokenizer and chat template.

    python -m sglang_basin.platforms.tiny_model --hidden 640 --layers 5

prints the folder of a model that SGLang (and transformers) loads like any other. Models live in a cache folder under
a hash of everything that decides their bytes, so asking twice builds once. The same `ModelSpec` gives the same
bytes, whichever process builds it.

The weights are random, yet not noise for a scheduler: attention is sharp enough that the answer depends on tokens a
long way back, so a wrong page of KV shows in the output. The head never prefers a special token or half a UTF-8
character, hence greedy answers run to their `max_tokens` and stream smoothly.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import safetensors
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Dtype = Literal["bfloat16", "float32"]

FORMAT = 1
"""Raise when the same spec shall give other bytes: cached models of the old format are then left alone."""

HEAD_DIM = 64
MAX_POSITIONS = 131_072

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- elif message.content %}
{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""ChatML. A longer conversation renders to an extension of the shorter one, so each call's prompt is a prefix hit."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that decides a model's bytes. Raises ValueError naming the field that cannot be built.

    `heads` and `kv_heads` left at None become one head per 64 hidden units (at least four) and half as many KV heads
    (as many where the heads are odd).
    """

    hidden: int
    layers: int
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int = 2048
    dtype: Dtype = "bfloat16"
    seed: int = 7

    def __post_init__(self) -> None:
        self._check("hidden", 64, 8192)
        if self.heads is None:
            object.__setattr__(self, "heads", max(4, self.hidden // HEAD_DIM))
        self._check("heads", 1, 128)
        assert self.heads is not None
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads // 2 if self.heads % 2 == 0 else self.heads)
        self._check("kv_heads", 1, 128)
        assert self.kv_heads is not None
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: must divide heads ({self.heads}), got {self.kv_heads}")
        self._check("layers", 1, 128)
        self._check("vocab", 512, 3072)  # the training text yields some 3,200 tokens
        self._check("seed", 0, 2**63 - 1)
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype: must be one of {', '.join(get_args(Dtype))}, got {self.dtype!r}")

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name}: must be a whole number from {low} to {high}, got {value!r}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head: 64 unless the model is too narrow for that."""
        assert self.heads is not None
        return min(HEAD_DIM, max(16, self.hidden // self.heads))

    @property
    def kv_bytes_per_token(self) -> int:
        """What one token occupies in a KV pool of the model's own dtype, over all layers."""
        assert self.kv_heads is not None
        return 2 * self.layers * self.kv_heads * self.head_dim * (2 if self.dtype == "bfloat16" else 4)

    def name(self) -> str:
        """The model's folder name in the cache: legible, and unique for its bytes."""
        facts = {**dataclasses.asdict(self), "format": FORMAT, "template": CHAT_TEMPLATE}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + _corpus().encode())
        kind = "bf16" if self.dtype == "bfloat16" else "f32"
        return f"tiny-qwen3-h{self.hidden}-l{self.layers}-{kind}-{digest.hexdigest()[:12]}"


CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


def fast_dtype(cpu_info: Path = CPU_INFO) -> Dtype:
    """bfloat16 where this CPU multiplies it by itself, else float32, in which torch's products are then five times as
    fast (31 against 172 GFLOPS on a core with AVX-512 and neither of `BFLOAT16_FLAGS`)."""
    try:
        words = set(cpu_info.read_text().split())
    except OSError:
        return "float32"
    return "bfloat16" if words & BFLOAT16_FLAGS else "float32"


def cache_folder() -> Path:
    """Where built models live: `basin` under `$XDG_CACHE_HOME`, or under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "basin"


def build(spec: ModelSpec, out: Path | None = None) -> Path:
    """The folder of this model, built if it is not there yet.

    `out` names the folder instead of the cache; it must not exist or be empty (FileExistsError otherwise). The
    folder appears whole or not at all, also when several processes build the same model at once. Raises OSError
    when the disk refuses.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"--out {out}: exists and is not an empty folder; name another one")
    final = out if out is not None else cache_folder() / spec.name()
    if out is None and final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        _write(spec, scratch)
        for path in (scratch, *scratch.iterdir()):  # mkdtemp and safetensors write for the owner alone
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            scratch.rename(final)
        except OSError:
            if out is not None or not final.is_dir():
                raise
            # Another process finished the same bytes first.
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _write(spec: ModelSpec, folder: Path) -> None:
    tokenizer = train_tokenizer(spec.vocab)
    end_id = tokenizer.get_vocab()[TURN_END]
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_json(folder / "config.json", _model_config(spec, end_id))
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end_id})
    _write_weights(folder / "model.safetensors", spec, _unwanted_ids(tokenizer))


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _corpus() -> str:
    return resources.files(__package__).joinpath("corpus.txt").read_text(encoding="utf-8")


def train_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab` tokens, learned from the text that the package ships.

    Lossless for any text: each of the 256 bytes is a token. Raises ValueError when the text is too short for so many.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
    )
    tokenizer.train_from_iterator(_corpus().splitlines(keepends=True), trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"vocab: the training text yields only {tokenizer.get_vocab_size()} tokens, not {vocab}")
    return tokenizer


def _unwanted_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that the model shall not prefer: special ones, and those that are no whole UTF-8 text by themselves."""
    vocabulary = tokenizer.get_vocab()
    special = {vocabulary[token] for token in SPECIAL_TOKENS}
    broken = {i for i in range(tokenizer.get_vocab_size()) if "\ufffd" in tokenizer.decode([i])}
    return sorted(special | broken)


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": MAX_POSITIONS,
    }


def _model_config(spec: ModelSpec, end_id: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": end_id,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": 2 * spec.hidden,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": spec.dtype,
        "use_cache": True,
        "vocab_size": spec.vocab,
    }


def _tensors(spec: ModelSpec, unwanted_ids: Sequence[int]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Name and value of each weight, in a fixed order: one generator feeds them all."""
    # numpy's generators are specified bit for bit; torch's differ between CPUs and versions.
    generator = np.random.Generator(np.random.PCG64(spec.seed))
    assert spec.heads is not None
    assert spec.kv_heads is not None
    hidden, query, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def normal(rows: int, columns: int, std: float) -> npt.NDArray[np.float32]:
        return generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)

    def constant(size: int, value: float) -> npt.NDArray[np.float32]:
        return np.full(size, value, dtype=np.float32)

    yield "model.embed_tokens.weight", normal(spec.vocab, hidden, 1.0)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", constant(hidden, 1.0)
        # Twice the usual norm: attention scores get a standard deviation of about four, so a few tokens stand out
        # of thousands and each answer depends on what they were.
        yield prefix + "self_attn.q_norm.weight", constant(spec.head_dim, 2.0 * (HEAD_DIM / spec.head_dim) ** 0.25)
        yield prefix + "self_attn.k_norm.weight", constant(spec.head_dim, 2.0 * (HEAD_DIM / spec.head_dim) ** 0.25)
        yield prefix + "self_attn.q_proj.weight", normal(query, hidden, hidden**-0.5)
        yield prefix + "self_attn.k_proj.weight", normal(kv, hidden, hidden**-0.5)
        yield prefix + "self_attn.v_proj.weight", normal(kv, hidden, 2 * hidden**-0.5)
        yield prefix + "self_attn.o_proj.weight", normal(hidden, query, 2 * query**-0.5)
        yield prefix + "post_attention_layernorm.weight", constant(hidden, 1.0)
        yield prefix + "mlp.gate_proj.weight", normal(2 * hidden, hidden, hidden**-0.5)
        yield prefix + "mlp.up_proj.weight", normal(2 * hidden, hidden, hidden**-0.5)
        yield prefix + "mlp.down_proj.weight", normal(hidden, 2 * hidden, (2 * hidden) ** -0.5)
    yield "model.norm.weight", constant(hidden, 1.0)
    head = normal(spec.vocab, hidden, 2 * hidden**-0.5)
    head[list(unwanted_ids)] = 0.0  # logit 0, far below the best of the others
    yield "lm_head.weight", head


def _write_weights(path: Path, spec: ModelSpec, unwanted_ids: Sequence[int]) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for name, value in _tensors(spec, unwanted_ids):
        shapes[name] = value.shape
        arrays[name] = np.ascontiguousarray(_bfloat16_bits(value) if spec.dtype == "bfloat16" else value)
    views = {
        name: safetensors.TensorSpec(
            dtype=spec.dtype, shape=list(shapes[name]), data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in arrays.items()
    }
    safetensors.serialize_file(views, str(path), metadata={"format": "pt"})


def _bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The finite values rounded to bfloat16 (nearest, ties to even), as their bits: numpy lacks the type."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def main(argv: Sequence[str] | None = None) -> int:
    """Build one model and print its folder. Exit code 2 with a message naming the flag when it cannot be built."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_basin.platforms.tiny_model", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--hidden", type=int, required=True, help="width of the residual stream")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--heads", type=int, help="attention heads (default: one per 64 of --hidden, at least 4)")
    parser.add_argument("--kv-heads", type=int, help="KV heads, dividing --heads (default: half of them)")
    parser.add_argument("--vocab", type=int, default=2048, help="tokens known, 512 to 3072 (default: %(default)s)")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16", help="float32 for equality tests")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write here instead of the cache folder")
    values = vars(parser.parse_args(argv))
    out = values.pop("out")
    try:
        folder = build(ModelSpec(**values), out)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
