"""Where the bytes of tokens lie: pages of a 2-D pool ``[pages, >= payload bytes]``."""

from __future__ import annotations

import math

import torch

from ..errors import ArgumentError, LayoutError
from ..layout import DSV4, PageLayout
from .recipe import DEEPSEEK, Recipe
from .tokens import Quantised, check_fields, dequantise, quantise

__all__ = ["dequantise_pages", "pack", "pack_pages", "unpack", "view_field"]

_POOL_DTYPES = (torch.uint8, torch.float8_e4m3fn)


def pack(
    tokens: Quantised,
    layout: PageLayout,
    page_size: int,
    page_stride: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write tokens ``[pages, P, ...]`` (or flat ``[pages*P, ...]``) into pages; pad bytes become 0.

    Without ``out``, makes uint8 ``[pages, page_stride]`` with zero tails; ``page_stride`` is in bytes and
    defaults to ``layout.default_stride(P)``. ``out`` is a 2-D pool, uint8 or float8_e4m3fn, of exactly
    these pages; its tails stay as they are, and it is returned. Raises ``LayoutError`` or
    ``ArgumentError``; then nothing has been written.
    """
    _check_page_size(page_size)
    lead = check_fields(tokens, layout)
    if len(lead) not in (1, 2) or lead[-1] % page_size or (len(lead) == 2 and lead[1] != page_size):
        raise LayoutError(
            "tokens", f"leading shape {lead}", f"[pages, {page_size}] or [pages * {page_size}]", "Reshape."
        )
    pages, payload = math.prod(lead) // page_size, layout.payload(page_size)
    if out is None:
        stride = layout.default_stride(page_size) if page_stride is None else page_stride
        if stride < payload:
            raise LayoutError("page_stride", stride, f"at least {payload:,} bytes", "Pass a longer stride.")
        out = torch.zeros((pages, stride), dtype=torch.uint8, device=tokens.nope.device)
    pool = _pool_bytes(out, layout, page_size, "out")
    if pool.shape[0] != pages:
        raise LayoutError("out.shape[0]", pool.shape[0], f"{pages} pages", "Pass one page per page.")
    if page_stride not in (None, out.stride(0)):
        raise LayoutError("page_stride", page_stride, f"{out.stride(0)}, the stride of out", "Leave it out.")
    if pool.device != tokens.nope.device:
        raise ArgumentError("out.device", pool.device, f"{tokens.nope.device}, as tokens", "Move one.")
    values = {"nope": tokens.nope, "scales": tokens.scales, "rope": tokens.rope}
    for field in layout.fields:
        view, value = view_field(pool, layout, field.name, page_size), values.get(field.name)
        if value is None:
            view.zero_()  # a pad
        else:
            view.copy_(value.contiguous().view(torch.uint8).reshape(view.shape))
    return out


def unpack(pool: torch.Tensor, layout: PageLayout, page_size: int) -> Quantised:
    """Fields of every token of a 2-D pool ``[pages, >= payload bytes]``: fresh tensors ``[pages, P, ...]``.

    ``pool`` is uint8 or float8_e4m3fn, of any page stride and storage offset. Raises ``LayoutError``.
    """
    pool = _pool_bytes(pool, layout, page_size, "pool")

    def read(name: str) -> torch.Tensor:
        # A clone, not contiguous(): the bytes may start where no wider view could.
        return view_field(pool, layout, name, page_size).clone(memory_format=torch.contiguous_format)

    scales = read("scales")
    if layout.field("scales").dtype == "fp32":
        scales = scales.view(torch.float32)
    has_rope = any(field.name == "rope" for field in layout.fields)
    return Quantised(read("nope"), scales, read("rope").view(torch.int16) if has_rope else None)


def pack_pages(
    k: torch.Tensor,
    layout: PageLayout = DSV4,
    recipe: Recipe = DEEPSEEK,
    page_stride: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``quantise`` then ``pack`` of whole pages ``k [pages, P, head_dim]``; raises as those do."""
    if k.ndim != 3:
        raise LayoutError("k.shape", tuple(k.shape), "[pages, P, head_dim]", "Reshape it.")
    return pack(quantise(k, layout, recipe), layout, k.shape[1], page_stride, out)


def dequantise_pages(pool: torch.Tensor, layout: PageLayout, page_size: int) -> torch.Tensor:
    """``unpack`` then ``dequantise``: bf16 ``[pages, P, head_dim]``; raises as ``unpack`` does."""
    return dequantise(unpack(pool, layout, page_size), layout)


def view_field(pool: torch.Tensor, layout: PageLayout, name: str, page_size: int) -> torch.Tensor:
    """One field of every token of a 2-D pool, as a uint8 view ``[pages, P, nbytes]`` of its bytes.

    Writing to the view writes the pool. Raises ``LayoutError``.
    """
    pool = _pool_bytes(pool, layout, page_size, "pool")
    field = layout.field(name)
    record = layout.token_bytes if field.region == "token" else layout.footer_bytes
    return pool.as_strided(
        (pool.shape[0], page_size, field.nbytes),
        (pool.stride(0), record, 1),
        pool.storage_offset() + layout.offset(name, 0, page_size),
    )


def _check_page_size(page_size: int) -> None:
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
        raise LayoutError("page_size", repr(page_size), "a positive number of tokens", "Correct it.")


def _pool_bytes(pool: torch.Tensor, layout: PageLayout, page_size: int, argument: str) -> torch.Tensor:
    """``pool`` as uint8, once it is known to hold whole pages that do not overlap."""
    _check_page_size(page_size)
    payload = layout.payload(page_size)

    def bad(part: str, value: object, expected: str, remedy: str) -> LayoutError:
        return LayoutError(f"{argument}{part}", value, expected, remedy)

    if pool.dtype not in _POOL_DTYPES:
        raise bad(".dtype", pool.dtype, "uint8 or float8_e4m3fn", "View it as uint8.")
    if pool.ndim != 2 or pool.shape[1] < payload:
        raise bad(
            ".shape", tuple(pool.shape), f"[pages, >= {payload:,} bytes]", "Pass the pool as 2-D whole pages."
        )
    if pool.stride(1) != 1:
        raise bad(".stride(1)", pool.stride(1), "1", "Pass a view whose last dimension is dense.")
    if pool.shape[0] > 1 and pool.stride(0) < payload:
        raise bad(".stride(0)", pool.stride(0), f"at least {payload:,} bytes", "Pass the pool itself.")
    return pool.view(torch.uint8)
