"""When the CPU platform is there at all, and the parts of it that need no engine."""

import zlib
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.disaggregation.checksum import KvChecksumComputer
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.platforms import _load_platform_class
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_basin.platforms import cpu, tiny_model
from sglang_basin.platforms.profiles import PROFILES
from sglang_basin.platforms.tiny_model import ModelSpec


def entry_point(group):
    (found,) = entry_points(group=group, name="basin_cpu")
    return found.load()


@pytest.fixture
def registered(monkeypatch):
    """What the plugin entry point registers, in a registry of its own: targets by name."""
    hooks = {}
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: hooks.setdefault(target, hook))
    return hooks


@pytest.mark.parametrize("selected", [None, "", "cuda", "someone_else"])
def test_absent_unless_selected(monkeypatch, registered, selected):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if selected is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    assert entry_point("sglang.srt.platforms")() is None
    entry_point("sglang.srt.plugins")()
    assert registered == {}


def test_present_when_selected_as_the_profile_does(monkeypatch, registered):
    monkeypatch.setenv("SGLANG_PLATFORM", PROFILES["cpu"].environment(role="both", cores=None)["SGLANG_PLATFORM"])
    platform = _load_platform_class(entry_point("sglang.srt.platforms")())()
    assert platform.is_out_of_tree()
    assert platform.device_type == "cpu"
    entry_point("sglang.srt.plugins")()
    assert list(registered) == [hook.target for hook in cpu.HOOKS]


def test_hooks_that_did_not_take_end_the_server(monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", {cpu.HOOKS[0].target})
    assert cpu.missing_hooks() == [hook.target for hook in cpu.HOOKS[1:]]
    with pytest.raises(RuntimeError, match="_run_sdpa_forward_decode"):
        cpu.ReferenceCpu().post_load_model(torch.nn.Module())


@pytest.mark.parametrize("step", ["extend", "decode"])
def test_upstream_calls_our_attention_in_the_form_we_take_over(step):
    """SGLang's own forward, down to the hooked function: a changed signature must not fall back silently."""
    backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    cache = torch.randn(64, 2, 16)
    backend.swa_out_cache_loc = None
    backend.token_to_kv_pool = SimpleNamespace(
        set_kv_buffer=lambda *_: None, get_key_buffer=lambda _: cache, get_value_buffer=lambda _: cache
    )
    backend.req_to_token_pool = SimpleNamespace(req_to_token=torch.arange(64, dtype=torch.int32).view(1, 64))
    layer = SimpleNamespace(
        **{"qk_head_dim": 16, "v_head_dim": 16, "tp_q_head_num": 4, "tp_k_head_num": 2, "layer_id": 0},
        **{"is_cross_attention": False, "attn_type": AttentionType.DECODER, "sliding_window_size": -1},
        scaling=0.25,
    )
    tokens = 5 if step == "extend" else 1
    batch = SimpleNamespace(
        out_cache_loc=torch.arange(20, 20 + tokens),
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([20 + tokens]),
        extend_prefix_lens=torch.tensor([20]),
        extend_seq_lens=torch.tensor([5]),
        encoder_lens=None,
    )
    q, k, v = torch.randn(tokens, 64), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    forward = getattr(backend, f"forward_{step}")
    expected = forward(q, k, v, layer, batch)

    def fell_back(*_args, **_options):
        raise AssertionError("fell back to the original")

    ours = {"extend": cpu._extend, "decode": cpu._decode}[step]
    name = f"_run_sdpa_forward_{step}"
    setattr(backend, name, lambda *args, **options: ours(fell_back, backend, *args, **options))
    torch.testing.assert_close(forward(q, k, v, layer, batch), expected, atol=2e-6, rtol=0)


def test_host_copies_move_the_named_rows_and_no_others():
    sources = [torch.randn(32, 2, 4) for _ in range(3)]
    targets = [torch.zeros(48, 2, 4) for _ in range(3)]
    src, dst = torch.tensor([3, 0, 31]), torch.tensor([7, 40, 1])
    cpu._copy_pages(sources, targets, src, dst, page_size=1)
    for source, target in zip(sources, targets, strict=True):
        assert (target[dst] == source[src]).all()
        target[dst] = 0
        assert not target.any()


def test_tiny_models_find_their_class_without_loading_all_others():
    from sglang.srt.models.registry import import_model_classes

    package = PROFILES["cpu"].environment(role="both", cores=None)["SGLANG_EXTERNAL_MODEL_PACKAGE"]
    spec = ModelSpec(hidden=64, layers=1)
    architectures = tiny_model._model_config(spec, end_id=0)["architectures"]
    assert list(import_model_classes(package, strict=True)) == architectures


def test_kv_checksums_are_adler32_of_the_pages_in_order():
    buffers = [torch.randint(0, 256, (8, 48), dtype=torch.uint8) for _ in range(4)]
    computer = KvChecksumComputer("cpu", [buffer.data_ptr() for buffer in buffers], [48] * 4)
    pages = torch.tensor([5, 0, 3])
    expected = zlib.adler32(b"".join(buffer[pages].numpy().tobytes() for buffer in buffers))
    assert cpu._checksum(computer, pages) == expected
    buffers[2][3, 7] += 1
    assert cpu._checksum(computer, pages) != expected
    assert cpu._checksum(computer, pages[:0]) == 1
