"""Sparse MLA attention: one entry point, and the choice of a backend.

A backend is taken from the argument, else from the environment, else by capability. The first two are
orders: what they name serves the call or the call is refused. ``explain`` tells which backend a call
reaches, and why.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

import torch

from . import device, settings
from .attention_checks import HEAD_DIM, Names, Request, check
from .backends.base import AttentionCall, AttentionShape, Backend, Support
from .buffers import PersistentBuffers, default_buffers
from .errors import ArgumentError, UnavailableError
from .layout import DSV4, PageLayout

__all__ = ["BACKENDS", "Route", "choose", "explain", "flash_mla_with_kvcache_sm120", "sparse_mla"]

BACKENDS = ("flashinfer", "triton", "reference")

_CLASSES = {"flashinfer": "FlashInferBackend", "triton": "TritonBackend", "reference": "ReferenceBackend"}
_instances: dict[str, Backend] = {}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Route:
    """Which backend a call reaches. ``source`` is ``argument``, ``environment`` or ``capability``.

    ``backend`` is "" where the result is known without one. ``passed_over`` holds the backends that were
    preferred and could not serve, each with its reason.
    """

    backend: str
    source: str
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        past = "".join(f"; {name} passed over: {why}" for name, why in self.passed_over)
        return f"{self.backend or 'no backend'}, by {self.source}: {self.reason}{past}"


@dataclass(frozen=True)
class _Wish:
    """A backend asked for by name, or None; ``where`` is the argument or variable that asks."""

    name: str | None
    source: str
    where: str


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    page_size: int | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_page_size: int | None = None,
    layout: PageLayout = DSV4,
    backend: str | None = None,
    buffers: PersistentBuffers | None = None,
    scope: str = "",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    validate: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query row over the tokens its index rows name; ``out``, or ``(out, lse)``.

    Args:
        q: bf16 ``[T, H, 512]`` or ``[T, 1, H, 512]``, last dimension dense, 1 to 128 heads, any T.
        kv_cache: uint8 or float8_e4m3fn pool, ``[pages, bytes]`` (with ``page_size``), ``[pages, P, b]``,
            ``[pages, P, 1, b]`` or ``[pages, 1, P, b]``; any P >= 1, page stride and storage offset.
        indices: int32 or int64 ``[T, k]`` or ``[T, 1, k]`` token indices, rows dense. An entry counts iff
            its index is in ``[0, pages * P)`` and its column is below its row's length; it counts as often
            as it occurs.
        topk_length: int32 or int64 ``[T]`` or ``[T, 1]``, columns that count, clamped to ``[0, k]``.
        attn_sink: fp32 ``[H]``, natural units; -inf is no sink, +inf gives out 0.
        softmax_scale: a positive number; ``512**-0.5`` where left out.
        extra_kv_cache, extra_indices, extra_topk_length, extra_page_size: a second cache, of the same
            layout; one softmax runs over both.
        layout: page format of both caches; one whose rows are 512 wide.
        backend: ``flashinfer``, ``triton`` or ``reference``, which then serves or the call is refused;
            ``auto`` ignores the environment. None: ``SM120_MLA_BACKEND``, else by capability.
        buffers, scope: where a backend keeps its scratch; the process's registry where None.
        return_lse: also return the log-sum-exp, fp32 ``[T, H]``: natural, over the counted entries of both
            caches, without the sink.
        out: bf16 of q's shape, any strides; it is written whole and returned.
        lse: fp32 ``[T, H]``, any strides; written, and returned with ``return_lse``.
        validate: ``values`` also refuses a counted index past the pool's end and a sink that is NaN.
            ``metadata`` does not look at values. None: values in reference mode. Never in capture.

    A row in which nothing counts has ``out = 0`` and ``lse = -inf``. What is returned is the caller's: no
    later call writes into it. Bytes of tokens that do not count change nothing.

    Raises ``ArgumentError`` (``LayoutError`` for a cache view, ``IndexValueError`` for an index),
    ``UnavailableError`` for a backend that cannot run here, ``GrowthDuringCaptureError``.
    """
    wish = _wish(backend)
    request = check(
        q,
        kv_cache,
        indices,
        topk_length=topk_length,
        attn_sink=attn_sink,
        softmax_scale=softmax_scale,
        page_size=page_size,
        extra_kv_cache=extra_kv_cache,
        extra_indices=extra_indices,
        extra_topk_length=extra_topk_length,
        extra_page_size=extra_page_size,
        layout=layout,
        out=out,
        lse=lse,
        validate=validate,
    )
    made, made_lse = _attend(request, wish, return_lse, buffers, scope)
    out = _with_head_axis(request, made) if out is None else out
    if not return_lse:
        return out
    assert made_lse is not None
    return out, made_lse


def explain(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    backend: str | None = None,
    return_lse: bool = False,
    buffers: PersistentBuffers | None = None,
    scope: str = "",
    **arguments: Any,
) -> Route:
    """Which backend ``sparse_mla`` of the same arguments reaches, and why; raises what it would raise.

    Nothing is launched, allocated or written.
    """
    wish = _wish(backend)
    request = check(q, kv_cache, indices, **arguments)
    if request.empty:
        return Route("", "shape", _NO_BACKEND)
    want_lse = return_lse or request.lse is not None
    return _route(request.shape(want_lse), request.q, wish)[1]


def choose(shape: AttentionShape, like: torch.Tensor, backend: str | None = None) -> Route:
    """The route of a call of these numbers whose tensors are on the device of ``like``; raises as a call."""
    return _route(shape, like, _wish(backend))[1]


def flash_mla_with_kvcache_sm120(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """sglang's function of this name (kernels/ops/attention/flash_mla_sm120.py, read September 2026).

    Takes ``q [B, 1, H, 512]``, ``k_cache [pages, P, 1, 584]``, ``indices [B, 1, topk]`` or ``[B, topk]``,
    ``topk_length``, ``attn_sink``, ``head_dim_v`` (512), ``softmax_scale``, ``extra_k_cache``,
    ``extra_indices_in_kvcache`` and ``extra_topk_length``; other keywords are ignored. Returns
    ``(out [B, 1, H, 512] bf16, lse [B, H, 1] fp32)``.

    ``lse`` is natural and without the sink, as sglang's torch path has it, whichever backend runs: its
    Triton path folds the sink in, its FlashInfer path returns None. ``SGLANG_SM120_FLASHMLA_BACKEND`` is an
    order where it is set (``torch`` means reference), read at each call; else as ``sparse_mla``, whose
    errors this raises under the names above.
    """
    for name in ("q", "k_cache", "indices"):
        if kwargs.get(name) is None:
            raise ArgumentError(name, "missing", "a tensor", "Pass it by keyword.")
    wish = _sglang_wish()
    q = kwargs["q"]
    if isinstance(q, torch.Tensor) and q.dim() != 4:
        raise ArgumentError("q.shape", tuple(q.shape), f"[B, 1, H, {HEAD_DIM}]", "Pass q.unsqueeze(1).")
    width = kwargs.get("head_dim_v", HEAD_DIM)
    if width != HEAD_DIM:
        raise ArgumentError("head_dim_v", width, str(HEAD_DIM), "V is the whole row of the cache.")
    request = check(
        q,
        kwargs["k_cache"],
        kwargs["indices"],
        topk_length=kwargs.get("topk_length"),
        attn_sink=kwargs.get("attn_sink"),
        softmax_scale=kwargs.get("softmax_scale"),
        extra_kv_cache=kwargs.get("extra_k_cache"),
        extra_indices=kwargs.get("extra_indices_in_kvcache"),
        extra_topk_length=kwargs.get("extra_topk_length"),
        names=_SGLANG_NAMES,
    )
    out, lse = _attend(request, wish, True, None, "")
    assert lse is not None
    return _with_head_axis(request, out), lse.unsqueeze(-1)


_SGLANG_NAMES = Names(
    kv_cache="k_cache",
    indices="indices",
    extra_kv_cache="extra_k_cache",
    extra_indices="extra_indices_in_kvcache",
)
_NO_BACKEND = "no row, or no entry that could count: the result is known without a launch"


def _attend(
    request: Request, wish: _Wish, return_lse: bool, buffers: PersistentBuffers | None, scope: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the call; the caller's own output where it passed one, else a fresh ``[T, H, 512]``."""
    q, want_lse = request.q, return_lse or request.lse is not None
    shape = None if request.empty else request.shape(want_lse)
    chosen = None if shape is None else _route(shape, q, wish)
    out, lse = request.out, request.lse
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if lse is None and want_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if shape is None or chosen is None:
        with torch.inference_mode():  # reaches outputs made inside and outside of it alike
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        return out, lse
    backend, route = chosen
    _log.debug("%s", route)
    # Backends write dense rows and dense vectors; an output that lies otherwise is written through a copy.
    dense_out = out if out.stride(-1) == 1 else torch.empty(q.shape, dtype=out.dtype, device=out.device)
    dense_lse = (
        lse
        if lse is None or lse.is_contiguous()
        else torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    )
    backend.run(
        AttentionCall(
            q=q,
            main=request.caches[0],
            extra=request.caches[1] if len(request.caches) > 1 else None,
            sink=request.sink,
            scale=request.scale,
            out=dense_out,
            lse=dense_lse,
            shape=shape,
            buffers=default_buffers() if buffers is None else buffers,
            scope=scope,
        )
    )
    with torch.inference_mode():
        if dense_out is not out:
            out.copy_(dense_out)
        if lse is not None and dense_lse is not None and dense_lse is not lse:
            lse.copy_(dense_lse)
    return out, lse


def _with_head_axis(request: Request, out: torch.Tensor) -> torch.Tensor:
    return out.unsqueeze(1) if request.has_head_axis else out


def _wish(backend: str | None) -> _Wish:
    """The argument, else SM120_MLA_BACKEND. Raises ``ArgumentError`` for a name that there is not."""
    if backend is None:
        name = settings.get("SM120_MLA_BACKEND")
        return _Wish(None if name == "auto" else name, "environment", "SM120_MLA_BACKEND")
    if backend not in (*BACKENDS, "auto"):
        raise ArgumentError(
            "backend",
            repr(backend),
            f"one of {', '.join(BACKENDS)}, auto",
            "Correct the name, or leave it out.",
        )
    return _Wish(None if backend == "auto" else backend, "argument", "backend")


def _sglang_wish() -> _Wish:
    variable = "SGLANG_SM120_FLASHMLA_BACKEND"
    name = settings.get(variable)
    if name == "auto":
        return _wish(None)
    return _Wish("reference" if name == "torch" else name, "environment", variable)


def _route(shape: AttentionShape, like: torch.Tensor, wish: _Wish) -> tuple[Backend, Route]:
    if wish.name is not None:
        backend = _ordered(wish.name, wish.where, shape, like)
        return backend, Route(wish.name, wish.source, f"{wish.where}={wish.name}")
    preferred, reason = _preferred(like)
    passed: list[tuple[str, str]] = []
    for name in preferred:
        found, verdict = _ask(name, shape, like)
        if found is not None and verdict:
            return found, Route(name, "capability", reason, tuple(passed))
        passed.append((name, verdict.reason))
    raise UnavailableError(
        "an attention backend for this call",
        "; ".join(f"{name}: {why}" for name, why in passed),
        f"{reason[0].upper()}{reason[1:]}. backend='reference' serves every call, slowly.",
    )


def _preferred(like: torch.Tensor) -> tuple[tuple[str, ...], str]:
    """Backends in order of preference, and why. The specification serves only where there is no GPU."""
    capability = device.capability(like.device)
    if capability is not None:
        name = f"capability {capability[0]}.{capability[1]}"
        if capability[0] == 12:
            return ("flashinfer", "triton"), f"{name} is what FlashInfer's kernels are for"
        return ("triton",), f"{name} has no kernels of FlashInfer's for this cache"
    if device.interpreting():
        return ("triton", "reference"), "there is no GPU, and kernels run in Triton's interpreter"
    return ("reference",), f"tensors on {like.device}, where compiled kernels do not run"


def _ordered(name: str, where: str, shape: AttentionShape, like: torch.Tensor) -> Backend:
    """The backend that was asked for, or the reason why not."""
    backend, verdict = _ask(name, shape, like)
    if backend is None:
        raise UnavailableError(f"backend {name} ({where})", verdict.reason, verdict.remedy)
    if not verdict:
        raise ArgumentError(
            where, repr(name), f"a backend that serves this call: {verdict.reason}", verdict.remedy
        )
    return backend


def _ask(name: str, shape: AttentionShape, like: torch.Tensor) -> tuple[Backend | None, Support]:
    """A backend and whether it serves the call; None with the reason where it cannot run at all."""
    backend, verdict = _load(name)
    if backend is None:
        return None, verdict
    verdict = backend.available()
    if not verdict:
        return None, verdict
    verdict = _reaches(name, like)
    if not verdict:
        return None, verdict
    return backend, backend.supports(shape, device.capability(like.device))


def _load(name: str) -> tuple[Backend | None, Support]:
    found = _instances.get(name)
    if found is not None:
        return found, Support(True)
    try:
        module = importlib.import_module(f".backends.{name}", __package__)
    except (ImportError, UnavailableError) as error:
        return None, Support(False, str(error), "Install what is missing, or name another backend.")
    made: Backend = getattr(module, _CLASSES[name])()
    _instances[name] = made
    return made, Support(True)


def _reaches(name: str, like: torch.Tensor) -> Support:
    """Whether kernels of this process can reach the tensors; the specification reaches any."""
    if name == "reference":
        return Support(True)
    from .kernels.runtime import require_device  # imports triton

    try:
        require_device("q", like)
    except ArgumentError as error:
        return Support(False, f"{error.argument} = {error.value}: expected {error.expected}", error.remedy)
    return Support(True)
