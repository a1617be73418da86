"""The command: exit codes, what it prints, the README's matrix, and that it loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm120_mla import own_envelopes
from sm120_mla.backends.base import AttentionShape, CacheShape
from sm120_mla.backends.reference import ReferenceBackend
from sm120_mla.backends.triton import TritonBackend, configs
from sm120_mla.kernels import merge
from sm120_mla.tools import cli, exits

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = (
    "<!-- preflight --matrix --markdown: begin -->\n",
    "<!-- preflight --matrix --markdown: end -->\n",
)
MATRIX = ["preflight", "--model", "deepseek-v4-flash", "--matrix", "--markdown"]


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    code = cli.run(["preflight", *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_configuration_that_is_served_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = asked(capsys, "--tp", "4", "--speculative", "dspark:5", "--flashinfer", "0.6.18")

    assert code == exits.HELD
    assert found["ok"]
    assert found["changes"] == []
    assert {row["state"] for row in found["launches"]} == {"ok"}
    assert {row["in_capture"] for row in found["launches"]} == {True, False}
    assert {hazard["id"] for hazard in found["hazards"]} >= {"page-zero", "lse-base", "cutoff-64"}
    assert found["sources"]


def test_a_launch_without_a_route_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = asked(capsys, "--engine", "sglang", "--speculative", "dspark", "--flashinfer", "0.6.17")

    assert code == exits.VIOLATED
    bad = [row for row in found["launches"] if row["state"] != "ok"]
    assert {(row["what"], row["argument"], row["value"]) for row in bad} == {
        ("draft", "indices width", "192")
    }
    assert all("FlashInfer 0.6.18" in row["changes"] for row in bad)
    assert "FlashInfer 0.6.18" in found["changes"]


def test_the_table_names_launch_route_argument_and_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    options = ["--tp", "8", "--flashinfer", "0.6.14", "--engine", "vllm"]

    assert cli.run(["preflight", *options]) == exits.VIOLATED

    said = capsys.readouterr().out
    table = [line for line in said.splitlines() if "serving: prefill C4A" in line and "65-8192" in line]
    assert "none" in table[0]
    row = next(line for line in table if line.startswith("no route"))
    assert "heads 8: takes one of 16, 32, 64, 128" in row
    assert "FlashInfer 0.6.18" in row
    assert "any one of these gives all of them one: FlashInfer 0.6.18" in said
    assert "flashinfer decode" in said
    assert "also prefill-hang" not in said.split("also lse-base")[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "gpt-2"], "model = 'gpt-2'"),
        (["--model", "nowhere/config.json"], "readable config.json"),
        (["--engine", "trt"], "engine = 'trt'"),
        (["--tp", "three"], "tp = 'three'"),
        (["--tp", "1,2"], "Several need --matrix"),
        (["--tp", "3"], "tp = 3"),
        (["--dp", "0"], "dp = 0"),
        (["--speculative", "eagle"], "speculative = 'eagle'"),
        (["--flashinfer", "1.0"], "flashinfer version"),
        (["--backend", "cuda"], "backend = 'cuda'"),
        (["--capability", "12"], "capability = '12'"),
        (["--graph-sizes", "a"], "graph-sizes = 'a'"),
        (["--with", "vllm#53574"], "it is merged"),
        (["--markdown"], "--matrix as well"),
        (["--matrix", "--flashinfer", "0.6.18,1.0"], "flashinfer version"),
        (["--matrix", "--tp", "0"], "tp = 0"),
        (["--tp", "1" * 5000], "a number"),
        (["--speculative", f"dspark:{'9' * 5000}"], "dspark:K"),
        (["--draft-width", "512"], "--speculative dspark:K"),
        (["--speculative", "dspark:5", "--draft-width", "128"], "draft width = 128"),
        (["--max-batch", "x"], "See sm120-mla preflight --help"),
    ],
    ids=str,
)
def test_wrong_use_is_129(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["preflight", *options]) == exits.WRONG_USE
    assert said in capsys.readouterr().err


def test_a_config_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "sliding_window": 256,
        "index_topk": 512,
        "compress_ratios": [4],
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, found = asked(capsys, "--model", str(tmp_path), "--flashinfer", "0.6.18")

    assert code == exits.VIOLATED  # above 64 rows a second cache goes with a window of 128 only
    assert {(row["layer"], row["value"]) for row in found["launches"] if row["state"] != "ok"} == {
        ("C4A", "256")
    }


def test_draft_rows_of_another_width(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--speculative", "dspark:5", "--flashinfer", "0.6.17"]
    assert "draft rows padded to 512 columns" in asked(capsys, *options)[1]["changes"]

    code, found = asked(capsys, *options, "--draft-width", "512")

    assert code == exits.HELD
    assert {row["main"]["widths"][0] for row in found["launches"] if row["what"] == "draft"} == {512}


def test_many_requests_take_no_longer() -> None:
    assert cli.run(["preflight", "--max-batch", str(10**12), "--graph-sizes", "1", "--json"]) == exits.HELD


def test_a_name_is_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "glm_moe_dsa", "num_hidden_layers": 1, "num_attention_heads": 64}
    text = json.dumps({**config, "index_topk": 2048, "_name_or_path": "[red]name"})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")

    assert cli.run(["preflight", "--model", str(tmp_path)]) == exits.HELD
    assert "[red]name, vllm" in capsys.readouterr().out


def test_a_matrix_that_no_engine_starts_is_125(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["preflight", "--matrix", "--tp", "3"]) == exits.NOTHING_JUDGED


def test_names_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["preflight", "--list", "--json"]) == exits.HELD
    known = json.loads(capsys.readouterr().out)
    assert "deepseek-v4-pro" in known["models"]
    assert {"0.6.13", "0.7.0", "0.7.4"} <= set(known["FlashInfer"])


def test_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["preflight", "--list"]) == exits.HELD
    said = capsys.readouterr().out
    assert [w for w in ("deepseek-v4-pro", "sglang", "0.7.4", "triton", "vllm#53574") if w not in said] == []


def test_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--matrix", "--engine", "vllm", "--tp", "3,4", "--speculative", "none,dspark:7"]
    code, lines = asked(capsys, *options, "--flashinfer", "0.6.14,0.6.13")

    assert code == exits.VIOLATED
    states = {
        (line["speculation"], line["flashinfer"]): [c["state"] for c in line["cells"]] for line in lines
    }
    assert states == {
        ("none", "0.6.14"): ["-", "yes"],
        ("none", "0.6.13"): ["-", "no"],
        ("dspark:7", "0.6.14"): ["-", "no"],
        ("dspark:7", "0.6.13"): ["-", "no"],
    }
    assert [c["hangs"] for line in lines for c in line["cells"]].count(True) == 1


def test_the_readme_has_the_matrix_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(MATRIX) == exits.VIOLATED
    printed = capsys.readouterr().out
    text = README.read_text(encoding="utf-8")

    assert text.count(BEGIN) == text.count(END) == 1
    assert text.split(BEGIN)[1].split(END)[0].strip("\n") == printed.strip("\n")
    assert printed.count("\n| ") == 19 - 1  # 2 engines, 3 schemes, 3 releases
    assert f"sm120-mla {' '.join(MATRIX)}" in text


def test_neither_torch_nor_triton_is_loaded() -> None:
    code = (
        "import sys\n"
        "from sm120_mla.tools import cli\n"
        "assert cli.run(['preflight', '--speculative', 'dspark:5', '--flashinfer', '0.6.14']) == 1\n"
        "assert cli.run(['preflight', '--matrix']) == 1\n"
        "heavy = {'torch', 'triton', 'numpy', 'flashinfer', 'hypothesis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- the envelopes that the backends share with preflight


def shape(**more: Any) -> AttentionShape:
    return AttentionShape(
        **{
            "layout": "dsv4",
            "tokens": 1,
            "heads": 64,
            "main": CacheShape(64, 1, 37_440, 128, "int32", 16),
            **more,
        }
    )


def test_the_backends_answer_what_preflight_answers() -> None:
    for layout, capability in (("dsv4", (12, 0)), ("dsv4", (7, 5)), ("dsv32", (12, 0)), ("dsv41", None)):
        said = TritonBackend().supports(shape(layout=layout), capability)
        assert bool(said) == (own_envelopes.triton(layout, capability, 1) is None)
        assert bool(ReferenceBackend().supports(shape(layout=layout), capability)) == (
            own_envelopes.reference(layout) is None
        )


@pytest.mark.parametrize(
    ("layout", "capability", "programs", "argument"),
    [
        ("dsv4", (8, 0), 1, None),
        ("dsv4", None, 2**31 - 1, None),
        ("dsv4", (7, 5), 1, "capability"),
        ("dsv4", (12, 0), 2**31, "programs"),
        ("dsv32", (12, 0), 1, "layout"),
    ],
)
def test_what_triton_serves(
    layout: str, capability: tuple[int, int] | None, programs: int, argument: str | None
) -> None:
    refused = own_envelopes.triton(layout, capability, programs)
    assert (refused and refused.argument) == argument


def test_no_configuration_has_more_programs_than_preflight_counts() -> None:
    every = [config for major in (8, 9, 10, 12) for config in configs((major, 0))]

    for tokens, heads in ((1, 1), (7, 17), (64, 64), (8192, 128)):
        most = max(tokens * -(-heads // config.block_h) * merge.MAX_SPLITS for config in every)
        assert most <= own_envelopes.triton_programs(tokens, heads)
