"""The byte diff: which page, token, field and unit differs, what it means, and where those bytes belong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..layout import SUB_PAGE, Location, PageLayout

__all__ = ["SubPageDiff", "compare_sub_pages", "meaning"]


@dataclass(frozen=True)
class SubPageDiff:
    """The first difference among some sub-pages, and how many there are by field."""

    sub_page: int
    location: Location
    got: int
    want: int
    counts: dict[str, int]
    sub_pages: tuple[int, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def meaning(layout: PageLayout, location: Location, record: torch.Tensor, within: int) -> str:
    """What one byte stands for: ``0x7f (2^0)`` for a scale, a value for fp8 and bf16.

    ``record`` is the sub-page's bytes, ``within`` the byte's place in it.
    """
    byte = int(record[within])
    if location.field == "tail" or location.field.endswith("pad"):
        return f"0x{byte:02x}"
    field = layout.field(location.field)
    if field.dtype == "ue8m0":
        return f"0x{byte:02x} (2^{byte - 127})" if byte != 255 else "0xff (NaN)"
    if field.dtype == "e4m3fn":
        return f"0x{byte:02x} ({_e4m3(byte)})"
    start = within - (within - layout.offset(field.name, location.token, SUB_PAGE)) % field.item_bytes
    raw = record[start : start + field.item_bytes].contiguous()
    kind = torch.bfloat16 if field.dtype == "bf16" else torch.float32
    word = int.from_bytes(bytes(raw.tolist()), "little")
    return f"0x{word:0{2 * field.item_bytes}x} ({float(raw.view(kind)):g})"


def _e4m3(byte: int) -> str:
    value = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return f"{float(value):g}"


def compare_sub_pages(
    layout: PageLayout,
    page_size: int,
    got: torch.Tensor,
    want: torch.Tensor,
    which: Iterable[int],
    poison: torch.Tensor | None = None,
) -> SubPageDiff | None:
    """Compare sub-pages ``which`` of ``got`` and ``want``, uint8 ``[rows, >= payload]``; None where equal.

    ``poison`` is what the destination held before: bytes that equal it were never written.
    """
    payload = layout.payload(SUB_PAGE)
    numbers = sorted(which)
    if not numbers:
        return None
    rows = torch.tensor(numbers)
    differs = got[rows, :payload] != want[rows, :payload]
    if not bool(differs.any()):
        return None
    line, within = (int(n) for n in differs.nonzero()[0])
    sub_page = numbers[line]
    location = layout.locate(within, SUB_PAGE)
    wrong = tuple(numbers[i] for i in differs.any(dim=1).nonzero().flatten().tolist())
    counts = _counts(layout, differs)
    lines = [
        f"page {sub_page * SUB_PAGE // page_size} -> sub-page {sub_page}, {location} of {payload:,}",
        f"got {meaning(layout, location, got[sub_page], within)}   "
        f"want {meaning(layout, location, want[sub_page], within)}"
        + _origin(layout, got, want, sub_page, location, poison),
        _summary(layout, counts, wrong, differs.shape[0]),
    ]
    return SubPageDiff(
        sub_page,
        location,
        int(got[sub_page, within]),
        int(want[sub_page, within]),
        counts,
        wrong,
        tuple(lines),
    )


def _counts(layout: PageLayout, differs: torch.Tensor) -> dict[str, int]:
    """Differing bytes by field, in layout order."""
    per_byte, counts = differs.sum(dim=0), {}
    for field in layout.fields:
        record = layout.token_bytes if field.region == "token" else layout.footer_bytes
        first = layout.offset(field.name, 0, SUB_PAGE) + torch.arange(SUB_PAGE) * record
        counts[field.name] = int(per_byte[first[:, None] + torch.arange(field.nbytes)].sum())
    return counts


def _summary(layout: PageLayout, counts: dict[str, int], wrong: tuple[int, ...], compared: int) -> str:
    parts = []
    for name, count in counts.items():
        total = layout.field(name).nbytes * SUB_PAGE * compared
        parts.append(f"{count:,} of {total:,} {name} bytes differ" if count else f"{name} agrees")
    where = f"all in sub-page {wrong[0]}" if len(wrong) == 1 else f"in {len(wrong)} of {compared} sub-pages"
    return f"{'; '.join(parts)}; {where}"


def _origin(
    layout: PageLayout,
    got: torch.Tensor,
    want: torch.Tensor,
    sub_page: int,
    location: Location,
    poison: torch.Tensor | None,
) -> str:
    """Where the bytes of the wrong field do belong, looked up over every token of the reference."""
    field = layout.field(location.field)
    start = layout.offset(field.name, location.token, SUB_PAGE)
    run = got[sub_page, start : start + field.nbytes]
    if poison is not None and torch.equal(run, poison[sub_page, start : start + field.nbytes]):
        return "     never written"
    if field.nbytes < 4:
        return ""
    record = layout.token_bytes if field.region == "token" else layout.footer_bytes
    base = layout.offset(field.name, 0, SUB_PAGE)
    table = torch.as_strided(
        want,
        (want.shape[0], SUB_PAGE, field.nbytes),
        (want.stride(0), record, 1),
        want.storage_offset() + base,
    )
    hits = (table == run).all(dim=2).nonzero()
    if hits.shape[0]:
        page, token = (int(n) for n in hits[0])
        return f"     equals the {field.name} of token {token} of sub-page {page}"
    return ""
