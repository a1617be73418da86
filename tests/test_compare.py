"""The byte diff: where it says the first difference is, what the byte means, and where it belongs."""

from __future__ import annotations

import pytest
import torch

from sm120_mla.layout import DSV4, DSV32, DSV41_FOOTER, LAYOUTS, SUB_PAGE, PageLayout
from sm120_mla.testing.compare import SubPageDiff, compare_sub_pages
from sm120_mla.testing.guards import noise

SIZE, SUBS = 256, 8


def sub_pages(layout: PageLayout = DSV4, seed: int = 0, tail: int = 0) -> torch.Tensor:
    """Two pages of 256 tokens, split: uint8 ``[8, payload + tail]`` of noise."""
    row = layout.payload(SUB_PAGE) + tail
    return noise(SUBS * row, seed).view(SUBS, row)


def span(layout: PageLayout, field: str, token: int) -> slice:
    start = layout.offset(field, token, SUB_PAGE)
    return slice(start, start + layout.field(field).nbytes)


def diff(got: torch.Tensor, want: torch.Tensor, layout: PageLayout = DSV4, **more: object) -> SubPageDiff:
    found = compare_sub_pages(layout, SIZE, got, want, range(SUBS), **more)  # type: ignore[arg-type]
    assert found is not None
    return found


def one_byte(field: str, within: int, got: int, want: int, layout: PageLayout = DSV4) -> SubPageDiff:
    """Sub-page 6, token 12: one byte of a field is ``got`` instead of ``want``."""
    reference = sub_pages(layout)
    at = layout.offset(field, 12, SUB_PAGE) + within
    reference[6, at] = want
    copied = reference.clone()
    copied[6, at] = got
    return diff(copied, reference, layout)


# ---- the text of one difference


def test_a_scale() -> None:
    found = one_byte("scales", 3, 0x7F, 0x80)

    assert str(found).splitlines() == [
        "page 1 -> sub-page 6, token 12, scale of tile 3 (byte 36,963) of 37,376",
        "got 0x7f (2^0)   want 0x80 (2^1)",
        "nope agrees; rope agrees; 1 of 3,584 scales bytes differ; scale_pad agrees; all in sub-page 6",
    ]
    assert (found.sub_page, found.got, found.want, found.sub_pages) == (6, 0x7F, 0x80, (6,))
    assert (found.location.field, found.location.token, found.location.tile) == ("scales", 12, 3)
    assert found.counts == {"nope": 0, "rope": 0, "scales": 1, "scale_pad": 0}


def test_a_scale_that_is_not_a_number() -> None:
    assert "got 0xff (NaN)   want 0x00 (2^-127)" in str(one_byte("scales", 0, 0xFF, 0x00))


def test_an_fp8_value() -> None:
    found = str(one_byte("nope", 130, 0x38, 0xB0))

    assert "page 1 -> sub-page 6, token 12, nope[130], tile 2 (byte 7,042) of 37,376" in found
    assert "got 0x38 (1)   want 0xb0 (-0.5)" in found
    assert "1 of 229,376 nope bytes differ" in found


def test_an_fp8_value_that_is_not_a_number() -> None:
    assert "got 0x7f (nan)" in str(one_byte("nope", 0, 0x7F, 0x00))


@pytest.mark.parametrize("within", [10, 11])
def test_a_bf16_value_is_shown_whole(within: int) -> None:
    reference = sub_pages()
    at = DSV4.offset("rope", 12, SUB_PAGE)
    reference[6, at + 10], reference[6, at + 11] = 0x80, 0x3F  # 1.0, little-endian
    copied = reference.clone()
    copied[6, at + within] ^= 0x80

    found = str(diff(copied, reference))

    assert f"token 12, rope[5] (byte {at + within:,}) of 37,376" in found
    got = {10: "0x3f00 (0.5)", 11: "0xbf80 (-1)"}[within]
    assert f"got {got}   want 0x3f80 (1)" in found


def test_an_fp32_scale_is_shown_whole() -> None:
    reference = sub_pages(DSV32)
    at = DSV32.offset("scales", 12, SUB_PAGE) + 8
    reference[6, at : at + 4] = torch.tensor([2.0]).view(torch.uint8)
    copied = reference.clone()
    copied[6, at + 3] = 0xC0

    found = str(diff(copied, reference, DSV32))

    assert "token 12, scale of tile 2" in found
    assert "got 0xc0000000 (-2)   want 0x40000000 (2)" in found


def test_a_pad_byte_has_no_value() -> None:
    found = str(one_byte("scale_pad", 0, 0x01, 0x02))

    assert "token 12, pad of the scales (byte 36,967) of 37,376" in found
    assert "got 0x01   want 0x02\n" in found


@pytest.mark.parametrize(("sub_page", "page"), [(0, 0), (3, 0), (4, 1), (7, 1)])
def test_the_page_is_that_of_the_source(sub_page: int, page: int) -> None:
    reference = sub_pages()
    copied = reference.clone()
    copied[sub_page, 0] ^= 1

    assert str(diff(copied, reference)).startswith(f"page {page} -> sub-page {sub_page}, token 0, nope[0]")


# ---- where the bytes belong


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda row: row.name)
def test_bytes_of_another_token_are_recognised(layout: PageLayout) -> None:
    reference = sub_pages(layout)
    for field in layout.fields:
        if field.nbytes < 4:
            continue
        copied = reference.clone()
        copied[6, span(layout, field.name, 12)] = reference[5, span(layout, field.name, 40)]

        found = diff(copied, reference, layout)

        assert f"     equals the {field.name} of token 40 of sub-page 5\n" in str(found)


def test_bytes_found_nowhere_are_not_explained() -> None:
    found = str(one_byte("scales", 0, 1, 2))

    assert "equals" not in found
    assert "never written" not in found


def test_a_field_too_short_to_tell_is_not_explained() -> None:
    reference = sub_pages()
    copied = reference.clone()
    copied[6, span(DSV4, "scale_pad", 12)] = 255 - reference[6, span(DSV4, "scale_pad", 12)]
    reference[5, span(DSV4, "scale_pad", 12)] = copied[6, span(DSV4, "scale_pad", 12)]
    copied[5] = reference[5]

    assert "equals" not in str(diff(copied, reference))


@pytest.mark.parametrize("field", [f.name for f in DSV4.fields])
def test_what_still_holds_the_poison_was_never_written(field: str) -> None:
    reference, poison = sub_pages(), sub_pages(seed=7)
    at = span(DSV4, field, 12)
    poison[6, at] = 255 - reference[6, at]
    copied = reference.clone()
    copied[6, at] = poison[6, at]

    assert "     never written\n" in str(diff(copied, reference, poison=poison))
    assert "never written" not in str(diff(copied, reference, poison=sub_pages(seed=8)))


# ---- counting


def test_differences_are_counted_by_field() -> None:
    reference = sub_pages()
    copied = reference.clone()
    for sub_page, field, token in [(2, "rope", 0), (2, "scales", 63), (5, "scales", 1), (7, "scale_pad", 9)]:
        copied[sub_page, span(DSV4, field, token)] = 255 - copied[sub_page, span(DSV4, field, token)]

    found = diff(copied, reference)

    assert found.counts == {"nope": 0, "rope": 128, "scales": 14, "scale_pad": 1}
    assert found.sub_pages == (2, 5, 7)
    assert (found.sub_page, found.location.field) == (2, "rope")
    assert str(found).splitlines()[-1] == (
        "nope agrees; 128 of 65,536 rope bytes differ; 14 of 3,584 scales bytes differ; "
        "1 of 512 scale_pad bytes differ; in 3 of 8 sub-pages"
    )


def test_only_the_sub_pages_asked_for_are_compared() -> None:
    reference = sub_pages()
    copied = reference.clone()
    copied[3] = 255 - copied[3]

    assert compare_sub_pages(DSV4, SIZE, copied, reference, [0, 1, 2, 4, 7]) is None
    found = compare_sub_pages(DSV4, SIZE, copied, reference, [7, 3])
    assert found is not None
    assert found.sub_pages == (3,)
    assert found.counts == {"nope": 28_672, "rope": 8_192, "scales": 448, "scale_pad": 64}
    assert "of 57,344 nope bytes" in str(found)


def test_nothing_to_compare_is_no_difference() -> None:
    assert compare_sub_pages(DSV4, SIZE, sub_pages(), sub_pages(seed=1), []) is None
    assert compare_sub_pages(DSV4, SIZE, sub_pages(), sub_pages(), range(SUBS)) is None


def test_tails_are_not_compared() -> None:
    got, want = sub_pages(tail=64), sub_pages(tail=64)
    got[:, DSV4.payload(SUB_PAGE) :] = 0

    assert compare_sub_pages(DSV4, SIZE, got, want, range(SUBS)) is None


def test_rows_may_be_longer_than_those_compared_with() -> None:
    got, want = sub_pages(DSV41_FOOTER, tail=100), sub_pages(DSV41_FOOTER)
    got[:, : want.shape[1]] = want

    assert compare_sub_pages(DSV41_FOOTER, SIZE, got, want, range(SUBS)) is None
    got[4, want.shape[1] - 1] ^= 1
    found = compare_sub_pages(DSV41_FOOTER, SIZE, got, want, range(SUBS))
    assert found is not None
    assert "token 63, scale of tile 15" in str(found)
