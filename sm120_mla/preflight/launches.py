"""Every attention launch of a boot and of serving, as numbers, computed as the engines compute them.

Launches of one kind whose row counts lie on one side of 64, where FlashInfer changes kernels, are one
``Launch`` with its least and its most rows. Units: rows (tokens of the call), heads, columns, tokens a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..contract import DECODE_MAX_ROWS
from ..errors import ArgumentError
from ..widths import C128A_RATIO, active_width, align, capacity, positive
from .engines import Engine
from .models import Layer, Model
from .releases import rules

__all__ = ["Cache", "Launch", "Setup", "Speculation", "draft_width", "graph_batches", "launches"]

_PAGE = 64
_SCHEMES = ("none", "mtp", "dspark")


@dataclass(frozen=True)
class Speculation:
    """``none``; ``mtp`` with K draft tokens one after another; ``dspark`` with a block of K."""

    scheme: str = "none"
    tokens: int = 0

    @classmethod
    def parse(cls, text: str, model: Model | None = None) -> Speculation:
        """``none``, ``mtp``, ``mtp:K``, ``dspark:K``; without K the model's own. Raises ``ArgumentError``."""
        found = re.fullmatch(r"(none|mtp|dspark)(?::([0-9]{1,9}))?", text.strip().lower())
        if found is None or (found[1] == "none" and found[2]):
            raise ArgumentError("speculative", repr(text), "none, mtp:K or dspark:K", "Correct it.")
        scheme, given = found[1], found[2]
        if scheme == "none":
            return cls()
        if given is not None:
            return cls(scheme, positive("speculative tokens", int(given)))
        own = model.dspark_block if model is not None and scheme == "dspark" else None
        if scheme == "dspark" and own is None:
            raise ArgumentError("speculative", repr(text), "dspark:K", "Say K: the model's is not known.")
        return cls(scheme, own or 1)

    def __str__(self) -> str:
        return self.scheme if self.scheme == "none" else f"{self.scheme}:{self.tokens}"


@dataclass(frozen=True)
class Setup:
    """A serving configuration. Raises ``ArgumentError`` for one that no engine could start."""

    model: Model
    engine: Engine
    tp: int = 1
    """GPUs that share the attention heads."""
    dp: int = 1
    """Replicas, or data-parallel attention ranks, that share ``max_batch``."""
    max_batch: int = 64
    """Requests that decode at once, all replicas together."""
    max_model_len: int = 262_144
    speculation: Speculation = Speculation()
    prefill_chunk: int = 8192
    """Tokens of the largest prefill step."""
    graph_sizes: tuple[int, ...] | None = None
    """Requests of the batches that are captured; None: powers of two up to the batch, and the batch."""
    block: int | None = None
    """Tokens of a block; None: the engine's."""
    draft_width: int | None = None
    """Columns of DSpark draft rows where the engine is made to widen them; None: its own rule."""
    flashinfer: str = "0.6.18"

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "max_batch", "max_model_len", "prefill_chunk"):
            positive(name.replace("_", "-"), getattr(self, name))
        for size in self.graph_sizes or ():
            positive("graph-sizes", size)
        if self.model.heads % self.tp:
            raise ArgumentError(
                "tp",
                self.tp,
                f"a divisor of the {self.model.heads} heads",
                "Correct it.",
            )
        if self.draft_width is not None:
            least = self.model.window + self.speculation.tokens
            positive("draft width", self.draft_width, least)
        if self.block is not None:
            positive("block-size", self.block, _PAGE)
        if self.engine.split_main and self.block_size % _PAGE:
            raise ArgumentError("block-size", self.block_size, f"a multiple of {_PAGE} tokens", "Correct it.")
        for layer in self.model.layers:
            if layer.ratio and self.block_size % layer.ratio:
                raise ArgumentError(
                    "block-size", self.block_size, f"a multiple of the ratio {layer.ratio}", "Correct it."
                )

    @property
    def block_size(self) -> int:
        """Tokens of a block of the uncompressed pool."""
        return self.engine.block if self.block is None else self.block

    @property
    def local_batch(self) -> int:
        """Requests that decode at once on one rank."""
        return -(-self.max_batch // self.dp)

    @property
    def local_heads(self) -> int:
        """Query heads on one GPU."""
        return self.model.heads // self.tp


@dataclass(frozen=True)
class Cache:
    """A cache and its index rows as the kernel gets them. ``pool_page``: before a split, tokens."""

    page: int
    pool_page: int
    widths: tuple[int, ...]
    """Columns, least to most: all that can occur."""
    row_stride: int = 0
    """Columns from row to row; 0: the rows are dense."""


@dataclass(frozen=True)
class Launch:
    """Launches of one kind: ``least`` to ``most`` rows, all on one side of 64."""

    phase: str
    """``warm-up``, ``capture`` (also each replay) or ``serving`` (eager)."""
    what: str
    """``decode``, ``verify``, ``draft`` or ``prefill``."""
    layer: str
    least: int
    most: int
    heads: int
    main: Cache
    extra: Cache | None = None
    layout: str = "dsv4"
    counts: int = 0
    """Columns of the main row that can count at once."""

    @property
    def key(self) -> tuple[str, str]:
        """The kind of launch and of layer."""
        return self.what, self.layer

    @property
    def side(self) -> tuple[str, str, bool]:
        """What a change must help: its ``key``, and whether it lies above 64 rows; in whatever phase."""
        return self.what, self.layer, self.most > DECODE_MAX_ROWS

    @property
    def capturing(self) -> bool:
        """Whether it is recorded in a CUDA graph."""
        return self.phase == "capture"

    def __str__(self) -> str:
        rows = str(self.least) if self.least == self.most else f"{self.least}-{self.most}"
        return f"{self.what} {self.layer}, {rows} rows ({self.phase})"


def graph_batches(setup: Setup) -> tuple[int, ...]:
    """Requests of each captured batch, in order; none above the batch of one rank."""
    most = setup.local_batch
    if setup.graph_sizes is not None:
        return tuple(sorted({size for size in setup.graph_sizes if size <= most}))
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*sizes, most}))


def draft_width(setup: Setup) -> int:
    """Columns of a DSpark draft row: window and block, rounded up, then widened as the engine does."""
    if setup.draft_width is not None:
        return setup.draft_width
    width = align(setup.model.window + setup.speculation.tokens, setup.engine.draft_unit)
    return min((w for w in setup.engine.draft_widths if w >= width), default=width)


def launches(setup: Setup) -> tuple[Launch, ...]:
    """All launches of a boot and of serving, in the order in which a boot meets them."""
    found: dict[Launch, None] = {}
    for launch in (*_warm_up(setup), *_captured(setup), *_eager(setup)):
        found.setdefault(launch)
    return tuple(found)


def _warm_up(setup: Setup) -> Iterator[Launch]:
    rows = min(setup.engine.warm_up_rows, setup.prefill_chunk)
    if not rows:
        return
    for layer in setup.model.layers:
        yield from _launch(setup, "warm-up", "prefill", layer, 1, rows)
    per, what = _target(setup)
    for layer in setup.model.layers:
        yield from _launch(setup, "warm-up", what, layer, per, per)
    draft = _draft(setup)
    if draft is not None:
        yield from _launch(setup, "warm-up", "draft", draft[0], draft[1], draft[1])


def _captured(setup: Setup) -> Iterator[Launch]:
    per, what = _target(setup)
    for first, last in _sides([size * per for size in graph_batches(setup)]):
        for layer in setup.model.layers:
            yield from _launch(setup, "capture", what, layer, first, last)
    draft = _draft(setup)
    if draft is not None:
        for first, last in _sides([size * draft[1] for size in graph_batches(setup)]):
            yield from _launch(setup, "capture", "draft", draft[0], first, last)


def _eager(setup: Setup) -> Iterator[Launch]:
    captured = max(graph_batches(setup), default=0)
    beyond = range(captured + 1, setup.local_batch + 1)
    per, what = _target(setup)
    for first, last in _sides(_ends(beyond, per)):
        for layer in setup.model.layers:
            yield from _launch(setup, "serving", what, layer, first, last)
    draft = _draft(setup)
    if draft is not None:
        for first, last in _sides(_ends(beyond, draft[1])):
            yield from _launch(setup, "serving", "draft", draft[0], first, last)
    ends = [1, min(DECODE_MAX_ROWS, setup.prefill_chunk), DECODE_MAX_ROWS + 1, setup.prefill_chunk]
    for first, last in _sides([rows for rows in ends if rows <= setup.prefill_chunk]):
        for layer in setup.model.layers:
            yield from _launch(setup, "serving", "prefill", layer, first, last)


def _target(setup: Setup) -> tuple[int, str]:
    """Rows of one request in a step of the target model, and what the step is called."""
    tokens = setup.speculation.tokens
    return (1, "decode") if not tokens else (1 + tokens, "verify")


def _draft(setup: Setup) -> tuple[Layer, int] | None:
    """The layer of a draft step and its rows per request; None without speculation.

    A DSpark block is K rows. An MTP step extends by what was verified, then goes on row by row.
    """
    scheme, tokens = setup.speculation.scheme, setup.speculation.tokens
    if not tokens:
        return None
    name = "DSA" if setup.model.kind == "dsa" else "SWA"
    return Layer(name, 0, setup.model.draft_layers), tokens if scheme == "dspark" else 1 + tokens


def _ends(requests: range, per: int) -> list[int]:
    """Rows of the first and the last of these batches and of those next to 64; ``per``: of a request."""
    last = DECODE_MAX_ROWS // per  # the largest batch that decodes
    ends = {requests.start, last, last + 1, requests.stop - 1}
    return [size * per for size in sorted(ends) if size in requests]


def _sides(rows: list[int]) -> Iterator[tuple[int, int]]:
    """Least and most of the row counts up to 64, and of those above."""
    few = [n for n in rows if n <= DECODE_MAX_ROWS]
    many = [n for n in rows if n > DECODE_MAX_ROWS]
    for side in (few, many):
        if side:
            yield min(side), max(side)


def _launch(setup: Setup, phase: str, what: str, layer: Layer, least: int, most: int) -> Iterator[Launch]:
    """The launch, cut at 64 rows where it lies on both sides."""
    if least <= DECODE_MAX_ROWS < most:
        yield from _launch(setup, phase, what, layer, least, DECODE_MAX_ROWS)
        yield from _launch(setup, phase, what, layer, DECODE_MAX_ROWS + 1, most)
        return
    heads, main, counts = _heads(setup, most, what), _main(setup, what), _counts(setup, what)
    launch = Launch(phase, what, layer.name, least, most, heads, main, counts=counts)
    if setup.model.kind == "dsa":
        launch = replace(launch, layout="dsv32")
    if layer.ratio:
        launch = replace(launch, extra=_extra(setup, what, layer))
    yield launch


def _heads(setup: Setup, rows: int, what: str) -> int:
    """Heads that the kernel gets, padding included. sglang's draft step is always padded."""
    local, engine = setup.local_heads, setup.engine
    if setup.model.kind == "dsa" or engine.heads == "as-is":
        return local
    native = engine.heads == "native" and what != "draft" and rows <= DECODE_MAX_ROWS
    if native and _decodes(setup.flashinfer, local):
        return local
    fits = [heads for heads in engine.pad_to if heads >= local]
    if not fits:
        raise ArgumentError("tp", setup.tp, f"{max(engine.pad_to)} heads a GPU at most", "Use a larger TP.")
    return min(fits)


def _decodes(version: str, heads: int) -> bool:
    envelope = rules(version)
    if envelope is None:
        return False
    return envelope.decode_heads is None or heads in envelope.decode_heads


def _counts(setup: Setup, what: str) -> int:
    model = setup.model
    if model.kind == "dsa":
        return model.index_topk
    if what == "draft" and setup.speculation.scheme == "dspark":
        return model.window + setup.speculation.tokens
    return model.window + (_image_columns(setup) if what == "prefill" else 0)


def _image_columns(setup: Setup) -> int:
    if setup.model.kind == "v4.1" and not setup.engine.widens_v41:
        return 0
    return setup.model.image_tokens


def _main(setup: Setup, what: str) -> Cache:
    model, engine = setup.model, setup.engine
    if model.kind == "dsa":
        return Cache(_PAGE, _PAGE, (model.index_width,))
    if what == "draft" and setup.speculation.scheme == "dspark":
        width = draft_width(setup)
    else:
        width = align(_counts(setup, what), engine.main_unit)
    pool = (engine.swa_page_v41 if model.kind == "v4.1" else engine.swa_page) or setup.block_size
    return Cache(_PAGE if engine.split_main and pool > _PAGE else pool, pool, (width,))


def _extra(setup: Setup, what: str, layer: Layer) -> Cache:
    engine = setup.engine
    pool = setup.block_size // layer.ratio
    page = _PAGE if engine.split_extra and pool > _PAGE and pool % _PAGE == 0 else pool
    if layer.ratio != C128A_RATIO:
        return Cache(page, pool, (align(setup.model.index_topk, engine.main_unit),))
    if engine.c128a == "pages":
        entries = -(-setup.max_model_len // setup.block_size) * pool
        return Cache(page, pool, tuple(sorted({_PAGE, align(entries, _PAGE)})))
    columns = capacity(setup.max_model_len)
    if what != "prefill" and engine.c128a == "full":
        return Cache(page, pool, (columns,))
    widths = _active_widths(setup.max_model_len, columns)
    strided = what != "prefill" and engine.c128a == "narrow" and widths[0] != columns
    return Cache(page, pool, widths, row_stride=columns if strided else 0)


def _active_widths(max_model_len: int, columns: int) -> tuple[int, ...]:
    """Every C128A width that a batch of contexts up to ``max_model_len`` can have."""
    lengths, found = [1], []
    while lengths[-1] < max_model_len:
        lengths.append(min(lengths[-1] * 2, max_model_len))
    for length in lengths:
        longer = min(length + C128A_RATIO, max_model_len)
        found += [active_width(length, columns), active_width(longer, columns)]
    return tuple(sorted(set(found)))
