"""Case: the input of one check, as data. Frozen, printable, JSON; tensors are derived from it.

A case holds numbers only. What is drawn at random inside it (index values, page bytes) comes from its own
``seed``, so a dozen integers shrink and print, and the same file serves tests, replay, faults and bisect.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from .errors import CaseFileError
from .layout import SUB_PAGE, PageLayout, by_name

__all__ = [
    "ENTRY_KINDS",
    "LENGTH_KINDS",
    "SCHEMA_VERSION",
    "Case",
    "AttnCase",
    "CacheSpec",
    "CaseFile",
    "IndexSpec",
    "MetaBatch",
    "MetaCase",
    "Offset64Case",
    "OrderCase",
    "RouteCase",
    "SplitCase",
    "Step",
    "SubjectCase",
    "WriteCase",
    "load",
    "save",
]

SCHEMA_VERSION = 1

EntryKind = Literal[
    "valid", "window", "duplicate", "minus_one", "negative", "int_min", "past_end", "int_max", "wide"
]
ENTRY_KINDS: tuple[str, ...] = get_args(EntryKind)
"""Index entries: a random or window token, a copy of another entry, and everything that is no token.

``past_end`` lies within two pages past the pool's end; ``wide`` needs 64 bits, and its low 32 bits name a
token of the pool.
"""

LengthKind = Literal["none", "full", "zero", "random", "negative", "beyond"]
LENGTH_KINDS: tuple[str, ...] = get_args(LengthKind)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class IndexSpec(_Frozen):
    """Index rows of one call, and their lengths."""

    rows: int = Field(ge=0, le=4096)
    """Rows T."""
    width: int = Field(ge=0, le=8192)
    """Columns k."""
    kinds: tuple[EntryKind, ...] = ("valid",)
    """What each entry may be; empty means all -1."""
    rank: Literal[2, 3] = 2
    """[T, k] or [T, 1, k]."""
    dtype: Literal["int32", "int64"] = "int32"
    row_gap: int = Field(default=0, ge=0, le=4096)
    """Elements between the end of a row and the next."""
    lengths: LengthKind = "none"
    length_dtype: Literal["int32", "int64"] = "int32"
    length_rank: Literal[1, 2] = 1
    """[T] or [T, 1]."""
    seed: int = 0

    @model_validator(mode="after")
    def _wide_needs_64_bits(self) -> IndexSpec:
        if "wide" in self.kinds and self.dtype != "int64":
            raise ValueError("entries of kind 'wide' need dtype 'int64'")
        return self


class SplitCase(_Frozen):
    """A pool and the split calls made on it, one after another; an entry of None splits the whole pool."""

    kind: Literal["split"] = "split"
    layout: str = "dsv4"
    page_size: int = 256
    """Tokens per page."""
    pages: int = Field(default=2, ge=0, le=4096)
    stride_gap: int = Field(default=0, ge=0)
    """Bytes from the end of a page's payload to the next page."""
    offset: int = Field(default=0, ge=0, le=1 << 20)
    """Bytes before page 0 in its storage, on top of the guard zone."""
    view: Literal["2d", "3d", "nhd", "hnd"] = "2d"
    dtype: Literal["uint8", "float8_e4m3fn"] = "uint8"
    calls: tuple[IndexSpec | None, ...] = (None,)
    spare_pages: int = Field(default=2, ge=0, le=64)
    """Pages the destination is reserved for beyond the pool: room in which a stray write shows."""
    seed: int = 0

    @model_validator(mode="after")
    def _known(self) -> SplitCase:
        self.page_layout.check_page_size(self.page_size)
        return self

    @property
    def page_layout(self) -> PageLayout:
        """The layout row."""
        return by_name(self.layout)

    @property
    def page_stride(self) -> int:
        """Bytes from page to page."""
        return self.page_layout.payload(self.page_size) + self.stride_gap

    @property
    def sub_pages(self) -> int:
        """64-token sub-pages of the pool."""
        return self.pages * self.page_size // SUB_PAGE


class Offset64Case(_Frozen):
    """A pool of untouched virtual memory, a few pages of which are written and split."""

    kind: Literal["offset64"] = "offset64"
    layout: str = "dsv4"
    page_size: int = 256
    page_stride: int = 149_760
    """Bytes from page to page."""
    boundary_bits: Literal[31, 32] = 31
    """Pages on either side of 2**boundary_bits bytes are looked at."""
    full: bool = False
    """Whether the whole pool is split (touches all of it: for machines with the memory)."""
    seed: int = 0


class MetaBatch(_Frozen):
    """One step's batch, as the C128A builder gets it: decode rows first, then prefill rows."""

    decode: int = Field(default=2, ge=0, le=1100)
    prefill: int = Field(default=0, ge=0, le=1100)
    padding: int = Field(default=0, ge=0, le=1100)
    """Rows of a captured batch beyond the real decode rows: slot -1, everything else garbage."""
    max_seq_len: int = Field(default=1024, ge=0)
    """Tokens of the longest sequence; the active width follows from it."""
    width_seq: int | None = Field(default=None, ge=0)
    """Tokens the active width is computed from, where that is not ``max_seq_len``."""
    dtype: Literal["int32", "int64"] = "int32"
    """Of positions and slots."""
    short: bool = False
    """Positions all below the compress ratio: no row has an entry."""
    seed: int = 0


class MetaCase(_Frozen):
    """C128A builds, one after another into the same buffers, on a pretended GPU."""

    kind: Literal["meta"] = "meta"
    capability: tuple[int, int] | None = (12, 0)
    max_model_len: int = Field(default=65_536, ge=1, le=1 << 21)
    """Tokens; the buffers' capacity follows from it."""
    block_size: int = Field(default=2, ge=1, le=256)
    requests: int = Field(default=5, ge=1, le=64)
    table_gap: int = Field(default=0, ge=0, le=64)
    """Columns between the end of a block-table row and the next."""
    builds: tuple[MetaBatch, ...] = (MetaBatch(),)
    seed: int = 0


StepKind = Literal[
    "load",
    "split",
    "warm_up",
    "torch_write",
    "reserve",
    "capture",
    "replay",
    "grow",
    "drop_graph",
    "second_device",
    "second_layout",
    "second_scope",
    "restart",
    "autotune",
    "build",
    "prefill",
    "capture_step",
    "serve",
]


_BARE = ("restart", "reserve", "torch_write")
_BATCHED = ("autotune", "build", "prefill", "capture_step", "serve")


class Step(_Frozen):
    """One step of a boot. ``inference`` is the mode it runs in; ``arg`` depends on the step.

    load, grow: pages of the pool; replay, serve, drop_graph: which graph (modulo how many there are); the
    rest: seed of the indices. ``batch`` (rows) and ``seq`` (tokens of the longest sequence) are used by the
    steps that build metadata: autotune, build, prefill, capture_step, serve.
    """

    do: StepKind
    inference: bool = False
    arg: int = Field(default=0, ge=0, le=1 << 16)
    batch: int = Field(default=2, ge=1, le=128)
    seq: int = Field(default=1024, ge=1, le=1 << 20)

    def __str__(self) -> str:
        """The step as one call of a program."""
        given = "" if self.do in _BARE else f"arg={self.arg}"
        if self.do in _BATCHED:
            given += f", batch={self.batch}, seq={self.seq}"
        return f"{self.do}({given})" + (" under inference_mode" if self.inference else "")


class OrderCase(_Frozen):
    """A boot: steps in order, on a pool of ``page_size``-token pages. ``name`` says which boot it records."""

    kind: Literal["order"] = "order"
    name: str = ""
    page_size: int = 128
    rows: int = Field(default=2, ge=1, le=64)
    """Index rows of every split; more than 1,024 entries in all take the kernel that keeps marks."""
    width: int = Field(default=5, ge=1, le=2048)
    capability: tuple[int, int] | None = (12, 0)
    """The GPU that metadata steps pretend."""
    max_model_len: int = Field(default=65_536, ge=1, le=1 << 21)
    """Tokens; capacity of the metadata buffers follows from it."""
    steps: tuple[Step, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        """One line a step, as a program."""
        return "\n".join(str(step) for step in self.steps)


class CacheSpec(_Frozen):
    """One cache of an attention call."""

    page_size: int = Field(default=64, ge=1, le=1024)
    """Tokens per page; any size, 2 and 64 for the engines' compressed caches."""
    pages: int = Field(default=2, ge=0, le=64)
    stride_gap: int = Field(default=0, ge=0)
    """Bytes from the end of a page's payload to the next page."""
    offset: int = Field(default=0, ge=0, le=1 << 12)
    """Bytes before page 0 on top of the guard zone."""
    index: IndexSpec = IndexSpec(rows=1, width=4)
    """Index rows; ``rows`` is overruled by the call's tokens."""


class AttnCase(_Frozen):
    """One attention call. Cache values, q and sink come from ``seed``; uncounted bytes are ``poison``."""

    kind: Literal["attn"] = "attn"
    tokens: int = Field(default=1, ge=0, le=4096)
    heads: int = Field(default=8, ge=1, le=128)
    main: CacheSpec = CacheSpec()
    extra: CacheSpec | None = None
    sink: Literal["none", "random", "neg_inf", "pos_inf", "mixed"] = "none"
    scale: float | None = None
    """None: 512 ** -0.5."""
    spread: Literal["small", "wide", "huge"] = "small"
    """Magnitudes: near 1; over several binades; large enough for one entry to take all."""
    poison: Literal["nan", "inf", "noise"] = "nan"
    q_gap: int = Field(default=0, ge=0, le=64)
    """Heads between the last head of a row and the next row: a strided q."""
    seed: int = 0


class RouteCase(_Frozen):
    """One attention call, by the way it must take: which backend, on which GPU, beside which FlashInfer."""

    kind: Literal["route"] = "route"
    layout: str = "dsv4"
    tokens: int = Field(default=1, ge=0, le=4096)
    heads: int = Field(default=8, ge=1, le=128)
    main: CacheSpec = CacheSpec()
    extra: CacheSpec | None = None
    sink: bool = True
    scale: float | None = None
    """None: 512 ** -0.5."""
    q_gap: int = Field(default=0, ge=0, le=64)
    """Heads between the last head of a row and the next row: a strided q."""
    backend: Literal["auto", "flashinfer", "triton", "reference"] = "auto"
    """As the argument names it."""
    capability: tuple[int, int] | None = (12, 0)
    flashinfer: Literal["A", "B", "C"] | None = "C"
    """The generation that counts as installed; ``envelopes.ENVELOPES``."""
    seed: int = 0


class WriteCase(_Frozen):
    """One call of the cache writer."""

    kind: Literal["write"] = "write"
    layout: str = "dsv4"
    recipe: str = "deepseek"
    tokens: int = Field(default=3, ge=0, le=512)
    page_size: int = Field(default=64, ge=1, le=1024)
    pages: int = Field(default=2, ge=1, le=64)
    stride_gap: int = Field(default=0, ge=0)
    offset: int = Field(default=0, ge=0, le=1 << 12)
    slots: Literal["distinct", "skipped", "past_end", "none"] = "distinct"
    """All written; some -1; some past the pool's end; all -1."""
    tiles: tuple[Literal["normal", "zero", "tiny", "huge", "edge", "negative"], ...] = ("normal",)
    """What the 64-wide tiles hold; edge: amax at a boundary of the scale."""
    dtype: Literal["int32", "int64"] = "int64"
    seed: int = 0


class SubjectCase(_Frozen):
    """A thing judged by name: a launch configuration, an interpreter fact."""

    kind: Literal["subject"] = "subject"
    subject: str


Case = Annotated[
    SplitCase | Offset64Case | OrderCase | MetaCase | AttnCase | RouteCase | WriteCase | SubjectCase,
    Field(discriminator="kind"),
]


class CaseFile(_Frozen):
    """What a case file holds."""

    schema_version: Literal[1] = 1
    invariant: str
    """The invariant the case is judged by."""
    note: str = ""
    """What it stands for: a report, a fixed fault."""
    case: Case

    @property
    def name(self) -> str:
        """File name: the invariant and four hex digits of the case."""
        text = json.dumps(self.case.model_dump(mode="json"), sort_keys=True)
        return f"{self.invariant}-{hashlib.sha256(text.encode()).hexdigest()[:4]}.json"


_adapter: TypeAdapter[Any] = TypeAdapter(CaseFile)


def load(path: str | Path) -> CaseFile:
    """Read a case file; raises ``CaseFileError`` naming the file and what is wrong with it."""
    path = Path(path)
    remedy = "Write one with `sm120-mla verify` (it saves each failure), or correct the file."
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CaseFileError("case", path.name, f"a readable JSON file ({error})", remedy) from error
    try:
        return _adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise CaseFileError(
            "case", path.name, f"schema version {SCHEMA_VERSION} ({where}: {first['msg']})", remedy
        ) from error


def save(file: CaseFile, folder: str | Path) -> Path:
    """Write a case file into ``folder`` under its own name; returns the path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file.name
    path.write_text(file.model_dump_json(indent=2, exclude_defaults=False) + "\n", encoding="utf-8")
    return path
