"""What the FlashInfer backend refuses, when it is there at all, and how it tells the generations."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from flashinfer_bench import C4, GENERATIONS, MAIN, Bench, agrees, bench_of
from flashinfer_cases import CallSpec, make

from sm120_mla import device
from sm120_mla.backends import flashinfer_api
from sm120_mla.backends.flashinfer import FlashInferBackend
from sm120_mla.envelopes import by_name
from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.kernels.runtime import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in computes on the CPU")


@pytest.fixture(params=GENERATIONS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return bench_of(request.param)


@pytest.fixture
def sm120(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flashinfer_api, "reachable", lambda: True)
    with device.pretend_device((12, 0)):
        yield


# ---- refusals


@pytest.mark.parametrize(
    ("name", "spec", "argument"),
    [
        ("A", CallSpec(65, 8, MAIN), "query heads = 8"),
        ("A", CallSpec(1, 12, MAIN), "query heads = 12"),
        ("B", CallSpec(65, 12, MAIN), "query heads = 12"),
        ("C", CallSpec(65, 12, MAIN), "query heads = 12"),
        ("A", CallSpec(1, 8, replace(MAIN, width=1025)), "indices width = 1025"),
        ("B", CallSpec(65, 16, replace(MAIN, width=129), C4), "indices width = 129"),
        ("B", CallSpec(65, 16, MAIN, replace(C4, page_size=4)), "extra_kv_cache page size = 4"),
        ("B", CallSpec(1, 16, replace(MAIN, page_size=32, pages=9)), "kv_cache page size = 32"),
    ],
)
def test_a_shape_that_is_not_served_is_refused_before_anything_happens(
    name: str, spec: CallSpec, argument: str, sm120: None
) -> None:
    bench, call = bench_of(name), make(spec)
    before = call.out.clone()
    with pytest.raises(ArgumentError, match=argument) as raised:
        bench.run(call)
    assert "Nearest that works" in raised.value.remedy
    assert call.out.equal(before)
    assert len(call.buffers) == 0
    assert bench.record.launches == []
    said = bench.backend.supports(call.shape, (12, 0))
    assert not said
    assert argument in said.reason
    assert said.remedy == raised.value.remedy


def test_what_is_refused_would_have_failed(sm120: None) -> None:
    """The tables are no narrower than the kernels: the stand-in's own checks refuse the same shapes."""
    for name, rows, heads, width in (("A", 65, 8, 128), ("A", 1, 8, 192), ("B", 1, 12, 128)):
        bench = bench_of(name)
        call = make(CallSpec(rows, heads, MAIN))
        found = bench.backend._installed()
        loose = replace(
            found.envelope,
            decode_heads=None,
            prefill_heads=(8, 12),
            decode_widths=(width,),
            prefill_widths=(width,),
        )
        bench.backend._found = replace(found, envelope=loose)
        with pytest.raises(RuntimeError, match="Check failed"):
            bench.run(call)


@pytest.mark.parametrize("scale", [-0.04, 1e-30])
def test_a_scale_that_undoes_the_mask(bench: Bench, scale: float) -> None:
    call = replace(make(CallSpec(2, 8, MAIN, sink=False)), scale=scale)
    if by_name(bench.generation).masks_before_scale:
        with pytest.raises(ArgumentError, match="softmax_scale"):
            bench.run(call)
    else:
        agrees(bench.run(call))


# ---- availability


def test_importing_the_backend_imports_no_flashinfer() -> None:
    code = (
        "import sys; sys.modules['flashinfer'] = None\n"
        "from sm120_mla.backends.flashinfer import FlashInferBackend as B\n"
        "assert not B().available(); sys.modules.pop('flashinfer')\n"
        "assert not any(name.startswith('flashinfer') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_api.importlib.util, "find_spec", lambda name: None)
    backend, call = FlashInferBackend(), make(CallSpec(1, 8, MAIN))
    said = backend.available()
    assert not said
    assert said.reason == "flashinfer-python is not installed"
    assert said.remedy == "Run: pip install 'sm120-mla[flashinfer]'."
    assert backend.supports(call.shape, (12, 0)) == said
    with pytest.raises(UnavailableError, match="not installed"):
        backend.run(call)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_api, "reachable", lambda: False)
    found = bench_of("C").backend._installed()
    assert FlashInferBackend(found).available()  # what stands in computes anywhere
    said = FlashInferBackend(replace(found, needs_gpu=True)).available()
    assert not said
    assert "no CUDA GPU" in said.reason


@pytest.mark.parametrize(
    ("capability", "yes"), [((12, 0), True), ((12, 1), True), ((9, 0), False), (None, False)]
)
def test_capability(bench: Bench, sm120: None, capability: tuple[int, int] | None, yes: bool) -> None:
    said = bench.backend.supports(make(CallSpec(1, 8, MAIN)).shape, capability)
    assert bool(said) is yes
    assert yes or "capability 12.x" in said.reason


def test_a_known_defect_is_told(sm120: None) -> None:
    shape = make(CallSpec(1, 8, MAIN)).shape
    assert "3700" in bench_of("A").backend.supports(shape, (12, 0)).reason
    assert bench_of("B").backend.supports(shape, (12, 0)).reason == ""


class Wrapper:
    def __init__(self, device: object = None) -> None: ...

    def run(
        self,
        q: Any,
        *,
        topk_length: Any = None,
        attn_sink: Any = None,
        extra_kv_cache: Any = None,
        extra_indices: Any = None,
        extra_topk_length: Any = None,
        out_lse: Any = None,
        mid_out: Any = None,
        mid_lse: Any = None,
        lse_scale: float = 1.0,
    ) -> None: ...


class NoLseScale:
    def run(self, q: Any, *, topk_length: Any = None) -> None: ...


def config(**changed: object) -> SimpleNamespace:
    base = {"d_qk": 512, "bytes_per_token": 584, "max_num_tokens": 64, "head_counts": None}
    return SimpleNamespace(**(base | {"topk_is_runtime": True, "page_block_size_is_runtime": True} | changed))


def function(
    q: Any,
    *,
    topk_length: Any = None,
    attn_sink: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    out_lse: Any = None,
    mid_out: Any = None,
    mid_lse: Any = None,
) -> None: ...


def old_module(widths: tuple[int, ...]) -> dict[str, object]:
    return {
        "_DECODE_DSV4_DISPATCH": frozenset((h, k) for h in (8, 16, 32, 64, 128) for k in widths),
        "_DECODE_MAX_TOKENS": 64,
        "_DECODE_DSV4_PAGE_BLOCK_SIZE": 64,
        "_sparse_mla_sm120_paged_attention": function,
    }


def new_module(wrapper: type, answer: SimpleNamespace) -> dict[str, object]:
    return {
        "SparseMLASm120Wrapper": wrapper,
        "supported_sparse_mla_sm120_configs": lambda: {"dsv4": answer},
    }


@contextlib.contextmanager
def pretend_package(
    monkeypatch: pytest.MonkeyPatch, version: str, mla: dict[str, object], private: dict[str, object] | None
) -> Iterator[None]:
    """A flashinfer of that version made of these objects; ``private`` None: it has no such module."""
    modules = {"flashinfer": {}, "flashinfer.mla": mla, "flashinfer.mla._sparse_mla_sm120": private}
    for name, content in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        for key, value in (content or {}).items():
            setattr(module, key, value)
        if content is None:
            monkeypatch.delitem(sys.modules, name, raising=False)
        else:
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_api.importlib.metadata, "version", lambda name: version)
    yield


A_WIDTHS, B_WIDTHS = (128, 512, 1024), (128, 192, 256, 512, 1024)


@pytest.mark.parametrize(
    ("version", "mla", "private", "name"),
    [
        ("0.6.14", {}, old_module(A_WIDTHS), "A"),
        ("0.6.18", {}, old_module(B_WIDTHS), "B"),
        ("0.7.4", new_module(Wrapper, config()), {}, "C"),
        # what it offers decides, not its number
        ("0.6.15+vendor", {}, old_module(B_WIDTHS), "B"),
        ("9.9", new_module(Wrapper, config()), {}, "C"),
    ],
)
def test_generations_are_told_by_what_they_offer(
    monkeypatch: pytest.MonkeyPatch, version: str, mla: Any, private: Any, name: str
) -> None:
    with pretend_package(monkeypatch, version, mla, private):
        found = flashinfer_api.probe()
    assert isinstance(found, flashinfer_api.Installed)
    assert (found.version, found.envelope.name) == (version, name)


@pytest.mark.parametrize(
    ("version", "mla", "private", "reason"),
    [
        ("0.6.13", {}, None, "0.6.13 has no SM120 kernels"),
        (
            "0.7.0",
            new_module(Wrapper, config(page_block_size_is_runtime=False)),
            {},
            "lies between",
        ),
        ("0.7.9", new_module(NoLseScale, config()), {}, "offers neither"),
        ("0.7.9", new_module(Wrapper, config(topk_is_runtime=False)), {}, "offers neither"),
        ("0.7.9", new_module(Wrapper, config(bytes_per_token=528)), {}, "offers neither"),
        ("0.7.9", new_module(Wrapper, config(max_num_tokens=32)), {}, "offers neither"),
        ("0.7.9", new_module(Wrapper, config(head_counts=frozenset({8}))), {}, "offers neither"),
        ("0.7.9", {**new_module(Wrapper, config()), "SparseMLASm120Wrapper": 3}, {}, "raised AttributeError"),
        ("0.6.19", {}, old_module((128, 2048)), "offers neither"),
        ("0.6.19", {}, {**old_module(A_WIDTHS), "_DECODE_MAX_TOKENS": 32}, "offers neither"),
        ("0.6.19", {}, {**old_module(A_WIDTHS), "_DECODE_DSV4_PAGE_BLOCK_SIZE": 256}, "offers neither"),
    ],
)
def test_what_is_not_known_is_not_used(
    monkeypatch: pytest.MonkeyPatch, version: str, mla: Any, private: Any, reason: str
) -> None:
    with pretend_package(monkeypatch, version, mla, private):
        said = FlashInferBackend().available()
    assert not said
    assert reason in said.reason
    assert "0.7.4" in said.remedy


@pytest.mark.parametrize("error", [AssertionError("no CUDA"), RuntimeError("driver"), ImportError("torch_c")])
def test_an_import_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(flashinfer_api.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer_api.importlib, "import_module", fail)
    said = FlashInferBackend().available()
    assert not said
    assert "cannot be imported" in said.reason
    assert str(error) in said.reason
