"""Our attention against SGLang's own, on the shapes that a server meets."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_basin.platforms import attention, cpu

SLOTS = 512
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}  # of values near 1; scores up to 30 amplify rounding


@st.composite
def batches(draw, new_tokens):
    """Requests of a batch: (prefix length, new length) each, heads, dtype, and the seed of all numbers."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 70), new_tokens), min_size=1, max_size=4))
    kv_heads = draw(st.integers(1, 4))
    return SimpleNamespace(
        prefix=[prefix for prefix, _ in lengths],
        new=[new for _, new in lengths],
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        scaling=draw(st.sampled_from([None, 0.125, 1.0])),
        seed=draw(st.integers(0, 2**31)),
    )


def tensors(batch):
    """Random caches, queries and page tables of a batch; slots are scattered and never shared."""
    generator = torch.Generator().manual_seed(batch.seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(batch.dtype)

    lengths = [prefix + new for prefix, new in zip(batch.prefix, batch.new, strict=True)]
    slots = torch.randperm(SLOTS, generator=generator)[: sum(lengths)].split(lengths)
    rows = torch.randperm(8, generator=generator)[: len(lengths)]
    table = torch.zeros(8, 256, dtype=torch.int32)
    for row, own in zip(rows.tolist(), slots, strict=True):
        table[row, : len(own)] = own
    return SimpleNamespace(
        query=normal(sum(batch.new), batch.heads, batch.head_dim),
        k_cache=normal(SLOTS, batch.kv_heads, batch.head_dim),
        v_cache=normal(SLOTS, batch.kv_heads, batch.head_dim),
        table=table,
        rows=rows,
        prefix=torch.tensor(batch.prefix),
        new=torch.tensor(batch.new),
        total=torch.tensor(lengths),
    )


def extend_arguments(t):
    output = torch.full_like(t.query, float("nan"))
    return (t.query, output, t.k_cache, t.v_cache, t.table, t.rows, t.total, t.prefix, t.new, None)


def decode_arguments(t):
    output = torch.full_like(t.query, float("nan"))
    return (t.query, output, t.k_cache, t.v_cache, t.table, t.rows, t.total, None)


def options(batch, causal, changes=()):
    return {
        "scaling": batch.scaling,
        "enable_gqa": batch.heads != batch.kv_heads,
        "causal": causal,
        "is_cross_attn": False,
        "sliding_window_size": None,
        **dict(changes),
    }


BACKEND = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)  # the two methods use no state
ORIGINAL_EXTEND = TorchNativeAttnBackend._run_sdpa_forward_extend
ORIGINAL_DECODE = TorchNativeAttnBackend._run_sdpa_forward_decode


@given(batch=batches(new_tokens=st.integers(1, 50)))
@settings(max_examples=150, deadline=None)
def test_extend_equals_the_original(batch):
    t = tensors(batch)
    expected = ORIGINAL_EXTEND(BACKEND, *extend_arguments(t), **options(batch, True))
    called = []
    actual = cpu._extend(lambda *a, **k: called.append(a), BACKEND, *extend_arguments(t), **options(batch, True))
    assert not called, "fell back to the original: the hook saves nothing"
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[batch.dtype], rtol=TOLERANCE[batch.dtype])


@given(batch=batches(new_tokens=st.just(1)))
@settings(max_examples=150, deadline=None)
def test_decode_equals_the_original(batch):
    t = tensors(batch)
    expected = ORIGINAL_DECODE(BACKEND, *decode_arguments(t), **options(batch, False))
    called = []
    actual = cpu._decode(lambda *a, **k: called.append(a), BACKEND, *decode_arguments(t), **options(batch, False))
    assert not called, "fell back to the original: the hook saves nothing"
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[batch.dtype], rtol=TOLERANCE[batch.dtype])


def test_a_prefix_hit_gives_the_bits_of_a_cold_run():
    """What the demo and the equality tests of lending rest on: cached or not, the same attention."""
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(300, 8, 64, generator=generator)
    caches = [torch.randn(SLOTS, 4, 64, generator=generator) for _ in range(2)]
    table = torch.randperm(SLOTS, generator=generator)[:300].unsqueeze(0)
    row = torch.tensor([0])

    def run(prefix):
        new = query[prefix:]
        lengths = torch.tensor([prefix]), torch.tensor([300 - prefix])
        return attention.extend(new, torch.empty_like(new), *caches, table, row, *lengths, None)

    cold = run(0)
    for prefix in (16, 144, 288, 299):
        torch.testing.assert_close(run(prefix), cold[prefix:], atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "change", [{"sliding_window_size": 64}, {"is_cross_attn": True}, {"causal": False}, {"a_new_option": 1}]
)
def test_anything_but_plain_decoder_attention_keeps_the_original(change):
    batch = SimpleNamespace(
        prefix=[4], new=[3], heads=2, kv_heads=2, head_dim=16, dtype=torch.float32, scaling=None, seed=0
    )
    arguments = extend_arguments(tensors(batch))
    assert cpu._extend(lambda *a, **k: "original", BACKEND, *arguments, **options(batch, True, change)) == "original"


def test_encoder_lengths_keep_the_original():
    batch = SimpleNamespace(
        prefix=[4], new=[1], heads=2, kv_heads=2, head_dim=16, dtype=torch.float32, scaling=None, seed=0
    )
    extend = (*extend_arguments(tensors(batch))[:-1], torch.tensor([2]))
    decode = (*decode_arguments(tensors(batch))[:-1], torch.tensor([2]))
    assert cpu._extend(lambda *a, **k: "original", BACKEND, *extend, **options(batch, True)) == "original"
    assert cpu._decode(lambda *a, **k: "original", BACKEND, *decode, **options(batch, False)) == "original"
