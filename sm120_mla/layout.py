"""Page layouts as data, and the geometry of a cache view. Imports no torch.

A page of ``P`` tokens holds ``P`` token records of ``token_bytes`` each, then ``P`` footer records of
``footer_bytes`` each (none where everything is inline). ``P * bytes_per_token`` is the payload; the page
stride may be larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import LayoutError

__all__ = [
    "DSV4",
    "DSV32",
    "DSV41_FOOTER",
    "DSV41_INLINE",
    "LAYOUTS",
    "SUB_PAGE",
    "Field",
    "Location",
    "PageGeometry",
    "PageLayout",
    "Span",
    "by_name",
]

SUB_PAGE = 64
"""Tokens of the pages that a split produces."""

_WIDTH = {"e4m3fn": 1, "bf16": 2, "fp32": 4, "ue8m0": 1, "pad": 1}
_CACHE_DTYPES = ("uint8", "float8_e4m3fn")


@dataclass(frozen=True)
class Field:
    """One field of a token.

    ``region`` is ``token`` (the inline record) or ``footer``. ``offset`` is in bytes within that
    record, ``count`` in elements of ``dtype``; ``unit`` says what one element stands for.
    """

    name: str
    region: str
    offset: int
    count: int
    dtype: str
    unit: str

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one token."""
        return self.count * _WIDTH[self.dtype]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _WIDTH[self.dtype]


@dataclass(frozen=True)
class Location:
    """What one byte of a page is: ``field`` is ``tail`` past the payload; then token is -1."""

    byte: int
    token: int
    field: str
    element: int
    tile: int

    def __str__(self) -> str:
        if self.field == "tail":
            return f"byte {self.byte:,} (page tail)"
        if self.field == "scales":
            return f"token {self.token}, scale of tile {self.tile} (byte {self.byte:,})"
        if self.field in ("pad", "scale_pad"):
            return f"token {self.token}, pad of the scales (byte {self.byte:,})"
        where = f", tile {self.tile}" if self.tile >= 0 else ""
        return f"token {self.token}, {self.field}[{self.element}]{where} (byte {self.byte:,})"


@dataclass(frozen=True)
class Span:
    """A run of ``nbytes`` bytes copied from ``source`` (in its page) to ``target`` (in its sub-page)."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class PageLayout:
    """One page format: a row of data. ``tile`` is the number of elements that share a scale.

    ``stride_unit`` is what the field rounds the page stride up to, in bytes; 1 means not at all.
    """

    name: str
    head_dim: int
    tile: int
    fields: tuple[Field, ...]
    stride_unit: int
    source: str

    def __post_init__(self) -> None:
        for region in ("token", "footer"):
            at = 0
            for f in sorted((f for f in self.fields if f.region == region), key=lambda f: f.offset):
                if f.offset != at:
                    raise LayoutError(
                        f"{self.name}.{f.name}.offset", f.offset, f"{at} (bytes)", "Fix the row."
                    )
                at += f.nbytes

    def _region_bytes(self, region: str) -> int:
        return sum(f.nbytes for f in self.fields if f.region == region)

    @property
    def token_bytes(self) -> int:
        """Bytes of the inline record of one token."""
        return self._region_bytes("token")

    @property
    def footer_bytes(self) -> int:
        """Bytes of the footer record of one token; 0 where all is inline."""
        return self._region_bytes("footer")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, inline and footer together."""
        return self.token_bytes + self.footer_bytes

    def field(self, name: str) -> Field:
        """The field called ``name``; raises ``LayoutError`` with the names there are."""
        for f in self.fields:
            if f.name == name:
                return f
        names = ", ".join(f.name for f in self.fields)
        raise LayoutError("field", repr(name), f"one of {names}", "Correct the name.")

    def payload(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` tokens that carry meaning."""
        return page_size * self.bytes_per_token

    def default_stride(self, page_size: int) -> int:
        """Bytes from page to page as the field allocates them: payload rounded up to ``stride_unit``."""
        unit = self.stride_unit
        return -(-self.payload(page_size) // unit) * unit

    def offset(self, field: str, token: int, page_size: int) -> int:
        """Byte, within a page, of ``field`` of ``token``."""
        f = self.field(field)
        if f.region == "token":
            return token * self.token_bytes + f.offset
        return page_size * self.token_bytes + token * self.footer_bytes + f.offset

    def check_page_size(
        self, page_size: int, argument: str = "page_size", multiple_of: int = SUB_PAGE
    ) -> int:
        """``page_size`` if it is a positive multiple; raises ``LayoutError`` otherwise.

        Splitting needs a multiple of 64; to be addressed, any page size will do (``multiple_of=1``).
        """
        if (
            isinstance(page_size, bool)
            or not isinstance(page_size, int)
            or page_size < multiple_of
            or page_size % multiple_of
        ):
            wanted = f"a positive multiple of {multiple_of} tokens" if multiple_of > 1 else "1 token or more"
            raise LayoutError(argument, repr(page_size), wanted, "Pass the page size of the pool, in tokens.")
        return page_size

    def spans(self, page_size: int, sub_page: int) -> tuple[Span, ...]:
        """What makes up sub-page ``sub_page`` (0-based within its page): token records, then footer."""
        data, footer = SUB_PAGE * self.token_bytes, SUB_PAGE * self.footer_bytes
        spans = [Span(sub_page * data, 0, data)]
        if footer:
            spans.append(Span(page_size * self.token_bytes + sub_page * footer, data, footer))
        return tuple(spans)

    def locate(self, byte: int, page_size: int) -> Location:
        """Names token, field, element and tile of a byte of a page of ``page_size`` tokens."""
        if byte < 0:
            raise LayoutError("byte", byte, "an offset >= 0 into a page", "Correct it.")
        data = page_size * self.token_bytes
        if byte >= self.payload(page_size):
            return Location(byte, -1, "tail", -1, -1)
        region = "token" if byte < data else "footer"
        record = self.token_bytes if region == "token" else self.footer_bytes
        token, within = divmod(byte if region == "token" else byte - data, record)
        for f in self.fields:
            if f.region == region and f.offset <= within < f.offset + f.nbytes:
                element = (within - f.offset) // f.item_bytes
                tile = -1
                if f.name == "scales":
                    tile = element
                elif f.dtype == "e4m3fn":
                    tile = element // self.tile
                return Location(byte, token, f.name, element, tile)
        raise AssertionError("fields tile their record")  # __post_init__ checks it

    def resolve(
        self,
        *,
        shape: Sequence[int],
        stride: Sequence[int],
        storage_offset: int,
        dtype: str,
        storage_bytes: int,
        page_size: int | None = None,
        argument: str = "pool",
        multiple_of: int = 1,
    ) -> PageGeometry:
        """Geometry of a cache view, from its metadata alone; see ``PageGeometry``.

        Accepts 2-D ``[pages, bytes]`` (``page_size`` required), 3-D ``[pages, P, bytes_per_token]`` and
        4-D NHD ``[pages, P, 1, b]`` or HND ``[pages, 1, P, b]``. Raises ``LayoutError`` naming the
        argument at fault. Sizes and strides are in elements of one byte; ``multiple_of`` is what the size
        must be divisible by, in tokens.
        """
        shape, stride = tuple(shape), tuple(stride)

        def bad(part: str, value: object, expected: str, remedy: str) -> LayoutError:
            return LayoutError(f"{argument}{part}", value, expected, remedy)

        if dtype not in _CACHE_DTYPES:
            raise bad(".dtype", dtype, f"one of {', '.join(_CACHE_DTYPES)}", "View it as uint8.")
        if len(shape) not in (2, 3, 4):
            raise bad(
                ".shape",
                shape,
                "2, 3 or 4 dimensions",
                f"Pass [pages, bytes], [pages, P, {self.bytes_per_token}] or that with a 1 for the head.",
            )
        if stride[-1] != 1 and shape[-1] > 1:
            raise bad(".stride(-1)", stride[-1], "1", "Pass a view whose last dimension is dense.")
        pages = shape[0]
        if len(shape) == 2:
            if page_size is None:
                raise bad(".shape", shape, "page_size given for a 2-D pool", "Pass page_size, in tokens.")
            tokens = self.check_page_size(page_size, multiple_of=multiple_of)
            if shape[1] < self.payload(tokens):
                raise bad(
                    ".shape[1]",
                    shape[1],
                    f"at least {self.payload(tokens):,} bytes, the payload of {tokens} tokens",
                    "Pass the whole page, or the page size the pool was made with.",
                )
        else:
            tokens = self._tokens_of_view(shape, stride, argument)
            if page_size is not None and page_size != tokens:
                raise LayoutError(
                    "page_size", page_size, f"{tokens}, as {argument}.shape says", "Leave it out."
                )
            self.check_page_size(tokens, f"{argument} page size", multiple_of)
        page_stride = stride[0] if pages > 1 else self.default_stride(tokens)
        payload = self.payload(tokens)
        if page_stride < payload:
            kind = "an expanded view" if page_stride == 0 else "pages that overlap"
            raise bad(
                ".stride(0)",
                page_stride,
                f"at least {payload:,} bytes, the payload of a page of {tokens} tokens",
                f"This is {kind}; pass the pool itself.",
            )
        need = storage_offset + max(pages - 1, 0) * page_stride + (payload if pages else 0)
        if need > storage_bytes:
            raise bad(
                " storage", storage_bytes, f"at least {need:,} bytes", "Pass a view inside its storage."
            )
        return PageGeometry(self, tokens, pages, page_stride, storage_offset, dtype)

    def _tokens_of_view(self, shape: tuple[int, ...], stride: tuple[int, ...], argument: str) -> int:
        token = self.bytes_per_token
        if shape[-1] != token:
            raise LayoutError(
                f"{argument}.shape[-1]",
                shape[-1],
                f"{token} bytes, one token of layout {self.name}",
                "Name the layout, or pass a 2-D view of whole pages.",
            )
        axes = [1] if len(shape) == 3 else [d for d in (1, 2) if shape[3 - d] == 1]
        if not axes:
            raise LayoutError(
                f"{argument}.shape",
                shape,
                "one head: [pages, P, 1, b] or [pages, 1, P, b]",
                "MLA has one KV head; pass one.",
            )
        if len(axes) == 2 and shape[1] != shape[2]:
            raise AssertionError("two singleton axes are equal")
        axis = axes[0]
        if shape[axis] > 1 and stride[axis] != token:
            raise LayoutError(
                f"{argument}.stride({axis})",
                stride[axis],
                f"{token} bytes from token to token (nominal)",
                "Pass the view as the engine makes it: dense within the page.",
            )
        return shape[axis]


@dataclass(frozen=True)
class PageGeometry:
    """Where the pages of one view lie: all in bytes, from the start of the storage."""

    layout: PageLayout
    page_size: int
    pages: int
    page_stride: int
    storage_offset: int
    dtype: str

    @property
    def tokens(self) -> int:
        """Token indices below this are in the pool."""
        return self.pages * self.page_size

    @property
    def sub_pages_per_page(self) -> int:
        """Sub-pages of 64 tokens that one page splits into."""
        return self.page_size // SUB_PAGE

    @property
    def sub_pages(self) -> int:
        """Sub-pages of 64 tokens that the whole pool splits into."""
        return self.pages * self.sub_pages_per_page

    def lane_bytes(self, base_address: int) -> int:
        """Widest load, 16 down to 1 bytes, that is aligned at every record of every page.

        ``base_address`` is the address of page 0.
        """
        steps = [base_address, SUB_PAGE * self.layout.token_bytes]
        steps.append(self.page_size * self.layout.token_bytes)
        if self.layout.footer_bytes:
            steps.append(SUB_PAGE * self.layout.footer_bytes)
        if self.pages > 1:
            steps.append(self.page_stride)
        return next(n for n in (16, 8, 4, 2, 1) if all(s % n == 0 for s in steps))

    def require_lane(self, base_address: int, lane: int, argument: str = "pool") -> None:
        """Raises ``LayoutError`` where a backend needs ``lane``-byte loads and the view forbids them."""
        have = self.lane_bytes(base_address)
        if have < lane:
            raise LayoutError(
                f"{argument} alignment",
                f"{have} bytes (page stride {self.page_stride:,}, first page at {base_address:#x})",
                f"{lane}-byte alignment of every page",
                "Allocate the pool with an aligned base and page stride, or use another backend.",
            )


_FMLA = "FlashMLA tests/quant.py, commit 9241ae3"

DSV4 = PageLayout(
    name="dsv4",
    head_dim=512,
    tile=64,
    fields=(
        Field("nope", "token", 0, 448, "e4m3fn", "fp8 value, times its tile's scale"),
        Field("rope", "token", 448, 64, "bf16", "value"),
        Field("scales", "footer", 0, 7, "ue8m0", "scale 2^(byte-127) of one 64-wide tile"),
        Field("scale_pad", "footer", 7, 1, "pad", "none"),
    ),
    stride_unit=576,
    source=f"{_FMLA} (MODEL1)",
)
"""DeepSeek-V4: 584 bytes a token, the scales in the page's footer."""

DSV32 = PageLayout(
    name="dsv32",
    head_dim=576,
    tile=128,
    fields=(
        Field("nope", "token", 0, 512, "e4m3fn", "fp8 value, times its tile's scale"),
        Field("scales", "token", 512, 4, "fp32", "scale of one 128-wide tile"),
        Field("rope", "token", 528, 64, "bf16", "value"),
    ),
    stride_unit=1,
    source=f"{_FMLA} (V32); FlashInfer 0.6.18 kv_cache_traits.cuh:45-93",
)
"""DeepSeek-V3.2 and GLM DSA: 656 bytes a token, all inline."""

DSV41_FOOTER = PageLayout(
    name="dsv41",
    head_dim=512,
    tile=32,
    fields=(
        Field("nope", "token", 0, 512, "e4m3fn", "fp8 value, times its group's scale"),
        Field("scales", "footer", 0, 16, "ue8m0", "scale 2^(byte-127) of one 32-wide group"),
    ),
    stride_unit=1,
    source="FlashInfer 0.7.4 attention/sparse_mla_sm120/model/dsv41_layout.cuh (DSV4_1)",
)
"""DeepSeek-V4.1, footer form: 528 bytes a token; all 512 dimensions are fp8."""

DSV41_INLINE = PageLayout(
    name="dsv41_inline",
    head_dim=512,
    tile=32,
    fields=(
        Field("nope", "token", 0, 512, "e4m3fn", "fp8 value, times its group's scale"),
        Field("scales", "token", 512, 16, "ue8m0", "scale 2^(byte-127) of one 32-wide group"),
    ),
    stride_unit=1,
    source="FlashInfer 0.7.4 attention/sparse_mla_sm120/model/dsv41_layout.cuh (DSV4_1_INLINE)",
)
"""DeepSeek-V4.1, inline form: 528 bytes a token. Cannot be told from the footer form by shape."""

LAYOUTS = (DSV4, DSV32, DSV41_FOOTER, DSV41_INLINE)


def by_name(name: str) -> PageLayout:
    """The layout called ``name``; raises ``LayoutError`` with the names there are."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    names = ", ".join(row.name for row in LAYOUTS)
    raise LayoutError("layout", repr(name), f"one of {names}", "Correct the name.")
