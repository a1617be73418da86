"""A checkout of sglang as a target: its page split, its persistent buffers, its sparse decode for SM120.

The adapter looks at what the tree has (files, functions, parameters), never at which commit it is. Every
operation comes from the tree; nothing of sglang needs to be installed, and no GPU.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from .. import device
from ..case import AttnCase, CacheSpec, IndexSpec, Offset64Case, SplitCase
from ..device import Capability
from ..errors import UnavailableError
from ..graphs import Graph, capture
from ..kernels.runtime import INTERPRETED
from ..kernels.spec import CompileSpec
from ..layout import DSV4, SUB_PAGE, PageLayout
from .base import AbsentError, AttentionInputs, C128AInputs, Support
from .checkout import Checkout
from .roomy import RoomyAllocations
from .sglang_decode import Decode, decode_of
from .sglang_sibling import STAND_INS, Sibling
from .tree_tensors import tensors_of_modules

__all__ = ["FILES", "SglangTarget"]

FILES = (
    "*flash_mla*sm120*.py",
    "flashinfer_cutedsl.py",
    "runtime_context.py",
    "environ.py",
    "quant_k_cache.py",
)
"""Patterns of the names of files that verdicts depend on, wherever a commit keeps them."""

_FILE = "*flash_mla*sm120*.py"
_KNOWN = ("kernels/ops/attention", "srt/layers/attention")
_SPLIT = r"_?split_kv_pages\w*"
_WRITER = "quant_k_cache.py"
_ALIGNMENT = 8
"""Bytes: what sglang's own pools keep (strides of 576 or 584 a token, pages from the start of a storage)."""

_OWN = ("sglang.srt.environ", "sglang.srt.runtime_context", "*sm120*")
_PAGE_SIZE_NAMES = ("src_pbs", "pbs", "page_size", "block_size", "src_page_size", "page_block_size")


class SglangTarget:
    """The sglang tree at ``path``: the checkout, or its ``python`` folder.

    Raises ``ArgumentError`` for a path that is no folder.
    """

    def __init__(self, path: str) -> None:
        self.name = f"sglang:{path}"
        self.convention = ""
        """Which lse the tree's decode returns, once one with a sink was seen."""
        self._capability: Capability | None = None
        self._tree = Checkout(path, "sglang", folders=("python", ""), own=_OWN, stand_ins=self._stand_ins())
        self._sibling = Sibling(self._tree)
        self._roomy = RoomyAllocations()
        self._split_file = self._tree.find(_FILE, _KNOWN, defines=_SPLIT)
        self._split: _Split | None = None
        self._decode: Decode | None = None

    @property
    def backend(self) -> str:
        """Which of the tree's decodes is judged: its Triton kernel, or its torch fallback."""
        with contextlib.suppress(UnavailableError):
            return self._decoder().kind
        return ""

    @property
    def root(self) -> Path:
        """The checkout."""
        return self._tree.root

    def notes(self) -> tuple[str, ...]:
        """What was replaced by a stand-in, could not be exercised, or was converted at the edge."""
        said = [*self._tree.notes, self._sibling.problem, self.convention]
        return tuple(dict.fromkeys(note for note in said if note))

    def files(self) -> tuple[Path, ...]:
        """The files of the tree that verdicts depend on, as far as they are known: those run, and those to
        be run."""
        found = [*self._tree.find_all(_FILE, _KNOWN), self._sibling.path, *self._tree.files]
        return tuple(dict.fromkeys(path for path in found if path is not None))

    # What it serves

    def supports(self, case: Any, capability: Capability | None) -> Support:
        """By kind of case: absent where the tree has no such operation, no where it does not claim it."""
        kind = getattr(case, "kind", "")
        try:
            if kind in ("split", "offset64"):
                return self._supports_split(case)
            if kind == "order":
                return self._supports_order(case)
            if kind == "attn":
                return self._supports_attention(case)
            if kind == "write":
                return self._supports_write()
        except AbsentError as error:
            return Support.absent(str(error))
        except UnavailableError as error:
            return Support.no(str(error))
        return Support.absent(f"sglang's SM120 files have nothing for cases of kind {kind!r}")

    def _supports_split(self, case: Any) -> Support:
        split = self._splitter()
        if case.layout != DSV4.name:
            return Support.no(f"it splits {DSV4.name} pages only")
        if getattr(case, "scope", ""):
            return Support.no("its buffers know no scopes given by the caller")
        size = getattr(case, "page_size", split.page_size or 256)
        if split.page_size not in (None, size):
            return Support.no(f"it splits pages of {split.page_size} tokens only")
        if isinstance(case, Offset64Case):
            if not split.indexed and INTERPRETED:
                return Support.no("it copies whole pools: gigabytes, through the interpreter")
            return _aligned(case.page_stride, 0)
        if isinstance(case, SplitCase):
            if not case.pages:
                return Support.no("a pool of no pages is never split")
            if not split.indexed and size != SUB_PAGE and any(call is not None for call in case.calls):
                return Support.absent("this commit splits whole pools and takes no indices")
            for call in case.calls:
                if call is not None and _unbounded(call, "int_max"):
                    return Support.no("it does not bound indices, and these would be stored far outside")
            return _aligned(case.page_stride, case.offset)
        return Support(True)

    def _supports_order(self, case: Any) -> Support:
        if self._split_file is None and not self._sibling.present:
            return Support.absent("this tree has neither a page split nor flashinfer_cutedsl.py")
        if self._split_file is not None:
            fixed = self._splitter().page_size
            if fixed not in (None, case.page_size):
                return Support.no(f"it splits pages of {fixed} tokens only")
        return Support(True)

    def _supports_attention(self, case: AttnCase) -> Support:
        self._decoder()
        if not case.tokens:
            return Support.no("sglang never calls it with no rows")
        for spec in (case.main, case.extra):
            if spec is not None and not (answer := _cache_served(spec)):
                return answer
        return Support(True)

    def _supports_write(self) -> Support:
        if self._tree.find(_WRITER, ("kernels/ops/attention/dsv4", "srt/layers/attention/dsv4")) is None:
            return Support.absent("no Triton writer of the DSv4 cache in this tree")
        return Support.no("its Triton writer casts to e4m3 in the kernel, and is not the writer in use")

    # Operations

    def split(
        self,
        pool: torch.Tensor,
        page_size: int,
        indices: torch.Tensor | None,
        lengths: torch.Tensor | None,
        *,
        layout: PageLayout,
        scope: str = "",
    ) -> torch.Tensor:
        """The tree's split, given the uint8 view its own caller makes. It knows no lengths and no scopes.

        A dummy run passes the sibling site as well, so that is touched first.
        """
        self.touch()
        splitter = self._splitter()
        with self._calling():
            self._roomy.arm()
            return splitter(pool.view(torch.uint8), page_size, indices)

    def strays(self) -> tuple[str, ...]:
        """What the last split wrote in memory beside the tree's own allocations, in words."""
        return self._roomy.strays()

    @property
    def splits_touched(self) -> bool:
        """Whether the split copies touched pages only; otherwise whole pools, at every call."""
        return self._splitter().indexed

    def touch(self) -> None:
        """What else a forward pass allocates at its first go."""
        self._sibling.touch()

    def reserve_split(
        self, pool: torch.Tensor, page_size: int, *, layout: PageLayout, scope: str = ""
    ) -> bool:
        """sglang reserves nothing ahead."""
        return False

    def build_c128a(self, inputs: C128AInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """sglang has no such builder."""
        raise AbsentError("build_c128a_topk_metadata", "it is vLLM's", "Use --target vllm:PATH.")

    def attend(self, inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The tree's decode. ``lse`` is that of the same call without the sink, whatever its convention."""
        decode = self._decoder()
        with self._calling():
            out, with_sink = decode(inputs, inputs.attn_sink)
            if inputs.attn_sink is None:
                return out, decode.natural(with_sink)
            _, lse = decode(inputs, None)
        self.convention = self.convention or _convention(with_sink, lse, inputs.attn_sink)
        return out, decode.natural(lse)

    def error_budget(self) -> str:
        """Partial results in bf16 between two caches, and again before the sink."""
        return "sglang"

    def write_cache(
        self,
        k: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
        page_size: int,
        *,
        layout: PageLayout,
        recipe: str,
    ) -> None:
        """Not served: see ``supports``."""
        raise UnavailableError("sglang's cache writer", "it is not judged", "Use --target own.")

    # Boots

    def pretend_device(self, capability: Capability | None) -> AbstractContextManager[None]:
        """What the tree's platform checks answer within it."""
        return self._pretending(capability)

    @contextlib.contextmanager
    def _pretending(self, capability: Capability | None) -> Iterator[None]:
        before, self._capability = self._capability, capability
        try:
            yield
        finally:
            self._capability = before

    def persistent(self) -> Mapping[str, torch.Tensor]:
        """Every tensor the tree's modules hold, wherever they keep it, and the sibling's buffers."""
        held = tensors_of_modules(self._tree.modules(), self._tree.package)
        return {**held, **self._sibling.tensors()}

    def reset(self) -> None:
        """As a new process: the tree's modules are run again at the next call."""
        self._tree.forget()
        self._sibling.forget()
        self._split = self._decode = None

    def capture(self, fn: Callable[[], Any]) -> Graph:
        """A CUDA graph, or its model on the CPU."""
        return capture(fn)

    def second_device(self) -> AbstractContextManager[None] | None:
        """Cannot be pretended: the tree's keys are torch devices."""
        return None

    def compile_specs(self) -> tuple[CompileSpec, ...]:
        """None: its launch configurations are chosen by autotuning, and declare no budget."""
        return ()

    def compile_origin(self) -> tuple[str, str | None]:
        """The package, and the folder it lies in."""
        return self._tree.package, None if self._tree.folder is None else str(self._tree.folder)

    # Inside

    def _splitter(self) -> _Split:
        if self._split is None:
            if self._split_file is None:
                raise AbsentError("the page split", "this tree has none", "Choose a later commit.")
            module = self._tree.module(self._split_file)
            self._split = _Split.of(module)
        return self._split

    def _decoder(self) -> Decode:
        if self._decode is None:
            self._decode = decode_of(self._tree, _FILE, _KNOWN)
        return self._decode

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        with self._tree.active(), self._roomy if device.mode() == "reference" else contextlib.nullcontext():
            yield

    def _stand_ins(self) -> dict[str, dict[str, Any]]:
        """What the tree's platform checks are answered."""

        def major() -> int:
            return self._capability[0] if self._capability else 0

        checks = {
            "is_cuda": lambda: True,
            "is_hip": lambda: False,
            "is_npu": lambda: False,
            "is_cpu": lambda: False,
            "is_sm120_supported": lambda *_: major() == 12,
            "is_sm100_supported": lambda *_: major() == 10,
            "is_sm90_supported": lambda *_: major() == 9,
            "get_device_capability": lambda *_: self._capability or (None, None),
            "get_device_sm": lambda: 10 * major() + (self._capability[1] if self._capability else 0),
        }
        common = {**STAND_INS["sglang.srt.utils.common"], **checks}
        return {**STAND_INS, "sglang.srt.utils": checks, "sglang.srt.utils.common": common}


class _Split:
    """The tree's split function, and which of its parameters is what."""

    def __init__(self, function: Callable[..., Any], size: str, index: str, page_size: int | None) -> None:
        self._function, self._size, self._index = function, size, index
        self.page_size = page_size
        """The one it takes, or None where the caller chooses."""
        self.indexed = bool(index)

    @classmethod
    def of(cls, module: Any) -> _Split:
        """Raises ``UnavailableError`` where it wants something that cannot be made for it."""
        import re

        name = next(n for n in vars(module) if re.fullmatch(_SPLIT, n) and callable(vars(module)[n]))
        function = vars(module)[name]
        size = index = ""
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            if parameter.name in _PAGE_SIZE_NAMES:
                size = parameter.name
            elif "mask" not in parameter.name and ("ind" in parameter.name or "touched" in parameter.name):
                index = parameter.name
            elif parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                raise UnavailableError(
                    name, f"it wants {parameter.name!r}, which is unknown here", "Teach the adapter."
                )
        fixed = None if size else int(vars(module).get("_PBS_SRC", 256))
        return cls(function, size, index, fixed)

    def __call__(self, pool: torch.Tensor, page_size: int, indices: torch.Tensor | None) -> torch.Tensor:
        named: dict[str, Any] = {self._size: page_size} if self._size else {}
        if self._index:
            named[self._index] = indices
        result = self._function(pool, **named)
        made: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return made


def _unbounded(index: IndexSpec, *kinds: str) -> bool:
    return any(kind in index.kinds for kind in kinds)


def _aligned(*values: int) -> Support:
    if any(value % _ALIGNMENT for value in values):
        return Support.no(f"its pools begin at multiples of {_ALIGNMENT} bytes, and so do their pages")
    return Support(True)


def _cache_served(spec: CacheSpec) -> Support:
    """A cache of one attention call, as far as sglang claims to read it."""
    if not spec.index.width:
        return Support.no("its index rows are never empty")
    if not spec.pages:
        return Support.no("its pools have pages")
    if _unbounded(spec.index, "past_end", "int_max", "wide"):
        return Support.no("it does not bound indices: these would be read outside the pool")
    if spec.index.lengths == "beyond" and spec.index.length_dtype == "int64":
        return Support.no("its lengths have 32 bits: these do not fit")
    return _aligned(DSV4.payload(spec.page_size) + spec.stride_gap, spec.offset)


def _convention(with_sink: torch.Tensor, without: torch.Tensor, sink: torch.Tensor) -> str:
    """How the tree's lse treats the sink, in words; "" where these values cannot tell."""
    usual = without.isfinite() & sink.isfinite()
    if not bool(usual.any()):
        return ""
    folded = torch.logaddexp(without, sink.expand_as(without))
    for name, other in (("leaves the sink out", without), ("includes the sink", folded)):
        if bool(((with_sink - other).abs()[usual] < 1e-4 * (1 + other.abs()[usual])).all()):
            return f"its lse {name}; the lse judged is that of the same call without a sink"
    return "its lse follows no convention known here; the lse judged is that of the same call without a sink"
