"""How a writer chooses a tile's scale, and what single codes mean.

Whichever device decodes them:

- e4m3fn 0x7F and 0xFF are NaN, 0x7E and 0xFE are +-448; there is no infinity.
- UE8M0 byte ``b`` is ``2^(b-127)``; byte 0 is 2^-127 and byte 255 is NaN (OCP Microscaling 1.0, and torch's
  float8_e8m0fnu). FlashInfer's scalar path reads 0.0 and inf there; no recipe writes either byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import ArgumentError

__all__ = [
    "DEEPSEEK",
    "ENGINES",
    "FP8_MAX",
    "RECIPES",
    "SGLANG_TRITON_OLD",
    "Recipe",
    "decode_e4m3",
    "decode_ue8m0",
    "encode_e4m3",
    "recipe_by_name",
    "scale_bytes",
]

FP8_MAX = 448.0
"""Largest finite e4m3fn value."""


@dataclass(frozen=True)
class Recipe:
    """How one family of writers chooses a tile's scale: a power of two, rounded up, with a floor.

    ``floor_on`` says what the floor bounds: ``scale`` is ``max(amax / 448, floor)``, ``amax`` is
    ``max(amax, floor) / 448``. ``rounding`` names how that becomes the scale: ``ceil_log2`` is
    ``2^ceil(log2(x))``. Two recipes give the same bytes for every tile above both floors.
    """

    name: str
    floor: float
    floor_on: str
    rounding: str
    source: str

    @property
    def min_byte(self) -> int:
        """Smallest UE8M0 byte this recipe writes, an all-zero tile's."""
        least = self.floor if self.floor_on == "scale" else self.floor / FP8_MAX
        mantissa, exponent = math.frexp(least)
        return exponent - (mantissa == 0.5) + 127


DEEPSEEK = Recipe(
    name="deepseek",
    floor=1e-4,
    floor_on="scale",
    rounding="ceil_log2",
    source="FlashMLA tests/quant.py, commit 9241ae3; FlashInfer tests quantize_kv_dsv4 and _dsv4_1",
)
"""The layout owner's packer. The floor is applied after the division: smallest byte 114 (2^-13)."""

ENGINES = Recipe(
    name="engines",
    floor=1e-4,
    floor_on="amax",
    rounding="ceil_log2",
    source="vLLM cache_utils.py and its fused qnorm/rope/insert .cu; sglang store.cuh and "
    "fused_norm_rope_v2.cuh (read September 2026)",
)
"""What serving engines write. The floor is applied to amax: smallest byte 105 (2^-22).

vLLM's fused_compress_quant_cache.py multiplies by 1/448 instead of dividing; over every bf16 amax the
bytes are the same."""

SGLANG_TRITON_OLD = Recipe(
    name="sglang_triton_old",
    floor=1e-8,
    floor_on="amax",
    rounding="ceil_log2",
    source="sglang quant_k_cache.py, SGLANG_OPT_USE_FUSED_STORE_CACHE=0 (read September 2026)",
)
"""An older sglang writer: smallest byte 92 (2^-35). It leaves the pad byte as it was; this codec
zeroes it."""

RECIPES = (DEEPSEEK, ENGINES, SGLANG_TRITON_OLD)


def recipe_by_name(name: str) -> Recipe:
    """The recipe called ``name``; raises ``ArgumentError`` with the names there are."""
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    names = ", ".join(row.name for row in RECIPES)
    raise ArgumentError("recipe", repr(name), f"one of {names}", "Correct the name.")


def scale_bytes(amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """UE8M0 bytes of tiles whose largest magnitudes are ``amax``: uint8, same shape.

    ``amax`` is bf16 or fp32, finite and >= 0; the result is exact for every such value. Bytes range
    from ``recipe.min_byte`` to 247.
    """
    if recipe.rounding != "ceil_log2":
        raise ArgumentError("recipe.rounding", repr(recipe.rounding), "'ceil_log2'", "Correct the row.")
    bits = amax.float().view(torch.int32)
    # amax = 1.m * 2^(e-127) and 448 = 1.75 * 2^8, so the smallest k with amax <= 448 * 2^k is e-127-8,
    # plus one where 1.m > 1.75: no division and no logarithm that could round across a power of two.
    above = (bits & 0x7FFFFF) > 0x600000
    return ((bits >> 23) - 8 + above).clamp_min(recipe.min_byte).to(torch.uint8)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """e4m3fn codes of finite fp32 ``values``: uint8, nearest even, saturating to +-448, sign of 0 kept."""
    # Clamped here because torch's own cast has not always saturated.
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of uint8 e4m3fn codes; 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """fp32 scales ``2^(byte-127)`` of uint8 codes, exact; byte 0 is 2^-127 (subnormal), byte 255 NaN."""
    bits = codes.to(torch.int32) << 23
    # The half-step bit is the top mantissa bit: 2^-127 over exponent 0, a quiet NaN over exponent 255.
    half = (codes == 0) | (codes == 255)
    return torch.where(half, bits | 0x400000, bits).view(torch.float32)
