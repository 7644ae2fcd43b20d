"""Lending: decode keeps finished calls' KV in memory it does not need, prefill gets back what its own cache lost.

Decode's radix cache keeps the pages (`decode`), the metadata message that decode sends for every call carries where the
call's prefix lies there (`pages`), and prefill's scheduler (`borrower`) has a thread (`pull`) read what its cache
lacks, layer by layer (`transport`), into slots of its own, once its pool has room for the whole call (`seats`). When
the call has landed on another decode than the one that keeps most of its session, prefill asks that one: decode reports
with each call's end how much it keeps of it, and later when that becomes less (`holdings` there, `copies` here),
prefill asks with the prompt itself (`questions`), and decode answers with a lease, pages that it keeps locked for a
time (`leases`). These travel over the control channel, and what all ranks must know goes to them from rank 0 with the
requests (`ranks`).

From a decode of its own machine prefill reads by `peer`: decode's registration message carries how its buffers are
mapped (`buffers`, by `cuda_memory`), and `places` and `nvml` tell whether that can be.

`worth` and `breaker` decide, and are pure. `prefill` and `decode` are the hooks' own code, `attach` puts them in place,
`calls` is what is remembered about one call; the table of hooks is `engine.hooks`.

Models with state beside attention's KV (`prefill.unsupported`) keep admission and order; lending is off for them. What
their state would take, with the places in SGLang 0.5.23 (`mem_cache/unified_cache/components`, `disaggregation`):

- The state belongs to one point of the prompt. A tree node has at most one SSM state, valid at its end
  (`components/mamba.py`), and a sliding window only near its end (`swa.py`), so a part must end at a node of decode's
  tree that has both. `pages` would carry the state slot and the window's pages along with that length.
- The buffers are registered already for the ordinary transfer: `kv_args.state_data_ptrs` and `state_item_lens` here,
  `KVArgsRegisterInfo.dst_state_data_ptrs` and `dst_state_item_lens` there. `transport` would read those too; the
  layers' order is `dst_state_layer_ids`.
- Prefill allocates a state slot (`req_to_token_pool.mamba_allocator`) or window slots, and hands them to the call as
  `update_external_linker_load` of each component does for SGLang's own external cache; the match result carries
  `mamba_host_hit_length` or `swa_host_hit_length`. When the part joins the tree, `InsertParams.mamba_value` and
  `component_evicted_seqlens` go with it.
- A forward then waits for a layer's state as well: these pools ask the same layer counter (`mamba2_layer_index`).
"""
