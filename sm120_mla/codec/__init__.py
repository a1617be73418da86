"""Quantise, pack, unpack and dequantise the pages of any ``PageLayout``, in plain torch on CPU or CUDA.

The byte-level specification that writers and readers are held to. ``quantise`` looks at values on the
host, so it does not belong in a captured graph. A page may have any number of tokens here; only a split
needs multiples of 64. ``recipe`` holds how scales are chosen and what single codes mean, ``tokens`` the
fields of a token, ``pages`` where their bytes lie.
"""

from .pages import dequantise_pages, pack, pack_pages, unpack, view_field
from .recipe import (
    DEEPSEEK,
    ENGINES,
    FP8_MAX,
    RECIPES,
    SGLANG_TRITON_OLD,
    Recipe,
    decode_e4m3,
    decode_ue8m0,
    encode_e4m3,
    recipe_by_name,
    scale_bytes,
)
from .tokens import Quantised, dequantise, quantise

__all__ = [
    "DEEPSEEK",
    "ENGINES",
    "FP8_MAX",
    "Quantised",
    "RECIPES",
    "Recipe",
    "SGLANG_TRITON_OLD",
    "decode_e4m3",
    "decode_ue8m0",
    "dequantise",
    "dequantise_pages",
    "encode_e4m3",
    "pack",
    "pack_pages",
    "quantise",
    "recipe_by_name",
    "scale_bytes",
    "unpack",
    "view_field",
]
