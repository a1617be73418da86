"""A checkout of this repository, at any commit, as a target."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sm120_mla
from sm120_mla.case import AttnCase, CacheSpec, IndexSpec, OrderCase, SplitCase, Step
from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.targets import resolve
from sm120_mla.targets.base import AbsentError
from sm120_mla.targets.own import PRODUCT_FILES, OwnTarget
from sm120_mla.targets.own_checkout import OwnCheckout
from sm120_mla.testing import verdict

PACKAGE = Path(sm120_mla.__file__).parent
SPLIT = SplitCase(page_size=128, pages=1)
ATTENTION = AttnCase(main=CacheSpec(index=IndexSpec(rows=1, width=4)))
BOOT = OrderCase(steps=(Step(do="warm_up", inference=True),))

Edit = Callable[[Path], object]


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    """This package at an earlier commit, so to say: as it is, but for an edit."""

    def make(edit: Edit = lambda _: None) -> Path:
        package = tmp_path / "old" / "sm120_mla"
        package.mkdir(parents=True)
        for pattern in PRODUCT_FILES:
            for found in PACKAGE.glob(pattern):
                if found.is_dir():
                    shutil.copytree(found, package / found.name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(found, package / found.name)
        edit(package)
        return package.parent

    return make


def replace(file: str, old: str, new: str) -> Edit:
    def edit(package: Path) -> None:
        text = (package / file).read_text()
        assert old in text
        (package / file).write_text(text.replace(old, new))

    return edit


def outcome(id: str, path: Path, case: object) -> tuple[str, str]:
    found = verdict.judge(verdict.by_id(id), resolve(f"own:{path}"), case)
    return found.outcome, found.headline


def test_a_checkout_is_judged_by_what_it_holds(checkout: Callable[..., Path]) -> None:
    path = checkout(replace("buffers.py", "torch.inference_mode(False)", "torch.no_grad()"))

    target = resolve(f"own:{path}")

    assert isinstance(target, OwnCheckout)
    assert target.name == f"own:{path}"
    assert verdict.judge(verdict.by_id("SPLIT-BYTES"), target, SPLIT).holds
    assert verdict.judge(verdict.by_id("BUF-GUARD"), target, BOOT).violated
    assert verdict.judge(verdict.by_id("BUF-GUARD"), OwnTarget(), BOOT).holds
    assert path.is_dir()
    assert not list(path.rglob("__pycache__"))


def test_what_a_commit_does_not_have_is_absent(checkout: Callable[..., Path]) -> None:
    path = checkout(lambda package: (package / "attention.py").unlink())

    assert outcome("ATTN-VALUE", path, ATTENTION)[0] == "absent"
    assert outcome("SPLIT-BYTES", path, SPLIT)[0] == "holds"


def test_a_commit_without_buffers_is_absent_whole(checkout: Callable[..., Path]) -> None:
    path = checkout(lambda package: (package / "buffers.py").unlink())

    with pytest.raises(AbsentError):
        resolve(f"own:{path}")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (replace("pages.py", "topk_length:", "lengths:"), "this commit's takes another call"),
        (replace("pages.py", "def split_pages(", "def split_all_pages("), "this commit's takes another call"),
        (
            replace("pages.py", "import torch\n", "import torch\nimport no_such\n"),
            "raised ModuleNotFoundError",
        ),
        (replace("pages.py", "import torch\n", "import torch\n1 / 0\n"), "raised ZeroDivisionError"),
        (replace("pages.py", "import torch\n", "import torch\nthis is not\n"), "raised SyntaxError"),
    ],
)
def test_what_cannot_be_asked_is_unknown(checkout: Callable[..., Path], edit: Edit, says: str) -> None:
    found, headline = outcome("SPLIT-BYTES", checkout(edit), SPLIT)

    assert found == "unknown"
    assert says in headline


def test_an_error_of_the_commit_itself_is_a_violation(checkout: Callable[..., Path]) -> None:
    edit = replace("pages.py", "    geometry = ", "    None.shape\n    geometry = ")

    found, headline = outcome("SPLIT-BYTES", checkout(edit), SPLIT)

    assert found == "violated"
    assert "raised AttributeError" in headline


def test_what_the_commit_says_it_lacks_is_unknown(checkout: Callable[..., Path]) -> None:
    path = checkout(lambda package: (package / "backends" / "triton.py").unlink())

    found, headline = outcome("ATTN-VALUE", path, ATTENTION)

    assert found == "unknown"
    assert "backend triton" in headline


def test_launches_of_kernels_it_has_are_to_be_compiled(checkout: Callable[..., Path]) -> None:
    path = checkout(lambda package: (package / "kernels" / "merge.py").unlink())

    names = {spec.module for spec in OwnCheckout(path).compile_specs()}

    assert "kernels.page_split" in names
    assert "kernels.merge" not in names


def test_two_checkouts_and_this_package_are_kept_apart(checkout: Callable[..., Path]) -> None:
    path = checkout()
    first, second = OwnCheckout(path), OwnCheckout(path)

    assert first.compile_origin() != second.compile_origin()
    for target in (first, second):
        package, folder = target.compile_origin()
        assert folder is not None
        assert str(sys.modules[f"{package}.buffers"].__file__).startswith(folder)


def test_nothing_is_left_of_a_target_that_is_gone(checkout: Callable[..., Path]) -> None:
    path, before = checkout(), list(sys.path)
    package, folder = OwnCheckout(path).compile_origin()
    gc.collect()

    assert folder is not None
    assert not Path(folder).exists()
    assert sys.path == before
    assert not [name for name in sys.modules if name.split(".")[0] == package]


@pytest.mark.parametrize("kind", ["own", "sglang", "vllm"])
@pytest.mark.parametrize("rest", [":", ":/nowhere/at/all", ":setup.py"])
def test_a_path_that_is_no_folder_is_refused(kind: str, rest: str) -> None:
    with pytest.raises(ArgumentError, match=f"{kind}:PATH, a folder that holds a checkout"):
        resolve(kind + rest)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a checkout of this repository, which holds"):
        resolve(f"own:{tmp_path}")


@pytest.mark.parametrize("error", ["SyntaxError('x')", "RuntimeError('no GPU')", "OSError('libcuda')"])
def test_whatever_a_module_raises_it_is_not_available(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising_module.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(UnavailableError, match=error.split("(")[0]):
        resolve("raising_module:Target")
