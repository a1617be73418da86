"""Model rows, and a user's own config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sm120_mla.errors import ArgumentError
from sm120_mla.preflight import models
from sm120_mla.preflight.models import MODELS, Model, by_name, from_config, read_config

V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "sliding_window": 128,
    "index_topk": 512,
    "compress_ratios": [0, 1, 4, 128, 0],
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
}


def layers(model: Model) -> dict[str, int]:
    return {layer.name: layer.count for layer in model.layers}


def test_layers_of_the_rows() -> None:
    assert {model.name: layers(model) for model in MODELS} == {
        "deepseek-v4-flash": {"SWA": 2, "C4A": 21, "C128A": 20},
        "deepseek-v4-flash-vision": {"SWA": 2, "C4A": 21, "C128A": 20},
        "deepseek-v4-pro": {"C4A": 30, "C128A": 31},
        "deepseek-v4.1-flash": {"SWA": 2, "C1A": 20, "C2A": 18},
        "deepseek-v3.2": {"DSA": 61},
        "glm-5": {"DSA": 78},
    }


def test_every_number_has_a_source_or_is_said_to_be_unknown() -> None:
    words = {"heads": "heads", "index_topk": "index_topk", "ratios": "ratios", "window": "window"}
    for model in MODELS:
        said = (
            " ".join(field for field, _ in model.sources) + " " + " ".join(models.UNKNOWN.get(model.name, ()))
        )
        assert all(source for _, source in model.sources)
        if "all but" in said:
            continue
        wanted = set(words) - ({"window", "ratios"} if model.kind == "dsa" else set())
        wanted |= {"draft_layers", "max_position"} | ({"image_tokens"} if model.image_tokens else set())
        assert {name for name in wanted if name not in said} == set(), model.name
        assert ("dspark_block" in said) or model.kind == "dsa", model.name
    for name, fields in models.UNKNOWN.items():
        assert all(not getattr(by_name(name), field) for field in fields)


def test_names() -> None:
    assert by_name("deepseek-ai/DeepSeek-V4-Flash") is by_name("deepseek-v4-flash")
    assert by_name("deepseek-ai/DeepSeek-V4-Flash-0731") is by_name("deepseek-v4-flash")
    with pytest.raises(ArgumentError, match="deepseek-v4-pro"):
        by_name("deepseek-v5")


def test_a_config() -> None:
    model = from_config(V4, "mine")

    assert layers(model) == {"SWA": 2, "C4A": 1, "C128A": 1}
    assert (model.heads, model.window, model.index_topk, model.draft_layers) == (64, 128, 512, 1)
    assert (model.dspark_block, model.max_position, model.image_tokens) == (5, None, 0)


def test_a_config_that_names_its_layers() -> None:
    config = {key: value for key, value in V4.items() if key != "compress_ratios"}
    types = [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "sliding_attention",
    ]
    named = from_config({**config, "layer_types": types})

    assert named.ratios == (0, 4, 128, 0)
    rates = {"compressed_sparse_attention": 128, "heavily_compressed_attention": 4}
    assert from_config({**config, "layer_types": types, "compress_rates": rates}).ratios == (0, 128, 4, 0)


def test_a_nested_config_in_other_words() -> None:
    config = {
        "model_type": "deepseek_v41",
        "text_config": {
            "n_layers": 3,
            "n_heads": 64,
            "window_size": 128,
            "index_topk": 512,
            "compress_ratios": [0, 2, 1, 0, 0],
            "vision_max_n_token": 1024,
        },
    }
    model = from_config(config)

    assert from_config({**config, "index_topk": None, "num_attention_heads": None}) == model
    assert (model.kind, layers(model), model.image_tokens) == ("v4.1", {"SWA": 1, "C1A": 1, "C2A": 1}, 1024)


@pytest.mark.parametrize(
    ("topk", "pool", "width"), [(2048, 1, 2048), (2048, 4, 2176), (2045, 4, 2048), (4096, 4, 4224)]
)
def test_a_pool_tail(topk: int, pool: int, width: int) -> None:
    config = {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "index_topk": topk,
    }
    assert from_config({**config, "index_kpool": pool}).index_width == width


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": "64"}, "num_attention_heads"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"index_topk": 0}, "index_topk"),
        ({"sliding_window": None}, "sliding_window"),
        ({"compress_ratios": None}, "compress_ratios"),
        ({"compress_ratios": [0, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 2, 4, 128]}, "compress_ratios[1]"),
        ({"compress_ratios": [0, 0, 4, "128"]}, "compress_ratios[3]"),
        ({"compress_ratios": None, "layer_types": ["x"] * 4}, "layer_types[0]"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"compress_ratios": [0, 0, 4.0, 128]}, "compress_ratios[2]"),
        ({"index_topk": 1 << 31}, "index_topk"),
        ({"model_type": "deepseek_v32", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": None}, "model_type"),
    ],
    ids=str,
)
def test_a_config_that_is_wrong(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        from_config({**V4, **change})
    assert error.value.argument == argument


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    place = tmp_path / "my-model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(V4), encoding="utf-8")

    assert read_config(place) == read_config(place / "config.json")
    assert read_config(place).name == "my-model"


def test_a_name_is_a_line_of_text_and_a_byte_order_mark_is_none(tmp_path: Path) -> None:
    text = json.dumps({**V4, "_name_or_path": "owner/a\x1b[31m[b]\n/"})
    (tmp_path / "config.json").write_text(text, encoding="utf-8-sig")

    assert read_config(tmp_path).name == "a[31m[b]"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")

    with pytest.raises(ArgumentError, match="pipe"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", None, "[" * 100_000])
def test_a_file_that_is_none(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"^model = "):
        read_config(tmp_path)
