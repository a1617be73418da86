"""Small trees laid out as sglang's, in every design the adapter has to know; their code is our own."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CUTEDSL", "DECODE", "OLD", "RESOURCES", "sglang_tree", "split_module"]

NEW = "kernels/ops/attention"
OLD = "srt/layers/attention"

_HEAD = """
import torch
import triton
import triton.language as tl

from sglang.srt.environ import envs

_BACKEND = envs.SGLANG_SM120_FLASHMLA_BACKEND.get()
_PBS_SRC = 256


@triton.jit
def _copy_kernel(
    src, dst, marks, pages, stride: tl.constexpr, size: tl.constexpr, MARKED: tl.constexpr, WIDE: tl.constexpr
):
    ratio: tl.constexpr = size // 64
    page = tl.program_id(0) // ratio
    sub = tl.program_id(0) % ratio
    if MARKED:
        if tl.load(marks + page) == 0:
            return
    if WIDE:
        page = page.to(tl.int64)
    at = src + page * stride
    to = dst + (page * ratio + sub) * 37440
    n = tl.arange(0, 4096)
    for start in range(0, 36864, 4096):
        tl.store(to + start + n, tl.load(at + sub * 36864 + start + n))
    f = tl.arange(0, 512)
    tl.store(to + 36864 + f, tl.load(at + size * 576 + sub * 512 + f))


@triton.jit
def _mark_kernel(indices, marks, count, bound, size: tl.constexpr, BOUNDED: tl.constexpr):
    n = tl.arange(0, 2048)
    i = tl.load(indices + n, mask=n < count, other=-1)
    keep = (n < count) & (i >= 0)
    if BOUNDED:
        keep = keep & (i < bound)
    tl.store(marks + i // size, tl.full((2048,), 1, tl.int8), mask=keep)


def flash_mla_with_kvcache_sm120(**kwargs):
    raise NotImplementedError(_BACKEND)
"""

_STORES = {
    "dict": ("_buffers = {}\n", "buffers = _buffers"),
    "attribute": ("class _Kept:\n    buffers = {}\n", "buffers = _Kept.buffers"),
    "resources": (
        "",
        "from sglang.srt.runtime_context import get_resources\n    buffers = get_resources().buffers",
    ),
}

_SPLIT = """
{store}

def _split_kv_pages_to_64({signature}):
    {page_size}
    if size == 64:
        return kv_u8
    {buffers}
    rows = kv_u8.shape[0] * size // 64
    out = buffers.get("split")
    if out is None or out.shape[0] < rows:
        with {guard_split}:
            out = torch.empty(rows, 37440, dtype=torch.uint8, device=kv_u8.device)
        {superseded}
        buffers["split"] = out
    marks = kv_u8
    if touched is not None and touched.numel():
        marks = buffers.get("marks")
        if marks is None or marks.shape[0] < kv_u8.shape[0]:
            with {guard_marks}:
                marks = torch.empty(kv_u8.shape[0], dtype=torch.int8, device=kv_u8.device)
            buffers["marks"] = marks
        marks.zero_()
        flat = touched.reshape(-1).contiguous().to({index_dtype})
        tokens = kv_u8.shape[0] * size
        _mark_kernel[(1,)](flat, marks, flat.numel(), tokens, size, {bounded})
    _copy_kernel[(rows,)](
        kv_u8, out, marks, kv_u8.shape[0], kv_u8.stride(0), size, marks is not kv_u8, {wide}
    )
    return out[:rows].as_strided((rows, 64, 1, 584), (37440, 584, 584, 1))
"""

DECODE = """
import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({{"SPARE": 1}}), triton.Config({{"SPARE": 2}})], key=["topk"])
@triton.jit
def _decode_kernel(
    q, fp8, u8, bf16, indices, lens, out, lse, scale, size, stride, heads, topk,
    HAS_LENS: tl.constexpr, T: tl.constexpr, H: tl.constexpr, DOT: tl.constexpr, SPARE: tl.constexpr,
):
    row = tl.program_id(0)
    h = tl.arange(0, H)
    d = tl.arange(0, 512)
    t = tl.arange(0, T)
    limit = topk
    if HAS_LENS:
        limit = tl.minimum(tl.load(lens + row), topk)
    i = tl.load(indices + row * topk + t, mask=t < topk, other=-1)
    ok = (i >= 0) & (t < limit)
    i = tl.where(ok, i, 0)
    page = (i // size).to(tl.int64) * stride
    slot = (i % size).to(tl.int64)
    low = ok[:, None] & (d < 448)[None, :]
    high = ok[:, None] & (d >= 448)[None, :]
    code = tl.load(fp8 + (page + slot * 576)[:, None] + d[None, :], mask=low, other=0.0).to(tl.float32)
    byte = tl.load(u8 + (page + size * 576 + slot * 8)[:, None] + (d // 64)[None, :], mask=low, other=127)
    words = (page + slot * 576 + 448) // 2
    rope = tl.load(bf16 + words[:, None] + (d - 448)[None, :], mask=high, other=0.0)
    kv = tl.where((d < 448)[None, :], code * tl.exp2(byte.to(tl.float32) - 127), rope.to(tl.float32))
    rows = tl.load(q + (row * heads + h)[:, None] * 512 + d[None, :], mask=(h < heads)[:, None], other=0.0)
    narrow = kv.to(tl.bfloat16)
    if DOT:
        s = tl.dot(rows, tl.trans(narrow)) * scale
    else:
        s = tl.sum(rows.to(tl.float32)[:, None, :] * kv[None, :, :], axis=2) * scale
    s = tl.where(ok[None, :], s, -1e30)
    m = tl.max(s, axis=1)
    p = tl.where(ok[None, :], tl.exp(s - m[:, None]), 0.0)
    total = tl.sum(p, axis=1)
    if DOT:
        o = tl.dot(p.to(tl.bfloat16), narrow)
    else:
        o = tl.sum(p[:, :, None] * kv[None, :, :], axis=1)
    safe = tl.where(total > 0, total, 1.0)
    there = (h < heads)[:, None]
    o = (o / safe[:, None]).to(tl.bfloat16)
    tl.store(out + (row * heads + h)[:, None] * 512 + d[None, :], o, mask=there)
    tl.store(lse + row * heads + h, tl.where(total > 0, m + tl.log(safe), float("-inf")), mask=h < heads)


def _one(q, cache, indices, lens, scale):
    rows, _, heads, dim = q.shape
    flat = indices.reshape(rows, -1).contiguous()
    raw = cache.as_strided((cache.shape[0] * cache.stride(0),), (1,)).view(torch.uint8)
    out = torch.zeros(rows, 1, heads, dim, dtype=torch.bfloat16, device=q.device)
    lse = torch.zeros(rows, 1, heads, device=q.device)
    _decode_kernel[(rows,)](
        q.contiguous(), raw.view(torch.float8_e4m3fn), raw, raw.view(torch.bfloat16), flat,
        flat if lens is None else lens, out, lse, scale, cache.shape[1], cache.stride(0), heads,
        flat.shape[1], HAS_LENS=lens is not None, T=max(triton.next_power_of_2(flat.shape[1]), 16),
        H={heads}, DOT={dot},
    )
    return out, lse


def flash_mla_sparse_decode_triton(
    q, k_cache, indices, topk_length, attn_sink, head_dim_v, softmax_scale,
    extra_k_cache=None, extra_indices=None, extra_topk_length=None{more}
):
    out, lse = _one(q, k_cache, indices, topk_length, softmax_scale)
    if extra_k_cache is not None:
        other, other_lse = _one(q, extra_k_cache, extra_indices, extra_topk_length, softmax_scale)
        both = torch.logaddexp(lse, other_lse)
        share = [torch.where(one > -1e20, torch.exp(one - both), 0).unsqueeze(-1) for one in (lse, other_lse)]
        out, lse = (share[0] * out.float() + share[1] * other.float()).to(torch.bfloat16), both
    if attn_sink is not None:
        whole = torch.logaddexp(lse, attn_sink.view(1, 1, -1).expand_as(lse))
        share = torch.where(lse > -1e20, torch.exp(lse - whole), 0)
        out = (out.float() * share.unsqueeze(-1)).to(torch.bfloat16)
        lse = whole if {folded} else lse
    return out, lse.permute(0, 2, 1)
"""

RESOURCES = """
import dataclasses


@dataclasses.dataclass
class Resources:
    buffers: dict = dataclasses.field(default_factory=dict)
    lease: object = None


_RESOURCES = Resources()


def get_resources():
    return _RESOURCES


def get_server_args():
    raise RuntimeError("no engine is running")
"""

_ENVIRON = """
class _Text:
    def __init__(self, default):
        self.default = default

    def get(self):
        return self.default


class _Envs:
    SGLANG_SM120_FLASHMLA_BACKEND = _Text("flashinfer")


envs = _Envs()
"""

CUTEDSL = """
from dataclasses import dataclass

import torch

from sglang.srt.layers.moe.moe_runner.base import MoeQuantInfo, register_fused_func
from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled


def ensure_cutedsl_wrapper(layer):
    if getattr(layer, "_cutedsl_wrapper", None) is not None:
        return
    from flashinfer import CuteDslMoEWrapper

    from sglang.srt.runtime_context import get_server_args

    tokens = get_server_args().dp_size
    with {guard}:
        layer._cutedsl_wrapper = CuteDslMoEWrapper(
            max_num_tokens=tokens, use_cuda_graph=not cuda_graph_fully_disabled()
        )
    {more}


@dataclass
class Info(MoeQuantInfo):
    wrapper: object = None


@register_fused_func("none", "flashinfer_cutedsl")
def fused(dispatch_output, info):
    raise NotImplementedError
"""

_GUARD, _OPEN = "torch.inference_mode(False)", "torch.no_grad()"


def split_module(
    *,
    store: str = "resources",
    guarded: str = "both",
    indexed: bool = True,
    page_size: bool = True,
    bounded: bool = True,
    wide: bool = True,
    keeps: bool = False,
    wants: str = "",
) -> str:
    """Source of a ``flash_mla_sm120.py``.

    ``guarded``: both, marks, split, none. ``indexed``, ``page_size``: whether it takes them. ``bounded``:
    indices past the end are dropped; ``wide``: 64-bit offsets; ``keeps``: a superseded buffer stays alive;
    ``wants``: one more required parameter.
    """
    signature = ["kv_u8", *(["src_pbs"] if page_size else []), *([wants] if wants else [])]
    before, buffers = _STORES[store]
    text = _SPLIT.format(
        store=before,
        signature=", ".join([*signature, *(["touched_indices=None"] if indexed else [])]),
        page_size=f"size = {'src_pbs' if page_size else '_PBS_SRC'}\n    touched = "
        + ("touched_indices" if indexed else "None"),
        buffers=buffers,
        guard_split=_GUARD if guarded in ("both", "split") else _OPEN,
        guard_marks=_GUARD if guarded in ("both", "marks") else _OPEN,
        superseded='buffers.setdefault("old", []).append(buffers.get("split"))' if keeps else "pass",
        index_dtype="torch.int64" if bounded else "torch.int32",
        bounded=bounded,
        wide=wide,
    )
    return _HEAD + text


def sglang_tree(
    root: Path,
    split: str | None = None,
    *,
    place: str = NEW,
    decode: str | None = None,
    folded: bool = True,
    more: str = "",
    cutedsl: str | None = None,
    runtime: str = RESOURCES,
) -> Path:
    """Write a tree and return its root. ``decode``: ``sum``, ``dot`` or None; ``cutedsl``: guard or None."""
    files = {"srt/environ.py": _ENVIRON, "srt/runtime_context.py": runtime}
    if split is not None:
        files[f"{place}/flash_mla_sm120.py"] = split
    if decode is not None:
        files[f"{place}/flash_mla_sm120_triton.py"] = DECODE.format(
            dot=decode == "dot", heads=16 if decode == "dot" else 8, folded=folded, more=more
        )
    if cutedsl is not None:
        files["srt/layers/moe/moe_runner/flashinfer_cutedsl.py"] = CUTEDSL.format(guard=cutedsl, more="pass")
    base = root / "python" / "sglang"
    for name, text in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (base / "__init__.py").write_text("raise ImportError('needs a GPU')\n", encoding="utf-8")
    return root
