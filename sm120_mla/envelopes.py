"""What each FlashInfer release serves of sparse MLA on SM120: version tables as data, shapes as numbers.

Imports no torch. Read in the sources of the wheels of 0.6.14, 0.6.16.post4, 0.6.17, 0.6.18, 0.6.18.post1,
0.7.0, 0.7.1, 0.7.2 and 0.7.4; what lies between two equal ones is taken to be the same. Decode tables:
mla/_sparse_mla_sm120.py (``_DECODE_DSV4_DISPATCH``); prefill tables: csrc/sparse_mla_sm120_prefill.cu (0.6)
and csrc/sparse_mla_sm120/attention_resolve.cu (0.7.1 on). ``backends.flashinfer_api`` finds the installed
one by what it says of itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .contract import DECODE_MAX_ROWS
from .errors import ArgumentError

__all__ = [
    "ARITHMETIC",
    "ENVELOPES",
    "NOT_SERVED",
    "TILE",
    "VERSIONS",
    "Arithmetic",
    "CacheNumbers",
    "CallNumbers",
    "Envelope",
    "Plan",
    "Refusal",
    "by_name",
    "for_version",
    "plan",
    "widths",
]

TILE = 64
"""Index columns of one step of every kernel, and tokens of the page that 0.6 wants."""

_MAX_HEADS = 128
_LANE = 16  # bytes; rows are moved by cp.async.bulk
_INT32 = 1 << 31
_REMEDY = "Use the triton backend, which takes any shape."


class CacheNumbers(Protocol):
    """A cache and its index rows, as ``backends.base.CacheShape`` has them; strides and lanes in bytes."""

    @property
    def page_size(self) -> int: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_stride(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def lane_bytes(self) -> int: ...


class CallNumbers(Protocol):
    """A call, as ``backends.base.AttentionShape`` has it."""

    @property
    def layout(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def main(self) -> CacheNumbers: ...
    @property
    def extra(self) -> CacheNumbers | None: ...


@dataclass(frozen=True)
class Envelope:
    """The rules of one generation, for the DSv4 page format.

    None for heads, widths or pages: any (heads up to 128, widths in multiples of 64). ``contract`` names the
    rules on tensors (``contract.GENERATIONS``).
    """

    name: str
    contract: str
    decode_heads: tuple[int, ...] | None
    decode_widths: tuple[int, ...] | None
    prefill_heads: tuple[int, ...]
    prefill_widths: tuple[int, ...] | None
    prefill_dual_widths: tuple[int, ...] | None
    main_page: int | None
    prefill_extra_pages: tuple[int, ...] | None
    gathers_slot_zero: bool
    """A masked column reads slot 0 of its cache: those bytes must be finite. Else it reads a row of zeros."""
    masks_before_scale: bool
    """The mask of -1e30 is multiplied by the softmax scale: a tiny or negative scale undoes it."""
    natural_lse: bool
    """The LSE comes in natural units on request, and -inf for an empty row. Else base 2 and -1e30."""
    scratch_heads_unit: int
    """Scratch has heads rounded up to this; 8 heads are never rounded."""
    warm_up: bool
    """A shape must have run once before a capture."""
    known: tuple[str, ...] = ()
    """Defects of the release that no caller can avoid."""


_HEADS = (8, 16, 32, 64, 128)
_HANG = "prefill (65 rows and more) may hang: FlashInfer issue 3700, mended in 0.6.18"

ENVELOPES: tuple[Envelope, ...] = (
    Envelope(
        name="A",
        contract="A/B",
        decode_heads=_HEADS,
        decode_widths=(128, 512, 1024),
        prefill_heads=(16, 32, 64, 128),
        prefill_widths=(128, 512, 1024, 2048),
        prefill_dual_widths=(128,),
        main_page=TILE,
        prefill_extra_pages=(2, TILE),
        gathers_slot_zero=True,
        masks_before_scale=True,
        natural_lse=False,
        scratch_heads_unit=1,
        warm_up=False,
        known=(_HANG,),
    ),
    Envelope(
        name="B",
        contract="A/B",
        decode_heads=_HEADS,
        decode_widths=(128, 192, 256, 512, 1024),
        prefill_heads=_HEADS,
        prefill_widths=(128, 192, 256, 512, 1024, 2048),
        prefill_dual_widths=(128,),
        main_page=TILE,
        prefill_extra_pages=(2, TILE),
        gathers_slot_zero=True,
        masks_before_scale=True,
        natural_lse=False,
        scratch_heads_unit=1,
        warm_up=False,
    ),
    Envelope(
        name="C",
        contract="C/D",
        decode_heads=None,
        decode_widths=None,
        prefill_heads=_HEADS,
        prefill_widths=None,
        prefill_dual_widths=None,
        main_page=None,
        prefill_extra_pages=None,
        gathers_slot_zero=False,
        masks_before_scale=False,
        natural_lse=True,
        scratch_heads_unit=16,
        warm_up=True,
    ),
)

VERSIONS: dict[str, str] = {
    **dict.fromkeys(("0.6.14", "0.6.15", "0.6.15.post1", "0.6.16", "0.6.16.post1", "0.6.16.post2"), "A"),
    **dict.fromkeys(("0.6.16.post3", "0.6.16.post4", "0.6.17"), "A"),
    **dict.fromkeys(("0.6.18", "0.6.18.post1"), "B"),
    **dict.fromkeys(("0.7.1", "0.7.2", "0.7.2.post1", "0.7.4"), "C"),
}
"""Envelope of each release that is served."""

NOT_SERVED: dict[str, str] = {
    "0.6.13": "has no SM120 kernels for sparse MLA",
    **dict.fromkeys(
        ("0.7.0", "0.7.0.post1"),
        "lies between the generations: pages of 64 tokens only, as 0.6, behind the wrapper of 0.7",
    ),
}
"""Releases that are known and refused, and why."""


@dataclass(frozen=True)
class Arithmetic:
    """How far the kernels stand from exact attention over the dequantised cache.

    ``out_rms``: relative RMS error of a call's output, and ``row_cosine``: smallest cosine of the output of
    one row and head, both for scores that spread by about 1 or less (decode rounds q, so the error of P grows
    with the scores). ``score``: standard deviation of the error of a decode score, in units of
    ``scale * sqrt(sum((q_d k_d)^2))`` over the 448 NoPE dimensions; natural units. The LSE of a row errs by
    no more than its worst score.
    """

    out_rms: float
    row_cosine: float
    score: float
    source: str


ARITHMETIC = Arithmetic(
    out_rms=0.045,
    row_cosine=0.995,
    score=0.032,
    source=(
        "P times the scale of V is rounded to e4m3 per head, 64 columns and 64 entries in every kernel, and "
        "q to e4m3 in decode (decode_dsv4_kernel.cuh:560-640, fp8_quant.cuh:67-118 at 0.6.18); the tests "
        "emulate both"
    ),
)


def by_name(name: str) -> Envelope:
    """The envelope called ``name``; raises ``ArgumentError`` with the names there are."""
    for envelope in ENVELOPES:
        if envelope.name == name:
            return envelope
    names = ", ".join(e.name for e in ENVELOPES)
    raise ArgumentError("envelope", repr(name), f"one of {names}", "Correct the name.")


def for_version(version: str) -> Envelope:
    """Envelope of a release by its number; a local part (``+cu130``) does not count.

    Raises ``ArgumentError`` for one that is not in the tables, or in ``NOT_SERVED``.
    """
    release = version.split("+")[0]
    if release in VERSIONS:
        return by_name(VERSIONS[release])
    why = f" ({release} {NOT_SERVED[release]})" if release in NOT_SERVED else ""
    raise ArgumentError(
        "flashinfer version",
        repr(version),
        f"one of {', '.join(VERSIONS)}{why}",
        "Install one of these, or use the triton backend.",
    )


@dataclass(frozen=True)
class Plan:
    """How a call is put to FlashInfer. Widths in columns; ``extra_width`` 0: there is no second cache.

    ``splits`` partial results in scratch of ``scratch_heads`` heads, both 0 where none is needed.
    ``finite_slot_zero`` names the pools that are handed over as they are although masked columns read
    their slot 0: the caller must keep those 584 bytes finite.
    """

    kernel: str
    main_width: int
    extra_width: int
    split_main: bool
    split_extra: bool
    splits: int
    scratch_heads: int
    finite_slot_zero: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why a call is not served, in the terms of ``errors.ArgumentError``."""

    argument: str
    value: object
    expected: str
    remedy: str


def widths(envelope: Envelope, tokens: int, dual: bool) -> tuple[int, ...] | None:
    """Main widths that a call of that many rows may have; None: any multiple of 64."""
    if tokens <= DECODE_MAX_ROWS:
        return envelope.decode_widths
    return envelope.prefill_dual_widths if dual else envelope.prefill_widths


def plan(envelope: Envelope, call: CallNumbers) -> Plan | Refusal:
    """How the generation serves a call, or why it does not. A pure function.

    A second cache without columns counts as none. Index rows are padded up to a width that is served.
    """
    if call.layout != "dsv4":
        return Refusal("layout", repr(call.layout), "'dsv4'", _REMEDY)
    if call.tokens < 1:
        return Refusal("q rows", call.tokens, "at least one", "Return empty results for an empty batch.")
    extra = call.extra if call.extra is not None and call.extra.width > 0 else None
    decode = call.tokens <= DECODE_MAX_ROWS
    refusal = _heads(envelope, call.heads, decode)
    if refusal is not None:
        return refusal
    main_width = _main_width(envelope, call, extra is not None)
    if isinstance(main_width, Refusal):
        return main_width
    main_pages = None if envelope.main_page is None else (envelope.main_page,)
    split_main = _split(envelope, "kv_cache", call.main, main_pages, decode)
    if isinstance(split_main, Refusal):
        return split_main
    split_extra = False
    if extra is not None:
        pages = None if decode else envelope.prefill_extra_pages
        prefer = envelope.prefill_extra_pages  # so that both sides of 64 rows see one page size
        found = _split(envelope, "extra_kv_cache", extra, pages, decode, prefer)
        if isinstance(found, Refusal):
            return found
        split_extra = found
    extra_width = 0 if extra is None else _up(extra.width, TILE)
    whole = [("kv_cache", split_main)] + ([("extra_kv_cache", split_extra)] if extra is not None else [])
    return Plan(
        kernel="decode" if decode else "prefill",
        main_width=main_width,
        extra_width=extra_width,
        split_main=split_main,
        split_extra=split_extra,
        splits=(main_width + extra_width) // TILE if decode else 0,
        scratch_heads=_scratch_heads(envelope, call.heads) if decode else 0,
        finite_slot_zero=tuple(n for n, split in whole if envelope.gathers_slot_zero and not split),
    )


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _scratch_heads(envelope: Envelope, heads: int) -> int:
    return heads if heads == 8 else _up(heads, envelope.scratch_heads_unit)


def _takes(served: tuple[int, ...] | None, heads: int) -> bool:
    return 1 <= heads <= _MAX_HEADS if served is None else heads in served


def _heads(envelope: Envelope, heads: int, decode: bool) -> Refusal | None:
    served = envelope.decode_heads if decode else envelope.prefill_heads
    if _takes(served, heads):
        return None
    said = f"1 to {_MAX_HEADS}" if served is None else f"one of {', '.join(map(str, served))}"
    near = min(served or (1, _MAX_HEADS), key=lambda h: (h < heads, abs(h - heads)))
    rows = "up to" if decode else "above"
    fewer = not decode and _takes(envelope.decode_heads, heads)
    less = f", or calls of up to {DECODE_MAX_ROWS} rows" if fewer else ""
    return Refusal(
        "query heads",
        heads,
        f"{said} ({rows} {DECODE_MAX_ROWS} rows)",
        f"Nearest that works: {near} heads{less}. {_REMEDY}",
    )


def _main_width(envelope: Envelope, call: CallNumbers, dual: bool) -> int | Refusal:
    served = widths(envelope, call.tokens, dual)
    wanted = max(call.main.width, 1)
    if served is None:
        return _up(wanted, TILE)
    fits = [width for width in served if width >= wanted]
    if fits:
        return min(fits)
    other = ("fewer", DECODE_MAX_ROWS) if call.tokens > DECODE_MAX_ROWS else ("more", DECODE_MAX_ROWS + 1)
    elsewhere = widths(envelope, other[1], dual)
    less = f", or {other[1]} rows or {other[0]}" if elsewhere is None or max(elsewhere) >= wanted else ""
    return Refusal(
        "indices width",
        call.main.width,
        f"at most {max(served)} columns for {call.tokens} rows{' and a second cache' if dual else ''}",
        f"Nearest that works: {max(served)} columns{less}. {_REMEDY}",
    )


def _split(
    envelope: Envelope,
    argument: str,
    cache: CacheNumbers,
    served: tuple[int, ...] | None,
    decode: bool,
    prefer: tuple[int, ...] | None = None,
) -> bool | Refusal:
    """Whether a cache must be split into pages of 64. ``served``: page sizes taken as they are; None: any."""
    size = cache.page_size
    splits = size > TILE and size % TILE == 0
    first_token = TILE  # what goes before the pages of a split
    if cache.pages * size + first_token >= _INT32:
        return Refusal(
            f"{argument} tokens", cache.pages * size, "fewer than 2^31 - 64, as indices are int32", _REMEDY
        )
    wanted = served if served is not None else prefer
    if splits and wanted is not None and size not in wanted:
        return True
    if served is not None and size not in served:
        near = ", ".join(map(str, served))
        less = f" Nearest that works: calls of up to {DECODE_MAX_ROWS} rows." if prefer and not decode else ""
        return Refusal(
            f"{argument} page size",
            size,
            f"{near} or a multiple of {TILE} tokens",
            f"Nearest that works: pages of {max(served)}.{less} {_REMEDY}",
        )
    if cache.lane_bytes < _LANE and cache.pages:
        return Refusal(
            f"{argument} alignment",
            f"{cache.lane_bytes} bytes",
            f"{_LANE}-byte alignment of the first page and of the page stride ({cache.page_stride:,} bytes)",
            "Allocate the pool so, or use the triton backend.",
        )
    return False
