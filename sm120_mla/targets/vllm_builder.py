"""Drive vLLM's C128A metadata builder, whatever its commit made of it.

``build`` of the builder is what the engine calls each step, so that is what is called where a tree has one:
it decides the width, and it gets the engine's own block table. The function it calls is watched, for what
it is given and what it returns; a capture holds that function's launches only, as the builder itself runs
between replays. A tree that has the function but no builder is asked through the function.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from .. import device
from ..errors import UnavailableError
from .base import C128AInputs
from .checkout import Checkout
from .vllm_stand_ins import Fields, as_gpu, cache_spec, configuration

__all__ = ["FUNCTION", "Builder", "find_function", "settle_padding"]

FUNCTION = "build_c128a_topk_metadata"
_KNOWN = ("sparse_mla.py", "flashmla_sparse.py")
_FOLDERS = ("models/deepseek_v4", "v1/attention/backends/mla")
_ELSEWHERE = {"amd", "rocm", "xpu", "cpu", "metal", "tpu"}
_BUFFERS = {
    "global_decode_buffer": "c128a_global_decode_buffer",
    "decode_lens_buffer": "c128a_decode_lens_buffer",
    "prefill_buffer": "c128a_prefill_buffer",
}
"""Parameters of the function, and the builder's attributes that it passes for them."""
_FIELDS = (
    "c128a_global_decode_topk_indices",
    "c128a_decode_topk_lens",
    "c128a_prefill_topk_indices",
)

Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def find_function(tree: Checkout) -> Path | None:
    """The file that defines the function, in whatever folder; None where the tree has none."""
    for name in _KNOWN:
        found = tree.find(name, _FOLDERS, defines=FUNCTION)
        if found is not None:
            return found
    return next(_files_with(tree, f"def {FUNCTION}("), None)


def _files_with(tree: Checkout, text: str) -> Iterator[Path]:
    """Python files of the package, for NVIDIA or for all, that contain ``text``; nearest the top first."""
    if tree.folder is None:
        return
    base = tree.folder / tree.package
    for path in sorted(base.rglob("*.py"), key=lambda p: (len(p.parts), str(p))):
        if _ELSEWHERE & set(path.relative_to(base).parts):
            continue
        if text in path.read_text(encoding="utf-8", errors="replace"):
            yield path


def settle_padding(inputs: C128AInputs) -> None:
    """Put padding rows in order, in place: an existing request, a position within the longest sequence.

    vLLM reads the block table at a padding row's request and position, unchecked, and relies on its engine
    for both (request 0, a position of an earlier step). A case may hold anything there. Only torch
    operations without a sync, so that a capture can hold them.
    """
    rows = inputs.num_decode_tokens
    if not rows:
        return
    requests = inputs.token_to_req_indices
    requests.clamp_(0, max(inputs.block_table.shape[0] - 1, 0))
    positions = inputs.positions
    padding = inputs.slot_mapping[: positions.shape[0]] < 0
    longest = torch.where(padding, torch.zeros_like(positions), positions).amax()
    positions.copy_(torch.where(padding, torch.minimum(positions, longest).clamp(min=0), positions))


@dataclass
class _Call:
    """One call of the function by the builder."""

    arguments: inspect.BoundArguments
    returned: Any = None
    done: bool = False


@dataclass
class Builder:
    """The function and the builder of one tree, loaded under one capability."""

    tree: Checkout
    path: Path
    function: Callable[..., Any] = field(init=False)
    kind: type | None = field(init=False, default=None)
    """The builder's class, or None where the tree has none."""

    def __post_init__(self) -> None:
        with as_gpu():
            self.function = self.tree.attribute(self.path, FUNCTION)
            self._home = self.tree.module(self.path)
            self._owner = self._home
            self._find_kind()
        self._signature = inspect.signature(self.function)
        self._builders: dict[Any, Any] = {}
        self._last: tuple[C128AInputs, _Call] | None = None

    def _find_kind(self) -> None:
        module = self._home
        self.kind = _builder_of(module)
        if self.kind is not None:
            return
        for path in _files_with(self.tree, FUNCTION):
            if path != self.path and _has_builder(path):
                self._owner = self.tree.module(path)
                self.kind = _builder_of(self._owner)
                return

    def build(self, inputs: C128AInputs) -> Views:
        """The views that the consumer gets.

        Raises what the function raises, ``AssertionError`` of the builder, and ``UnavailableError`` where
        the builder cannot be driven.
        """
        with as_gpu(), self.tree.active():
            settle_padding(inputs)
            if device.is_capturing():
                return self._again(inputs)
            if self.kind is None or not inputs.positions.shape[0] or _beyond(inputs):
                return _three(self.function(**self._direct(inputs)))
            return self._drive(inputs)

    def _again(self, inputs: C128AInputs) -> Views:
        """The function alone, as the builder called it last on these inputs."""
        if self._last is not None and self._last[0] is inputs:
            arguments = self._last[1].arguments
            return _three(self.function(*arguments.args, **arguments.kwargs))
        return _three(self.function(**self._direct(inputs)))

    def _direct(self, inputs: C128AInputs) -> dict[str, Any]:
        """Arguments by name; what a commit added is given where it is known, or left to its default."""
        width = inputs.max_compressed_tokens
        known = vars(inputs) | {
            "max_seq_len": width * inputs.compress_ratio,
            "actual_num_query_tokens": inputs.positions.shape[0],
        }
        given = {}
        for name, parameter in self._signature.parameters.items():
            if name in known:
                given[name] = known[name]
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                raise UnavailableError(
                    FUNCTION,
                    f"it has a parameter {name!r} that the adapter does not know",
                    "Teach targets/vllm_builder.py what to pass.",
                )
        return given

    def _drive(self, inputs: C128AInputs) -> Views:
        builder, calls = self._builder(inputs), list[_Call]()

        def watched(*args: Any, **kwargs: Any) -> Any:
            call = _Call(self._signature.bind(*args, **kwargs))
            calls.append(call)
            self._check(call.arguments.arguments, inputs)
            if "token_to_req_indices" in call.arguments.arguments:
                # Commits of before July 2026 count them from the batch's starts, which a case has not.
                call.arguments.arguments["token_to_req_indices"] = inputs.token_to_req_indices
            call.returned = self.function(*call.arguments.args, **call.arguments.kwargs)
            call.done = True
            return call.returned

        try:
            with contextlib.ExitStack() as stack:
                for module in {id(m): m for m in (self._home, self._owner)}.values():
                    if hasattr(module, FUNCTION):
                        stack.enter_context(mock.patch.object(module, FUNCTION, watched))
                metadata = builder.build(0, _common(inputs))
        except (UnavailableError, AssertionError):
            raise
        except Exception as error:
            if calls and not calls[-1].done:
                raise
            raise self._undriven(f"{type(error).__name__}: {error}") from error
        if not calls:
            raise self._undriven(f"its build does not call {FUNCTION}")
        self._last = (inputs, calls[-1])
        return self._views(metadata, _three(calls[-1].returned), inputs)

    def _views(self, metadata: Any, returned: Views, inputs: C128AInputs) -> Views:
        """What the metadata holds; where it holds nothing, for no rows, what the function returned."""
        found = []
        for name, view in zip(_FIELDS, returned, strict=True):
            if not hasattr(metadata, name):
                raise self._undriven(f"its metadata has no field {name}")
            held = getattr(metadata, name)
            found.append(view if held is None else held)
        decode, lens, prefill = found
        if decode.dim() == 3:
            decode = decode.squeeze(1)
        return decode, lens, prefill

    def _builder(self, inputs: C128AInputs) -> Any:
        """A builder whose buffers are those of ``inputs``."""
        rows, capacity = inputs.global_decode_buffer.shape
        ratio, where = inputs.compress_ratio, inputs.positions.device
        key = (rows, capacity, inputs.block_size, ratio, where)
        if key not in self._builders:
            assert self.kind is not None
            try:
                with torch.inference_mode(False):  # the engine makes it when it loads
                    self._builders[key] = self.kind(
                        cache_spec(inputs.block_size, ratio),
                        ["layer"],
                        configuration(rows, capacity * ratio),
                        where,
                    )
            except (UnavailableError, AssertionError):
                raise
            except Exception as error:
                raise self._undriven(f"making it raised {type(error).__name__}: {error}") from error
        builder = self._builders[key]
        for parameter, attribute in _BUFFERS.items():
            mine = getattr(builder, attribute, None)
            wanted = getattr(inputs, parameter)
            if mine is not None and mine.shape != wanted.shape:
                raise self._undriven(
                    f"its {attribute} is {tuple(mine.shape)} where {tuple(wanted.shape)} is due"
                )
            setattr(builder, attribute, wanted)
        return builder

    def _check(self, arguments: dict[str, Any], inputs: C128AInputs) -> None:
        for parameter in _BUFFERS:
            given = arguments.get(parameter)
            if given is None or given.data_ptr() != getattr(inputs, parameter).data_ptr():
                raise self._undriven(f"it passes no known buffer as {parameter}")

    def _undriven(self, why: str) -> UnavailableError:
        name = self.kind.__name__ if self.kind is not None else "the builder"
        return UnavailableError(
            f"{name} of {self.path.name}", why, "Teach targets/vllm_builder.py this commit."
        )

    @property
    def note(self) -> str:
        """What is driven."""
        if self.kind is None:
            return f"the tree has no metadata builder: {FUNCTION} is asked alone"
        return f"driven through {self.kind.__name__}.build of {self._owner.__name__}"

    def reset(self) -> None:
        """Forget every builder."""
        self._builders.clear()
        self._last = None


def _beyond(inputs: C128AInputs) -> bool:
    """Whether a context is longer than the width reaches: the builder would compute a larger width."""
    if not inputs.positions.numel():
        return False
    entries = (int(inputs.positions.max()) + 1) // inputs.compress_ratio
    return entries > inputs.max_compressed_tokens


def _common(inputs: C128AInputs) -> Fields:
    """``CommonAttentionMetadata`` of the batch: as many requests as the block table has rows."""
    tokens, decode = inputs.positions.shape[0], inputs.num_decode_tokens
    requests = inputs.block_table.shape[0]
    longest = inputs.max_compressed_tokens * inputs.compress_ratio
    where = inputs.positions.device
    starts = torch.full((requests + 1,), tokens, dtype=torch.int32)
    starts[0] = 0
    lens = torch.full((requests,), longest, dtype=torch.int32)
    prefill = tokens - decode
    return Fields(
        "common_attn_metadata",
        split=(requests if decode else 0, requests if prefill else 0, decode, prefill),
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=max(tokens, 1),
        max_seq_len=longest,
        query_start_loc=starts.to(where),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(where),
        seq_lens_cpu=lens,
        _seq_lens_cpu=lens,
        positions=inputs.positions,
        slot_mapping=inputs.slot_mapping,
        block_table_tensor=inputs.block_table,
        token_to_req_indices=lambda *_, **__: inputs.token_to_req_indices,
        causal=True,
        batch_topology=None,
        dcp_local_seq_lens=None,
        dcp_local_seq_lens_cpu=None,
    )


def _three(returned: Any) -> Views:
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise UnavailableError(
            FUNCTION,
            f"it returns {type(returned).__name__}, not decode rows, lengths and prefill rows",
            "Teach targets/vllm_builder.py this commit.",
        )
    decode, lens, prefill = returned
    return decode, lens, prefill


def _builder_of(module: ModuleType) -> type | None:
    """The class of a module one of whose methods calls the function."""
    for thing in vars(module).values():
        if not isinstance(thing, type) or thing.__module__ != module.__name__ or not hasattr(thing, "build"):
            continue
        for method in vars(thing).values():
            code = getattr(method, "__code__", None)
            if code is not None and FUNCTION in code.co_names + code.co_varnames:
                return thing
    return None


def _has_builder(path: Path) -> bool:
    """Whether a file has a class with a ``build`` and a call of the function; read, not run."""
    try:
        parsed = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError:
        return False
    for node in parsed.body:
        if isinstance(node, ast.ClassDef):
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            calls = {
                n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
            }
            if "build" in methods and FUNCTION in calls:
                return True
    return False
