"""Faults of the choice of a backend, and of what is prepared for FlashInfer."""

from __future__ import annotations

from ...targets.own import Patch
from .base import Fault

__all__ = ["ROUTE_FAULTS"]

_ATTENTION = "attention.py"
_TABLES = "envelopes.py"
_BACKEND = "backends/flashinfer.py"
_JOB = "backends/flashinfer_job.py"
_PREPARE = "kernels/fi_prepare.py"
_TOTAL, _CONTRACT = ("ROUTE-TOTAL",), ("ROUTE-CONTRACT",)
_SCALE_SAID = "refusal = _scale_refusal(found, shape.scale)"
_ROWS = 'out=scratch.take(f"{name}-indices", (tokens, width), torch.int32)'


def _fault(
    id: str,
    sentence: str,
    violates: tuple[str, ...],
    cases: tuple[str, ...],
    file: str,
    old: str,
    new: str,
    keeps: tuple[str, ...] = (),
) -> Fault:
    return Fault(id, sentence, violates, cases, (Patch(file, old, new),), keeps)


ROUTE_FAULTS = (
    _fault(
        "width-without-a-kernel",
        "the tables of 0.6.14 have a width that only 0.6.18 has a kernel for",
        _TOTAL,
        ("route-a-150", "route-a-65-wide"),
        _TABLES,
        "decode_widths=(128, 512, 1024),",
        "decode_widths=(128, 192, 512, 1024),",
    ),
    _fault(
        "eight-heads-forgotten",
        "8 heads above 64 rows are refused although 0.6.18 has the kernel",
        _TOTAL,
        ("route-b-65-8-heads",),
        _TABLES,
        "prefill_heads=_HEADS,\n        prefill_widths=(128, 192",
        "prefill_heads=(16, 32, 64, 128),\n        prefill_widths=(128, 192",
    ),
    Fault(
        "refused-after-the-launch",
        "the softmax scale is looked at when the index rows have been prepared",
        _TOTAL,
        ("route-a-tiny-scale",),
        (
            Patch(_BACKEND, _SCALE_SAID, "refusal = _scale_refusal(found, 1.0)"),
            Patch(_BACKEND, "refusal = _scale_refusal(found, call.scale)", "refusal = None"),
            Patch(
                _BACKEND,
                "        _prepare(call, job)\n",
                "        _prepare(call, job)\n"
                "        late = _scale_refusal(found, call.scale)\n"
                "        if late is not None:\n"
                "            raise ArgumentError(late.argument, late.value, late.expected, late.remedy)\n",
            ),
        ),
    ),
    _fault(
        "order-falls-back",
        "a backend that was asked for by name and cannot serve is replaced in silence",
        _TOTAL,
        ("route-c-65-12-heads",),
        _ATTENTION,
        "        backend = _ordered(wish.name, wish.where, shape, like)\n        return backend,",
        "        try:\n"
        "            backend = _ordered(wish.name, wish.where, shape, like)\n"
        "        except ArgumentError:\n"
        '            return _route(shape, like, _Wish(None, "capability", ""))\n'
        "        return backend,",
    ),
    _fault(
        "explained-by-capability",
        "explain does not look at the argument and tells what would be chosen by capability",
        _TOTAL,
        ("route-triton-ordered",),
        _ATTENTION,
        "    return _route(request.shape(want_lse), request.q, wish)[1]",
        '    return _route(request.shape(want_lse), request.q, _Wish(None, "capability", ""))[1]',
    ),
    _fault(
        "12.1-goes-elsewhere",
        "only capability 12.0 is sent to FlashInfer",
        _TOTAL,
        ("route-c-121",),
        _ATTENTION,
        "        if capability[0] == 12:",
        "        if capability == (12, 0):",
    ),
    _fault(
        "scale-refused-by-the-call-only",
        "a softmax scale that undoes the mask of 0.6 is refused by the call and not by what is said of it",
        _TOTAL,
        ("route-a-tiny-scale",),
        _BACKEND,
        _SCALE_SAID,
        "refusal = _scale_refusal(found, 1.0)",
    ),
    _fault(
        "no-backend-no-reason",
        "where no backend serves, the call dies of a lookup",
        _TOTAL,
        ("route-b-layout",),
        _ATTENTION,
        '    raise UnavailableError(\n        "an attention backend for this call",',
        '    raise KeyError(\n        "an attention backend for this call",',
    ),
    _fault(
        "narrow-rows-handed-over",
        "index rows are handed over as a narrow slice of a wider buffer",
        _CONTRACT,
        ("contract-b-65",),
        _JOB,
        _ROWS,
        'out=scratch.take(f"{name}-indices", (tokens, width + 64), torch.int32)[:, :width]',
    ),
    _fault(
        "rows-not-padded",
        "index rows keep the width of the call, which no kernel is for",
        ("ROUTE-CONTRACT", "ROUTE-TOTAL"),
        ("contract-a-2", "route-a-150"),
        _JOB,
        _ROWS,
        'out=scratch.take(f"{name}-indices", (tokens, cache.indices.shape[1]), torch.int32)',
    ),
    _fault(
        "wide-indices-handed-over",
        "indices are handed over as int64, which decode reads as int32 without a look",
        _CONTRACT,
        ("contract-a-2",),
        _JOB,
        _ROWS,
        _ROWS.replace("int32", "int64"),
    ),
    _fault(
        "length-over-holes",
        "a row without a counted entry keeps its length: 0.6 computes garbage for it",
        _CONTRACT,
        ("contract-a-2", "contract-b-65"),
        _PREPARE,
        "    tl.store(lens + row, last, mask=in_rows)",
        "    tl.store(lens + row, tl.maximum(limit, 0).to(tl.int32), mask=in_rows)",
    ),
    _fault(
        "stale-column-handed-over",
        "an index past the pool's end stays in its column",
        _CONTRACT,
        ("contract-a-2",),
        _PREPARE,
        "kept = tl.where(counted, index + shift, -1).to(tl.int32)",
        "kept = tl.where(inside, index + shift, -1).to(tl.int32)",
    ),
    _fault(
        "slot-0-not-cleared",
        "slot 0 of a split cache holds whatever the buffer held",
        _CONTRACT,
        ("contract-a-2", "contract-b-65"),
        _JOB,
        "        zero = pool[0]\n",
        "        zero = None\n",
    ),
    _fault(
        "pages-not-split",
        "pages of 256 tokens are handed to 0.6, which reads them as pages of 64",
        ("ROUTE-CONTRACT", "ROUTE-TOTAL"),
        ("contract-b-65", "route-b-65-256"),
        _TABLES,
        "    main_pages = None if envelope.main_page is None else (envelope.main_page,)",
        "    main_pages = None",
    ),
)
