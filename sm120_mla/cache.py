"""Write K rows into a paged cache: validation and launch (host side of kernels/cache_write.py)."""

from __future__ import annotations

import torch

from . import device
from .codec.recipe import DEEPSEEK, Recipe
from .errors import ArgumentError, IndexValueError, LayoutError, NonFiniteError
from .kernels import cache_write as kernels
from .layout import DSV4, PageGeometry, PageLayout
from .placement import disjoint, pool_geometry, same_device

__all__ = ["write_cache"]

_SLOT_DTYPES = (torch.int32, torch.int64)


def write_cache(
    k: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    *,
    page_size: int | None = None,
    layout: PageLayout = DSV4,
    recipe: Recipe = DEEPSEEK,
    dummy_slot: int | None = None,
    validate: str | None = None,
) -> None:
    """Quantise each row of ``k`` and write it as token ``slot_mapping[row]`` of the cache, in one launch.

    The bytes are those of ``codec.quantise`` and ``codec.pack``, pad included (0), in the interpreter and on
    any GPU. A row whose slot is negative, or at or past ``pages * page_size`` (compared in 64 bits), writes
    nothing, whatever its K. No other byte changes: page tails and other tokens stay as they are.

    Args:
        k: bf16 ``[T, head_dim]``, last dimension dense, any row stride.
        slot_mapping: int32 or int64 ``[T]``, token indices ``page * page_size + slot``, any stride.
        cache: uint8 or float8_e4m3fn, ``[pages, bytes]``, ``[pages, P, b]``, ``[pages, P, 1, b]`` or
            ``[pages, 1, P, b]``; any page stride >= the payload (bytes), any storage offset or alignment.
        page_size: tokens per page, any number; may be left out for 3-D and 4-D caches.
        recipe: how scales are chosen: ``codec.DEEPSEEK``, ``ENGINES`` or ``SGLANG_TRITON_OLD``.
        dummy_slot: the slot that padding rows are sent to (sglang: 0). It gets the bytes of a zero row,
            whatever those rows hold, so that it is finite, and the same after every replay.
        validate: ``values`` also refuses two rows with one slot (other than ``dummy_slot``), a slot at or
            past the end of the cache, and K that is not finite in a row that is written. ``metadata`` does
            not look at values. None: values in reference mode. Never in capture.

    Where values are not looked at: of rows with one slot, each byte is some row's. A tile that holds NaN
    or inf becomes NaN whole, by two signs, as readers differ on either: every code 0x7F, and scale byte
    0xFF (fp32 scales: 0x7FC00000). NaN and inf in the RoPE part are copied bit by bit, as all of it is.

    Raises ``LayoutError``, ``ArgumentError``, ``IndexValueError``, ``NonFiniteError``; then nothing has been
    written. Does not synchronise unless values are looked at, and allocates nothing.
    """
    _check_rows(k, slot_mapping, cache, layout)
    geometry = pool_geometry(cache, page_size, layout, "cache")
    _check_recipe(recipe)
    _check_dummy_slot(dummy_slot, geometry)
    same_device({"cache": cache, "k": k, "slot_mapping": slot_mapping})
    disjoint({"cache": cache}, {"k": k, "slot_mapping": slot_mapping})
    raw = cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
    # Before any value is looked at: it refuses a layout that the kernel cannot write.
    arguments = kernels.arguments(
        k, slot_mapping, raw, geometry, min_byte=recipe.min_byte, dummy_slot=dummy_slot
    )
    if device.validate_values(validate):
        written = _check_slots(slot_mapping, dummy_slot, geometry)
        _check_finite(k, written, layout)
    if k.shape[0] and geometry.pages:
        kernels.write_kernel[kernels.grid(k.shape[0])](**arguments)


def _check_rows(k: object, slot_mapping: object, cache: object, layout: object) -> None:
    for name, value in (("k", k), ("slot_mapping", slot_mapping), ("cache", cache)):
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(name, type(value).__name__, "a torch.Tensor", "Pass a tensor.")
    assert isinstance(k, torch.Tensor)
    assert isinstance(slot_mapping, torch.Tensor)
    if not isinstance(layout, PageLayout):
        raise LayoutError("layout", repr(layout), "a PageLayout", "Use layout.by_name.")
    if k.dtype != torch.bfloat16:
        raise ArgumentError("k.dtype", k.dtype, "torch.bfloat16", "Round it to bf16 first.")
    if k.dim() != 2 or k.shape[1] != layout.head_dim:
        raise LayoutError(
            "k.shape",
            tuple(k.shape),
            f"[T, {layout.head_dim}] ({layout.name})",
            "Reshape it to one row a token.",
        )
    if k.stride(1) != 1:
        raise ArgumentError("k.stride(1)", k.stride(1), "1", "Make each row dense; rows may lie apart.")
    if slot_mapping.dtype not in _SLOT_DTYPES:
        raise ArgumentError(
            "slot_mapping.dtype", slot_mapping.dtype, "torch.int32 or torch.int64", "Convert it."
        )
    if tuple(slot_mapping.shape) != (k.shape[0],):
        raise ArgumentError(
            "slot_mapping.shape",
            tuple(slot_mapping.shape),
            f"({k.shape[0]},), one slot for each row of k",
            "Cut the longer one; give padding rows slot -1.",
        )


def _check_recipe(recipe: object) -> None:
    if not isinstance(recipe, Recipe):
        raise ArgumentError("recipe", repr(recipe), "a codec.Recipe", "Use codec.recipe_by_name.")
    if recipe.rounding != "ceil_log2":
        raise ArgumentError("recipe.rounding", repr(recipe.rounding), "'ceil_log2'", "Correct the row.")
    if not kernels.MIN_FLOOR_BYTE <= recipe.min_byte <= kernels.MAX_FLOOR_BYTE:
        raise ArgumentError(
            "recipe.floor",
            recipe.floor,
            f"one whose smallest scale byte, here {recipe.min_byte}, is in "
            f"[{kernels.MIN_FLOOR_BYTE}, {kernels.MAX_FLOOR_BYTE}]",
            "Correct the row.",
        )


def _check_dummy_slot(dummy_slot: object, geometry: PageGeometry) -> None:
    if dummy_slot is None:
        return
    if isinstance(dummy_slot, bool) or not isinstance(dummy_slot, int):
        raise ArgumentError("dummy_slot", repr(dummy_slot), "an int or None", "Pass a token index.")
    if not 0 <= dummy_slot < geometry.tokens:
        raise IndexValueError(
            "dummy_slot",
            dummy_slot,
            f"a slot in [0, {geometry.tokens}), the tokens of the cache",
            "Leave it out where padding rows have slot -1.",
        )


def _check_slots(slots: torch.Tensor, dummy_slot: int | None, geometry: PageGeometry) -> torch.Tensor:
    """Rows written from K, bool ``[T]``. Refuses slots past the end and duplicates; synchronises."""
    slots = slots.to(torch.int64)  # the end may be past int32
    beyond = slots >= geometry.tokens
    if bool(beyond.any()):
        row = int(beyond.nonzero()[0])
        raise IndexValueError(
            f"slot_mapping[{row}]",
            int(slots[row]),
            f"a slot below {geometry.tokens} ({geometry.pages} pages of {geometry.page_size}), or -1",
            "Check the block table, or pass validate='metadata' to write nothing for such a row.",
        )
    written = slots >= 0
    if dummy_slot is not None:
        written &= slots != dummy_slot
    rows = written.nonzero().flatten()
    ordered, order = slots[rows].sort(stable=True)
    again = ordered[1:] == ordered[:-1]
    if bool(again.any()):
        # Stable, so a pair is in row order; named is the earliest row that repeats a slot.
        firsts, seconds = rows[order[:-1]][again], rows[order[1:]][again]
        pick = int(seconds.argmin())
        row, first = int(seconds[pick]), int(firsts[pick])
        raise IndexValueError(
            f"slot_mapping[{row}]",
            int(slots[row]),
            f"a slot of its own; row {first} has it too",
            "Give padding rows slot -1, or name the slot they share as dummy_slot.",
        )
    return written


def _check_finite(k: torch.Tensor, written: torch.Tensor, layout: PageLayout) -> None:
    """Refuse NaN and inf in the rows that are written. Synchronises."""
    broken = ~torch.isfinite(k) & written[:, None]
    if not bool(broken.any()):
        return
    row, dim = (int(n) for n in broken.nonzero()[0])
    nope = layout.field("nope").count
    where = f"nope, tile {dim // layout.tile}" if dim < nope else f"rope[{dim - nope}]"
    raise NonFiniteError(
        f"k[{row}, {dim}]",
        f"{k[row, dim].item()} (token {row}, {where})",
        "a finite value",
        "Find what produced it; a page cannot hold it.",
    )
