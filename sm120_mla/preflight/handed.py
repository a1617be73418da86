"""What a FlashInfer release says of a launch that an engine hands over: nothing padded, nothing split.

``envelopes.plan`` answers for calls that go through this project, which pads index rows and splits pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import DECODE_MAX_ROWS, IndexTensor, needs, refusal
from ..envelopes import NOT_SERVED, TILE, Envelope, widths
from .launches import Launch
from .releases import rules

__all__ = ["DSA_DECODE_WIDTHS", "DSA_PREFILL_WIDTHS", "SERVED_HEADS", "Verdict", "handed"]

SERVED_HEADS = (8, 16, 32, 64, 128)
"""Head counts of every kernel family with a fixed grid, and of the public DSv4 function of all releases."""

DSA_DECODE_WIDTHS = (128, 512, 1024, 2048)
"""0.6.14 to 0.6.18, ``_DECODE_DSV3_2_DISPATCH``."""

DSA_PREFILL_WIDTHS = (2048,)
"""0.6.14 to 0.6.18, csrc/sparse_mla_sm120_prefill.cu."""

_MISS_A = "Decode (num_tokens <= 64) must go through sparse_mla_sm120_decode_dsv3_2 or .._decode_dsv4"
_MISS_B = "SM120 sparse-MLA has no decode kernel for this shape"
_PREFILL = "Unsupported sparse-MLA prefill configuration"
_NEWER = "SM120 sparse-MLA has no decode kernel for this shape: .. Mismatch: .."


@dataclass(frozen=True)
class Verdict:
    """``state``: ``ok``, ``refused`` (loudly, at the launch) or ``wrong`` (it runs and reads wrong bytes).

    ``argument``, ``value``, ``expected``: as in ``errors.ArgumentError``. ``says``: FlashInfer's own words.
    """

    state: str
    route: str = ""
    argument: str = ""
    value: str = ""
    expected: str = ""
    says: str = ""

    def __bool__(self) -> bool:
        return self.state == "ok"


def handed(version: str, launch: Launch, public_api: bool) -> Verdict:
    """The verdict of that release. Raises ``ArgumentError`` for one that no table holds."""
    envelope = rules(version)
    if envelope is None:
        release = version.split("+")[0]
        expected = "a release with kernels for SM120"
        return Verdict("refused", "", "flashinfer version", f"{release}: {NOT_SERVED[release]}", expected)
    decode = launch.most <= DECODE_MAX_ROWS
    unchecked = decode and envelope.contract == "A/B"  # the dispatch tables are all that looks
    checks = (_shape, _pages, _views) if unchecked else (_views, _shape, _pages)
    found = [said for check in checks if (said := check(envelope, launch, decode, public_api)) is not None]
    if not found:
        return Verdict("ok", f"flashinfer {'decode' if decode else 'prefill'}")
    # What is refused does not run, so nothing of it reads wrong bytes.
    return next((said for said in found if said.state == "refused"), found[0])


def _says(envelope: Envelope, decode: bool) -> str:
    if envelope.contract == "C/D":
        return _NEWER
    if not decode:
        return _PREFILL
    return _MISS_A if envelope.name == "A" else _MISS_B


def _views(envelope: Envelope, launch: Launch, decode: bool, public_api: bool) -> Verdict | None:
    """Index rows that lie apart. Only the second cache's do, in any engine that was read."""
    cache = launch.extra
    if cache is None or not cache.row_stride:
        return None
    rows, least = launch.most, min(cache.widths)
    tensor = IndexTensor("eidx", (rows, least), (cache.row_stride, 1), "int32")
    said = refusal(tensor, rows, envelope.contract)
    if envelope.contract == "C/D" and not decode and least != cache.row_stride:
        # 0.7 takes strides in decode only (contract.refusal). No candidate is left then, and that is what it
        # says; 0.7.0 says it of the tensor.
        said = "eidx must be contiguous" if envelope.main_page else _NEWER
    value = f"{least} of {cache.row_stride} columns"
    if said is not None:
        return Verdict("refused", "", "extra indices view", value, "contiguous rows", said)
    lacks = needs(tensor, rows, envelope.contract)
    if lacks is not None and rows > 1:
        return Verdict("wrong", "", "extra indices view", value, "contiguous rows", f"nothing: {lacks}")
    return None


def _shape(envelope: Envelope, launch: Launch, decode: bool, public_api: bool) -> Verdict | None:
    says = _says(envelope, decode)
    heads = _head_counts(envelope, launch, decode, public_api)
    if heads is None:
        if not 1 <= launch.heads <= max(SERVED_HEADS):
            return Verdict("refused", "", "heads", str(launch.heads), f"1 to {max(SERVED_HEADS)}", says)
    elif launch.heads not in heads:
        return Verdict("refused", "", "heads", str(launch.heads), _one_of(heads), says)
    width = max(launch.main.widths)
    served = _served_widths(envelope, launch, decode)
    if served is not None and width not in served:
        dual = " with a second cache" if launch.extra is not None and not decode else ""
        return Verdict("refused", "", "indices width", str(width), f"{_one_of(served)}{dual}", says)
    if served is None and not decode and width % TILE:
        return Verdict("refused", "", "indices width", str(width), f"a multiple of {TILE}", says)
    ragged = [n for n in launch.extra.widths if n % TILE] if launch.extra is not None else []
    if ragged and not decode and envelope.gathers_slot_zero:  # the same releases
        said = "nothing: it reads up to 63 columns past each row"
        return Verdict("wrong", "", "extra indices width", str(ragged[0]), f"a multiple of {TILE}", said)
    return None


def _head_counts(
    envelope: Envelope, launch: Launch, decode: bool, public_api: bool
) -> tuple[int, ...] | None:
    if launch.layout == "dsv4":
        if decode and envelope.decode_heads is None:
            return SERVED_HEADS if public_api else None
        return envelope.decode_heads if decode else envelope.prefill_heads
    return None if decode and envelope.contract == "C/D" else SERVED_HEADS


def _served_widths(envelope: Envelope, launch: Launch, decode: bool) -> tuple[int, ...] | None:
    if launch.layout == "dsv4":
        return widths(envelope, launch.most, launch.extra is not None)
    if envelope.contract == "C/D":
        return None
    return DSA_DECODE_WIDTHS if decode else DSA_PREFILL_WIDTHS


def _pages(envelope: Envelope, launch: Launch, decode: bool, public_api: bool) -> Verdict | None:
    served = envelope.prefill_extra_pages
    if not decode and launch.extra is not None and served is not None and launch.extra.page not in served:
        expected = f"{_one_of(served)} tokens"
        return Verdict("refused", "", "extra page size", str(launch.extra.page), expected, _PREFILL)
    page = launch.main.page
    if envelope.main_page in (None, page):
        return None
    expected = f"{envelope.main_page} tokens"
    if decode or envelope.contract == "C/D":
        return Verdict("refused", "", "page size", str(page), expected, _says(envelope, decode))
    said = "nothing: it addresses every page as 64 tokens"
    return Verdict("wrong", "", "page size", str(page), expected, said)


def _one_of(values: tuple[int, ...]) -> str:
    text = ", ".join(map(str, values))
    return f"one of {text}" if len(values) > 1 else text
