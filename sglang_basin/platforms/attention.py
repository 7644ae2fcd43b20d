"""Attention over a paged KV cache in plain torch, made for prefix hits and for decode on a few cores.

SGLang's `torch_native` backend computes attention for the cached rows of a prompt too and throws the result away,
so a full hit of 4,000 tokens costs most of a cold run; and under grouped-query attention its decode copies each KV
head once per query head. These two functions take the place of its `_run_sdpa_forward_extend` and
`_run_sdpa_forward_decode`, compute the new rows only and copy nothing twice. Numbers agree with the original to
within rounding, mostly bit for bit (`tests/platforms/test_attention.py`), so hits and cold runs agree too.

Shapes: query and output [tokens, heads, head size]; caches [slots, KV heads, head size]; req_to_token [requests,
longest context], slot of each token; the other tensors one number a request. All on the CPU.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def extend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention of each request's new tokens over its prefix and themselves. Writes and returns `output`."""
    start = 0
    for row, prefix, new in zip(
        req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
    ):
        slots = req_to_token[row, : prefix + new]
        keys = _rows(k_cache, slots, query.dtype)
        values = _rows(v_cache, slots, query.dtype)
        # Without a prefix the kernel skips the upper half; with one only a mask says where the diagonal lies. (Two
        # kernel calls joined by their log-sum-exp save a sixth at 1,000 new rows but no longer match a cold run.)
        mask = torch.ones(new, prefix + new, dtype=torch.bool).tril_(prefix) if prefix else None
        attended = scaled_dot_product_attention(
            query[start : start + new].movedim(0, 1).unsqueeze(0),
            keys.movedim(0, 1).unsqueeze(0),
            values.movedim(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != k_cache.shape[1],
        )
        output[start : start + new] = attended.squeeze(0).movedim(1, 0)
        start += new
    return output


def decode(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of each request's one new token over its whole context. Writes and returns `output`."""
    kv_heads = k_cache.shape[1]
    for token, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length]
        keys = _rows(k_cache, slots, query.dtype)
        values = _rows(v_cache, slots, query.dtype)
        # The query heads that share a KV head become its rows, so no KV head is repeated: six times faster in bf16.
        attended = scaled_dot_product_attention(
            query[token].view(1, kv_heads, -1, query.shape[2]),
            keys.movedim(0, 1).unsqueeze(0),
            values.movedim(0, 1).unsqueeze(0),
            scale=scaling,
        )
        output[token] = attended.view(query.shape[1], -1)
    return output


def _rows(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # index_select copies whole rows, several times faster than indexing with a tensor.
    return cache.index_select(0, slots).to(dtype)
