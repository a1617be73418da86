"""The scan for tensors that are cached lazily and unguarded: what it lists, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from sglang_trees import sglang_tree, split_module

from sm120_mla.targets.lazy_scan import hints, scan_unguarded
from sm120_mla.targets.sglang import SglangTarget
from sm120_mla.testing import report
from sm120_mla.tools import verify

LISTED = {
    "if it is None": "def f(k):\n    b = D.get(k)\n    if b is None or b.shape[0] < 2:\n        "
    "b = torch.empty(2)\n        D[k] = b\n    return b",
    "if not in": "def f(k):\n    if k not in D:\n        D[k] = torch.zeros(2)\n    return D[k]",
    "if in, else": "def f(k):\n    if k in D:\n        pass\n    else:\n        D[k] = torch.zeros(2)",
    "an attribute": "def f(s):\n    if s.buf is None:\n        s.buf = s.q.new_empty(2)",
    "hasattr": "def f(s):\n    if not hasattr(s, 'buf'):\n        s.buf = torch.full((2,), 1)",
    "after an early return": "def f(s):\n    if getattr(s, '_w', None) is not None:\n        return\n    "
    "s._w = MoEWrapper(2)",
    "a global": "def f():\n    global B\n    if B is None:\n        B = torch.arange(3)\n    return B",
    "KeyError": "def f(k):\n    try:\n        return D[k]\n    except KeyError:\n        "
    "D[k] = torch.ones(1)",
    "a caching decorator": "@functools.lru_cache(maxsize=None)\ndef f(n):\n    return torch.empty(n)",
    "another mode": "def f(k):\n    with torch.inference_mode():\n        if k not in D:\n            "
    "D[k] = torch.zeros(2)",
}
LEFT_ALONE = {
    "guarded": "def f(k):\n    if k not in D:\n        with torch.inference_mode(False):\n            "
    "D[k] = torch.zeros(2)",
    "guarded, then kept": "def f(k):\n    b = D.get(k)\n    if b is None:\n        "
    "with torch.inference_mode(mode=False):\n            b = torch.zeros(2)\n        D[k] = b",
    "guarded by a decorator": "@torch.inference_mode(False)\ndef f(k):\n    if k not in D:\n        "
    "D[k] = torch.zeros(2)",
    "a guarded cache": "@functools.cache\ndef f(n):\n    with torch.inference_mode(False):\n        "
    "return torch.empty(n)",
    "not kept": "def f(x):\n    if x is None:\n        x = torch.zeros(2)\n    return x",
    "always": "def f(s):\n    s.buf = torch.empty(2)",
    "about something else": "def f(s, x):\n    if x is None:\n        s.buf = torch.empty(2)",
    "no tensor": "def f(k):\n    if k not in D:\n        D[k] = dict()",
}


@pytest.mark.parametrize("name", LISTED)
def test_a_lazy_unguarded_tensor_is_listed(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(f"import torch\nD = {{}}\nB = None\n{LISTED[name]}\n")

    (found,) = scan_unguarded(file)

    assert (found.file, found.function) == ("a.py", "f")
    assert file.read_text().splitlines()[found.line - 1].count(found.made.split("(")[0]) == 1
    assert str(found).startswith(f"a.py:{found.line}: ")


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_guarded_or_no_cache_is_left_alone(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(f"import torch\nD = {{}}\nB = None\n{LEFT_ALONE[name]}\n")

    assert scan_unguarded(file) == []


def test_a_folder_is_scanned_in_order_and_what_cannot_be_parsed_gives_none(tmp_path: Path) -> None:
    sglang_tree(tmp_path, split_module(guarded="marks"), cutedsl="torch.no_grad()")
    (tmp_path / "broken.py").write_text("import torch\ndef (")

    found = scan_unguarded(tmp_path)

    assert [(hint.file.rsplit("/", 1)[-1], hint.kept) for hint in found] == [
        ("flash_mla_sm120.py", "buffers['split']"),
        ("flashinfer_cutedsl.py", "layer._cutedsl_wrapper"),
    ]
    assert hints(SglangTarget(str(tmp_path))) == found


def test_verify_shows_hints_below_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    summary = report.Summary(mode="reference", target="sglang:there")

    verify.show(summary.document(), Console(width=100), ["a.py:3: D[k] = torch.empty(...) in f"])

    (line,) = [line for line in capsys.readouterr().out.splitlines() if "hint" in line]
    assert line.endswith("called: a.py:3: D[k] = torch.empty(...) in f")


def test_a_target_that_names_no_files_has_no_hints() -> None:
    assert hints(object()) == []
