"""The fields of a token: values to codes, scales and rope bits, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import ArgumentError, LayoutError, NonFiniteError
from ..layout import DSV4, PageLayout
from .recipe import DEEPSEEK, Recipe, decode_e4m3, decode_ue8m0, encode_e4m3, scale_bytes

__all__ = ["Quantised", "check_fields", "dequantise", "quantise"]

_INPUT_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class Quantised:
    """Tokens as the fields of their layout; ``...`` is ``[pages, P]`` or any other leading shape.

    ``nope`` is uint8 ``[..., n]``, e4m3fn codes. ``scales`` is ``[..., tiles]``: uint8 UE8M0 bytes, or
    float32 where the layout stores fp32. ``rope`` is int16 ``[..., r]``, bf16 bits, or None where the
    layout has none.
    """

    nope: torch.Tensor
    scales: torch.Tensor
    rope: torch.Tensor | None


def quantise(k: torch.Tensor, layout: PageLayout = DSV4, recipe: Recipe = DEEPSEEK) -> Quantised:
    """Fields of the tokens ``k [..., head_dim]``, bf16 or fp32 (rounded to bf16 first, as writers do).

    Dimensions go to ``nope`` first, then ``rope``, which is copied bit by bit. fp32 scale fields get the
    same powers of two (FlashMLA V32). Raises ``LayoutError`` for a wrong last dimension,
    ``ArgumentError`` for another dtype, and ``NonFiniteError`` naming token, field and tile if a value of
    either field is not finite in bf16. A nope value of magnitude 1.9375 * 2^127 or more dequantises to
    inf: its code rounds up, to 2^128.
    """
    if k.dtype not in _INPUT_DTYPES:
        raise ArgumentError("k.dtype", k.dtype, "bfloat16 or float32", "Convert it first.")
    if k.ndim == 0 or k.shape[-1] != layout.head_dim:
        raise LayoutError(
            "k.shape", tuple(k.shape), f"[..., {layout.head_dim}] ({layout.name})", "Name the layout of k."
        )
    rounded = k.to(torch.bfloat16)
    _require_finite(k, rounded, layout)
    n = layout.field("nope").count
    tiles = rounded[..., :n].float().unflatten(-1, (n // layout.tile, layout.tile))
    scales = scale_bytes(tiles.abs().amax(-1), recipe)
    scale = decode_ue8m0(scales)
    nope = encode_e4m3(tiles / scale.unsqueeze(-1)).flatten(-2)
    if layout.field("scales").dtype == "fp32":
        scales = scale
    rope = rounded[..., n:].contiguous().view(torch.int16) if n < layout.head_dim else None
    return Quantised(nope, scales, rope)


def dequantise(tokens: Quantised, layout: PageLayout = DSV4) -> torch.Tensor:
    """bf16 ``[..., head_dim]``: ``fp8 * scale`` in fp32, rounded to bf16, then the rope bits as they are.

    A NaN code or a NaN scale gives NaN; a product past bf16 gives inf.
    """
    check_fields(tokens, layout)
    scale = tokens.scales if layout.field("scales").dtype == "fp32" else decode_ue8m0(tokens.scales)
    codes = decode_e4m3(tokens.nope).unflatten(-1, (scale.shape[-1], layout.tile))
    nope = (codes * scale.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)
    if tokens.rope is None:
        return nope
    return torch.cat((nope, tokens.rope.view(torch.bfloat16)), dim=-1)


def check_fields(tokens: Quantised, layout: PageLayout) -> tuple[int, ...]:
    """Leading shape of ``tokens``; raises ``LayoutError`` for the field that does not fit ``layout``."""
    lead = tuple(tokens.nope.shape[:-1])
    scale_dtype = torch.float32 if layout.field("scales").dtype == "fp32" else torch.uint8
    wanted = {"nope": torch.uint8, "scales": scale_dtype, "rope": torch.int16}
    present = {field.name: field.count for field in layout.fields}
    for name, dtype in wanted.items():
        value: torch.Tensor | None = getattr(tokens, name)
        have = None if value is None else (tuple(value.shape), value.dtype)
        want = ((*lead, present[name]), dtype) if name in present else None
        if have != want:
            raise LayoutError(f"tokens.{name}", have, f"{want} ({layout.name})", "Name the tokens' layout.")
    return lead


def _require_finite(k: torch.Tensor, rounded: torch.Tensor, layout: PageLayout) -> None:
    finite = torch.isfinite(rounded)
    if bool(finite.all()):
        return
    at = (~finite).nonzero()[0].tolist()
    dim, n = at[-1], layout.field("nope").count
    token = 0
    for index, size in zip(at[:-1], k.shape[:-1], strict=True):
        token = token * size + index
    where = f"nope, tile {dim // layout.tile}" if dim < n else f"rope[{dim - n}]"
    value = k[tuple(at)].item()
    told = f"{value}, which rounds to inf in bf16" if math.isfinite(value) else f"{value}"
    raise NonFiniteError(
        f"k[{', '.join(map(str, at))}]",
        f"{told} (token {token}, {where})",
        "a value that is finite in bf16",
        "Find what produced it; a page cannot hold it.",
    )
