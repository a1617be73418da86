"""Model configurations as far as sparse MLA sees them. Rows of data, each number with where it was read.

A user's own ``config.json`` becomes the same type (``read_config``). Units: tokens, heads, columns.
"""

from __future__ import annotations

import json
import re
import stat
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..widths import C128A_RATIO, align

__all__ = ["KINDS", "MODELS", "UNKNOWN", "Layer", "Model", "by_name", "from_config", "read_config"]

KINDS = ("v4", "v4.1", "dsa")
"""DeepSeek-V4: a sliding window and a compressed cache. V4.1: the same, with ratios 1 and 2. DSA: V3.2 and
GLM, whose one cache is read through an indexer."""

_V4_RATIOS, _V41_RATIOS = (0, 1, 4, C128A_RATIO), (0, 1, 2)
_POOL_UNIT = 128


@dataclass(frozen=True)
class Layer:
    """Layers of one kind: ``ratio`` tokens to an entry of the second cache, 0 where there is none."""

    name: str
    ratio: int
    count: int


@dataclass(frozen=True)
class Model:
    """What decides the launches. ``ratios`` has one entry for each backbone layer."""

    name: str
    kind: str
    heads: int
    index_topk: int
    ratios: tuple[int, ...]
    window: int = 0
    """Tokens of the sliding window; 0: none."""
    max_position: int | None = None
    """Longest context in tokens; None: not known."""
    draft_layers: int = 0
    """Speculative layers in the checkpoint; all of them have the window only."""
    dspark_block: int | None = None
    """Draft tokens of the DSpark module that the checkpoint brings; None: it brings none, or not known."""
    image_tokens: int = 0
    """Columns by which prefill rows grow where images are seen in both directions."""
    pool_tail: int = 1
    """``index_kpool``: a tail of this many entries less one is put behind the index rows."""
    glm: bool = False
    sources: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(field, where it was read)."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Kinds of layers, in the order of their ratios."""
        if self.kind == "dsa":
            return (Layer("DSA", 0, len(self.ratios)),)
        least = 1 if self.kind == "v4" else 0  # DeepSeek-V4 has no second cache at ratio 1
        counts = Counter(0 if ratio <= least else ratio for ratio in self.ratios)
        return tuple(Layer(_name(ratio), ratio, counts[ratio]) for ratio in sorted(counts))

    @property
    def index_width(self) -> int:
        """Columns of an index row as the indexer leaves it."""
        if self.pool_tail == 1:
            return self.index_topk
        return align(self.index_topk + self.pool_tail - 1, _POOL_UNIT)


def _name(ratio: int) -> str:
    return f"C{ratio}A" if ratio else "SWA"


_FLASH = "docs.nvidia.com/nemo/automodel deepseek_v4.config (defaults are DeepSeek-V4-Flash's)"
_SGLANG = "kvcache-ai/sglang 04653fa python/sglang/srt/configs/deepseek_v4.py"
_PRO = "huggingface.co/deepseek-ai/DeepSeek-V4-Pro config.json, as quoted by public model ports"
_V41_ISSUE = "vllm-project/vllm pull 56509: 18 layers of ratio 2, 20 of ratio 1"
_V41_CODE = "V4.1-Flash inference-config.json, as pinned in public ports: 40 layers, window 128, top-k 512"

MODELS: tuple[Model, ...] = (
    Model(
        name="deepseek-v4-flash",
        kind="v4",
        heads=64,
        index_topk=512,
        ratios=(0, 0, *(4 if n % 2 == 0 else 128 for n in range(41))),
        window=128,
        max_position=1_048_576,
        draft_layers=1,
        dspark_block=5,
        sources=(
            ("heads, index_topk, window, layers", f"{_FLASH}; {_SGLANG}"),
            ("max_position", f"{_FLASH}; config.json as public ports quote it"),
            (
                "ratios",
                "0, 0, then 4 and 128 in turn: compress_ratios as public ports quote it",
            ),
            ("draft_layers", f"num_nextn_predict_layers 1: {_FLASH}"),
            ("dspark_block", "DeepSeek-V4-Flash-0731: vllm-project/vllm pull 41834, dspark_block_size 5"),
        ),
    ),
    Model(
        name="deepseek-v4-flash-vision",
        kind="v4",
        heads=64,
        index_topk=512,
        ratios=(0, 0, *(4 if n % 2 == 0 else 128 for n in range(41))),
        window=128,
        max_position=1_048_576,
        image_tokens=384,
        sources=(
            ("all but image_tokens", "as deepseek-v4-flash"),
            ("image_tokens", "vision_max_n_token 384: vllm-project/vllm pull 54566"),
        ),
    ),
    Model(
        name="deepseek-v4-pro",
        kind="v4",
        heads=128,
        index_topk=1024,
        ratios=(128, *(128 if n % 2 == 0 else 4 for n in range(60))),
        window=128,
        max_position=1_048_576,
        draft_layers=1,
        sources=(
            ("heads, index_topk, layers, ratios, draft_layers", f"{_PRO}; 61 layers, 31 of 128 and 30 of 4"),
            ("window", "AMD-AGI/Primus tests of DeepSeek-V4 attention: sliding_window 128"),
            ("max_position", "arXiv 2606.19348: one million tokens; 1,048,576 as Flash"),
        ),
    ),
    Model(
        name="deepseek-v4.1-flash",
        kind="v4.1",
        heads=64,
        index_topk=512,
        ratios=(0, 0, *(2,) * 18, *(1,) * 20),
        window=128,
        max_position=1_048_576,
        draft_layers=3,
        image_tokens=1024,
        sources=(
            ("ratios", f"{_V41_ISSUE}; {_V41_CODE}"),
            ("heads, index_topk, window, layers, draft_layers", _V41_CODE),
            ("image_tokens", "vllm-project/vllm pull 56623: 1,152 columns = 128 + 1,024"),
            ("max_position", "vllm-project/vllm issue 56700: one million tokens of context"),
        ),
    ),
    Model(
        name="deepseek-v3.2",
        kind="dsa",
        heads=128,
        index_topk=2048,
        ratios=(0,) * 61,
        max_position=163_840,
        draft_layers=1,
        sources=(
            (
                "heads, index_topk, layers, max_position",
                "docs.nvidia.com/nemo/automodel deepseek_v32.config: 61 layers, 163,840 positions",
            ),
            ("draft_layers", "num_nextn_predict_layers 1: vLLM 0.11 configs/deepseek_v3.py"),
        ),
    ),
    Model(
        name="glm-5",
        kind="dsa",
        heads=64,
        index_topk=2048,
        ratios=(0,) * 78,
        max_position=202_752,
        glm=True,
        sources=(
            (
                "heads, index_topk, layers, max_position",
                "huggingface/transformers 008e574 configuration_glm_moe_dsa.py",
            ),
        ),
    ),
)

UNKNOWN: dict[str, tuple[str, ...]] = {
    "deepseek-v4-pro": ("dspark_block",),
    "deepseek-v4-flash-vision": ("draft_layers", "dspark_block"),
    "deepseek-v4.1-flash": ("dspark_block",),
    "glm-5": ("draft_layers",),
}
"""Fields that no source that was read gives: speculation with these is what the user says it is."""


def by_name(name: str) -> Model:
    """The model called ``name``; a Hugging Face owner before it and a release date after it are ignored.

    Raises ``ArgumentError`` with the names there are.
    """
    wanted = re.sub(r"-[0-9]{4}$", "", name.split("/")[-1].lower())
    for model in MODELS:
        if model.name == wanted:
            return model
    names = ", ".join(model.name for model in MODELS)
    raise ArgumentError("model", repr(name), f"one of {names}, or the path of a config.json", "Correct it.")


def read_config(path: Path) -> Model:
    """The model of a ``config.json``, or of the folder that holds one. Raises ``ArgumentError``."""
    place = path / "config.json" if path.is_dir() else path
    try:
        if stat.S_ISFIFO(place.stat().st_mode):  # it would be waited for
            raise ArgumentError("model", str(place), "a readable config.json", "It is a pipe: write a file.")
        value = json.loads(place.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ArgumentError("model", str(place), "a readable config.json", f"{error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError("model", str(place), "JSON", f"Repair it: {error}.") from None
    if not isinstance(value, dict):
        raise ArgumentError("model", str(place), "a JSON object", "Pass the model's config.json.")
    given = str(value.get("_name_or_path") or place.absolute().parent.name)
    name = "".join(c for c in given.rstrip("/").split("/")[-1] if c.isprintable()) or "config.json"
    return replace(from_config(value, name), sources=(("all", place.name),))


_ALIASES = {
    "num_attention_heads": ("n_heads",),
    "num_hidden_layers": ("n_layers",),
    "sliding_window": ("window_size",),
    "max_position_embeddings": ("max_seq_len",),
    "index_kpool": (),
    "vision_max_n_token": (),
    "num_nextn_predict_layers": ("n_mtp_layers",),
    "dspark_block_size": (),
    "index_topk": (),
}
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": C128A_RATIO,
}
_TYPES = {
    "deepseek_v4": "v4",
    "deepseek_v41": "v4.1",
    "deepseek_v41_text": "v4.1",
    "deepseek_v32": "dsa",
    "glm_moe_dsa": "dsa",
}


def from_config(config: dict[str, Any], name: str = "config.json") -> Model:
    """The model of a parsed ``config.json``; a nested ``text_config`` counts where the top has no entry.

    Raises ``ArgumentError`` naming the field that is missing or not what it must be.
    """
    text = config.get("text_config")
    top = {key: value for key, value in config.items() if value is not None}
    values = {**(text if isinstance(text, dict) else {}), **top}
    given = str(values.get("model_type"))
    nested = str(text.get("model_type")) if isinstance(text, dict) else ""
    kind = _TYPES.get(given) or _TYPES.get(nested)
    if kind is None:
        have = repr(given) if "model_type" in values else "missing"
        raise ArgumentError("model_type", have, f"one of {', '.join(_TYPES)}", _NOT_SPARSE)
    layers = _number(values, "num_hidden_layers", least=1, most=_MOST_LAYERS)
    draft = _optional(values, "num_nextn_predict_layers", 0)
    return Model(
        name=name.split("/")[-1],
        kind=kind,
        heads=_number(values, "num_attention_heads", least=1),
        index_topk=_number(values, "index_topk", least=1),
        ratios=(0,) * layers if kind == "dsa" else _ratios(values, kind, layers),
        window=0 if kind == "dsa" else _number(values, "sliding_window", least=1),
        max_position=_optional(values, "max_position_embeddings", None, least=1),
        draft_layers=draft or 0,
        dspark_block=_optional(values, "dspark_block_size", None, least=1),
        image_tokens=_optional(values, "vision_max_n_token", 0) or 0,
        pool_tail=_optional(values, "index_kpool", 1, least=1) or 1,
        glm=given.startswith("glm"),
    )


_NOT_SPARSE = "Pass a model with sparse MLA."
_FIX = "Correct the config.json."
_MOST, _MOST_LAYERS = (1 << 31) - 1, 1 << 12


def _number(values: dict[str, Any], name: str, least: int, most: int = _MOST) -> int:
    found = _optional(values, name, None, least, most)
    if found is None:
        raise ArgumentError(name, "missing", f"an integer >= {least}", _FIX)
    return found


def _optional(
    values: dict[str, Any], name: str, default: int | None, least: int = 0, most: int = _MOST
) -> int | None:
    for key in (name, *_ALIASES[name]):
        value = values.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(key, repr(value), f"an integer >= {least}", _FIX)
            if value > most:
                raise ArgumentError(key, f"{value:.3g}", f"at most {most:,}", _FIX)
            return value
    return default


def _ratios(values: dict[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """One ratio per backbone layer: from ``compress_ratios``, or from ``layer_types``."""
    given = values.get("compress_ratios")
    types = values.get("layer_types")
    field_name = "compress_ratios"
    if given is None and isinstance(types, list):
        field_name = "layer_types"
        rates = values.get("compress_rates")
        known = {**_LAYER_TYPES, **rates} if isinstance(rates, dict) else _LAYER_TYPES
        given = [known.get(entry) if isinstance(entry, str) else None for entry in types]
    allowed = _V4_RATIOS if kind == "v4" else _V41_RATIOS
    if not isinstance(given, list) or len(given) < layers:
        have = "missing" if not isinstance(given, list) else f"{len(given)} entries"
        raise ArgumentError(field_name, have, f"a list of at least {layers}, one per layer", _FIX)
    for number, ratio in enumerate(given[:layers]):
        if type(ratio) is not int or ratio not in allowed:
            expected = f"one of {', '.join(map(str, allowed))}, as {kind} has"
            raise ArgumentError(f"{field_name}[{number}]", repr(ratio), expected, _FIX)
    return tuple(given[:layers])
