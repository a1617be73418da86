"""Loading single modules out of somebody else's tree: what runs, what stands in, and what is left behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.targets.base import AbsentError
from sm120_mla.targets.checkout import Checkout

PACKAGE = "engine_of_tests"


def tree(root: Path, files: dict[str, str], **more: Any) -> Checkout:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Checkout(root, PACKAGE, **more)


def ours() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == PACKAGE]


def test_a_module_runs_without_its_package_and_leaves_nothing_behind(tmp_path: Path) -> None:
    files = {"__init__.py": "raise ImportError('needs a GPU')", "ops/kernel.py": "ANSWER = 42"}
    before, path = dict(sys.modules), list(sys.meta_path)

    module = tree(tmp_path, files).module(f"{PACKAGE}.ops.kernel")

    assert module.ANSWER == 42
    assert ours() == []
    assert sys.meta_path == path
    assert {name for name in before if name not in sys.modules} == set()
    assert list(tmp_path.rglob("__pycache__")) == []


def test_bytecode_of_the_tree_is_not_read(tmp_path: Path) -> None:
    checkout = tree(tmp_path, {"a.py": "X = 1"})
    source = tmp_path / PACKAGE / "a.py"
    cached = source.parent / "__pycache__" / f"a.{sys.implementation.cache_tag}.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"not even bytecode")

    assert checkout.module(f"{PACKAGE}.a").X == 1


def test_two_trees_of_one_package_do_not_meet(tmp_path: Path) -> None:
    late = "def f():\n    from engine_of_tests.b import X\n    return X"
    one = tree(tmp_path / "one", {"a.py": late, "b.py": "X = 1"}, own=("*.b",))
    two = tree(tmp_path / "two", {"a.py": late, "b.py": "X = 2"}, own=("*.b",))
    first, second = (t.calling(t.module(f"{PACKAGE}.a").f) for t in (one, two))

    assert [first(), second(), first()] == [1, 2, 1]
    with one.active(), two.active():
        assert second() == 2
    assert ours() == []


def test_an_installed_package_of_that_name_is_back_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = ModuleType(PACKAGE)
    monkeypatch.setitem(sys.modules, PACKAGE, installed)
    checkout = tree(tmp_path, {"a.py": "import engine_of_tests\nROOT = engine_of_tests"})

    assert checkout.module(f"{PACKAGE}.a").ROOT is not installed
    assert sys.modules[PACKAGE] is installed
    with pytest.raises(RuntimeError, match="in the tree"), checkout.active():
        raise RuntimeError("in the tree")
    assert sys.modules[PACKAGE] is installed


def test_what_is_not_loaded_may_be_imported_decorate_and_be_a_base(tmp_path: Path) -> None:
    text = """
from dataclasses import dataclass
from engine_of_tests.base import Base, register, helper
from engine_of_tests.utils import is_hip
from engine_of_tests import other
HIP = "hip" if is_hip() else "cuda"

@register("none", "here")
def f(x: Base) -> "Base | None":
    return x + 1

@register
class Info(Base):
    pass

@dataclass
class Row(Base[int]):
    n: int = 0

def g():
    return helper(1)
"""
    checkout = tree(tmp_path, {"a.py": text, "base.py": "raise SystemExit"})
    module = checkout.module(f"{PACKAGE}.a")

    assert (module.HIP, module.f(1)) == ("cuda", 2)
    for use in (module.g, module.Info, module.Row):
        with pytest.raises(UnavailableError, match=r"base\.(helper|Base) is not available: only a stand-in"):
            checkout.calling(use)()


@pytest.mark.parametrize(
    "use", ["bool(x)", "x + 1", "x < 1", "x == 1", "int(x)", "list(x)", "x[0]", "len(x)", "1 in x"]
)
def test_a_stand_in_is_never_taken_for_a_value(tmp_path: Path, use: str) -> None:
    text = f"from engine_of_tests.b import x\ndef f():\n    return {use}"

    with pytest.raises(UnavailableError, match="only a stand-in"):
        tree(tmp_path, {"a.py": text}).module(f"{PACKAGE}.a").f()


def test_named_attributes_stand_in_and_submodules_are_found(tmp_path: Path) -> None:
    text = "from engine_of_tests import utils\nfrom engine_of_tests.utils import flag, deep\nX = flag()"
    stand_ins = {f"{PACKAGE}.utils": {"flag": lambda: "said"}}
    checkout = tree(tmp_path, {"a.py": text, "utils/deep.py": "Y = 1"}, own=("*.deep",), stand_ins=stand_ins)
    module = checkout.module(f"{PACKAGE}.a")

    assert module.X == "said"
    assert module.deep.Y == 1
    assert set(checkout.modules()) == {f"{PACKAGE}.a", f"{PACKAGE}.utils.deep"}


def test_a_module_of_its_own_that_fails_is_a_stand_in_and_noted(tmp_path: Path) -> None:
    files = {"a.py": "from engine_of_tests.b import X", "b.py": "Y = 1\nraise OSError('no GPU')"}
    checkout = tree(tmp_path, files, own=("*.b",), stand_ins={f"{PACKAGE}.b": {"X": 3}})

    assert checkout.module(f"{PACKAGE}.a").X == 3
    assert checkout.notes == [f"{PACKAGE}.b is a stand-in: OSError: no GPU"]


def test_a_missing_file_or_attribute_is_absent(tmp_path: Path) -> None:
    checkout = tree(tmp_path, {"a.py": "X = 1"})

    with pytest.raises(AbsentError, match="no such file"):
        checkout.module(f"{PACKAGE}.b")
    with pytest.raises(AbsentError, match="Y is not available"):
        checkout.attribute(f"{PACKAGE}.a", "Y")
    assert Checkout(tmp_path, "another_engine").find("a.py") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(:", "SyntaxError"),
        ("import no_such_package_at_all", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDiv"),
    ],
)
def test_a_file_that_does_not_load_is_unavailable_with_the_reason(
    tmp_path: Path, text: str, why: str
) -> None:
    checkout = tree(tmp_path, {"a.py": text})

    with pytest.raises(UnavailableError, match=why) as caught:
        checkout.module(f"{PACKAGE}.a")
    assert not isinstance(caught.value, AbsentError)
    assert ours() == []


def test_an_optional_package_stands_in_only_where_it_is_not_installed(tmp_path: Path) -> None:
    text = "from no_such_package_at_all.deep import thing\nimport json"
    checkout = tree(tmp_path, {"a.py": text}, optional=("no_such_package_at_all", "json"))

    assert checkout.module(f"{PACKAGE}.a").json.dumps(1) == "1"
    assert "no_such_package_at_all" not in sys.modules
    with checkout.standing_in("json", {"dumps": len}):
        assert sys.modules["json"].dumps("four") == 4
    assert sys.modules["json"].dumps(1) == "1"


def test_a_file_is_found_where_it_moved_to_and_a_left_behind_shim_is_passed_over(tmp_path: Path) -> None:
    files = {"old/x.py": "from engine_of_tests.new.deep.x import f", "new/deep/x.py": "def f(): pass"}
    checkout = tree(tmp_path, {**files, "tests/x.py": "def f(): pass"})
    base = tmp_path / PACKAGE

    assert checkout.find("x.py", ("old",)) == base / "old/x.py"
    assert checkout.find("x.py", ("old",), defines="f") == base / "new/deep/x.py"
    assert checkout.find("x.py", defines="g") is None
    assert checkout.name_of(base / "new/deep/x.py") == f"{PACKAGE}.new.deep.x"


def test_forgetting_runs_a_changed_file_again(tmp_path: Path) -> None:
    checkout = tree(tmp_path, {"a.py": "X = 1"})
    first = checkout.module(f"{PACKAGE}.a")
    tree(tmp_path, {"a.py": "X = 2"})

    assert checkout.module(f"{PACKAGE}.a") is first
    checkout.forget()
    assert checkout.module(f"{PACKAGE}.a").X == 2


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a folder: a checkout"):
        Checkout(tmp_path / "nowhere", PACKAGE)
