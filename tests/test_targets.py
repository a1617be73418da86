"""Targets: how one is found by name, and copies of the package with a fault put into them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch

import sm120_mla
from sm120_mla import errors
from sm120_mla.case import SplitCase
from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.layout import DSV4
from sm120_mla.targets import Support, Target, base, resolve
from sm120_mla.targets.own import OwnTarget, Patch, patched
from sm120_mla.testing.derive import make_pool
from sm120_mla.testing.field_model import FieldTarget

SIZE, PAGES = 128, 2
PACKAGE = Path(sm120_mla.__file__).parent
RENAME = Patch("layout.py", 'name="dsv4",', 'name="dsv4x",')
SUB_PAGE = Patch("layout.py", "SUB_PAGE = 64\n", "SUB_PAGE = 32\n")


def split_first_byte(target: OwnTarget) -> int:
    pool = make_pool(DSV4, SIZE, PAGES, seed=3)
    pool.view[0, 0] = 0x11
    return int(target.split(pool.view, SIZE, None, None, layout=DSV4).view(torch.uint8).flatten()[0])


def copies() -> list[str]:
    return [name for name in sys.modules if name.startswith("sm120_mla_copy")]


# ---- by name


def test_own_is_this_package() -> None:
    target = resolve("own")

    assert isinstance(target, OwnTarget)
    assert target.name == "own"
    assert target.compile_origin() == ("sm120_mla", None)
    assert resolve("own") is not target


@pytest.mark.parametrize("make", [OwnTarget, FieldTarget])
def test_targets_have_every_method_of_the_protocol(make: type) -> None:
    assert isinstance(make(), Target)


def test_a_module_and_an_attribute_name_a_target() -> None:
    target = resolve("sm120_mla.testing.field_model:FieldTarget")

    assert isinstance(target, FieldTarget)


@pytest.mark.parametrize("name", ["", "ours", "OWN", "own "])
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        resolve(name)

    assert caught.value.argument == "target"
    assert caught.value.value == repr(name)
    assert caught.value.expected.startswith("one of own")
    assert "module:attr" in caught.value.expected


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module_anywhere:Target", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("sm120_mla.testing.field_model:NoSuch", "AttributeError: .*NoSuch"),
        ("broken_target_module:Target", "ImportError: libcuda.so.1 is missing"),
    ],
)
def test_a_target_that_fails_to_load_is_not_available(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_target_module.py").write_text("raise ImportError('libcuda.so.1 is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(UnavailableError, match=rf"target {name} is not available: {why}"):
        resolve(name)


def test_entry_points_add_names(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    module = ModuleType("an_entry_point_module")
    module.make = lambda rest: made.append(rest) or FieldTarget()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    point = EntryPoint("engine", "an_entry_point_module:make", base.ENTRY_POINTS)
    monkeypatch.setattr(base, "entry_points", lambda group: [point] if group == base.ENTRY_POINTS else [])

    assert isinstance(resolve("engine"), FieldTarget)
    assert isinstance(resolve("engine:/some/checkout:v1"), FieldTarget)
    assert made == ["", "/some/checkout:v1"]
    with pytest.raises(ArgumentError, match=r"one of own, own:PATH, .*, engine, module:attr"):
        resolve("engines")


def test_support_is_yes_or_no_with_a_reason() -> None:
    assert Support(True)
    assert not Support.no("too wide")
    assert Support.no("too wide").reason == "too wide"


# ---- the own target


def test_own_splits_reserves_and_forgets() -> None:
    target = OwnTarget()
    pool = make_pool(DSV4, SIZE, PAGES)
    assert target.supports(SplitCase(), None)

    assert target.reserve_split(pool.view, SIZE, layout=DSV4, scope="s")
    reserved = set(target.persistent())
    result = target.split(pool.view, SIZE, None, None, layout=DSV4, scope="s")

    assert len(reserved) == 2
    assert set(target.persistent()) == reserved
    assert result.data_ptr() in {t.data_ptr() for t in target.persistent().values()}
    target.reset()
    assert target.persistent() == {}


def test_own_leaves_values_unchecked() -> None:
    target = OwnTarget()
    pool = make_pool(DSV4, SIZE, PAGES)

    target.split(pool.view, SIZE, torch.full((1, 2), 1 << 30, device=pool.view.device), None, layout=DSV4)


def test_own_names_what_is_to_be_compiled() -> None:
    specs = OwnTarget().compile_specs()

    assert len({spec.name for spec in specs}) == len(specs) > 20
    for spec in specs:
        assert hasattr(importlib.import_module(f"sm120_mla.{spec.module}"), spec.function)


def test_every_kernel_module_with_specs_is_named() -> None:
    from sm120_mla.targets import own

    found = {
        f"kernels.{path.stem}"
        for path in (PACKAGE / "kernels").glob("*.py")
        if "def compile_specs(" in path.read_text(encoding="utf-8")
    }

    assert set(own.KERNEL_MODULES) == found


# ---- patched copies


def test_a_patched_copy_behaves_as_patched_and_the_original_does_not() -> None:
    patch = Patch(
        "pages.py", "lanes = target.view(dtype)\n", "lanes = target.view(dtype)\n    source = source ^ 1\n"
    )

    with patched([patch], "own with a flipped bit") as target:
        assert target.name == "own with a flipped bit"
        assert split_first_byte(target) == 0x10
        assert split_first_byte(OwnTarget()) == 0x11

    assert split_first_byte(OwnTarget()) == 0x11


def test_a_copy_without_a_patch_behaves_as_the_original() -> None:
    with patched([], "own copy") as target:
        assert split_first_byte(target) == 0x11
        package, folder = target.compile_origin()
        assert package.startswith("sm120_mla_copy_")
        assert folder is not None
        assert (Path(folder) / package / "kernels" / "page_split.py").is_file()


def test_two_copies_in_one_process_are_independent() -> None:
    with patched([RENAME], "a") as a, patched([SUB_PAGE], "b") as b:
        layouts = [importlib.import_module(f"{t.compile_origin()[0]}.layout") for t in (a, b)]

        assert [module.DSV4.name for module in layouts] == ["dsv4x", "dsv4"]
        assert [module.SUB_PAGE for module in layouts] == [64, 32]
        assert (DSV4.name, sm120_mla.DSV4) == ("dsv4", DSV4)
        foreign = {
            name
            for module in layouts
            for name in vars(module)
            if isinstance(vars(module)[name], type) and vars(module)[name].__module__.startswith("sm120_mla.")
        }
        assert not foreign


def test_a_copy_does_not_reach_into_the_original() -> None:
    with patched([], "own copy") as target:
        split_first_byte(target)
        package = target.compile_origin()[0]
        modules = [module for name, module in sys.modules.items() if name.startswith(package + ".")]

        assert len(modules) > 5
        for module in modules:
            for name, value in vars(module).items():
                home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
                assert not str(home).startswith("sm120_mla."), f"{module.__name__}.{name} is from {home}"


def test_errors_of_a_copy_are_classes_of_its_own() -> None:
    with patched([], "own copy") as target:
        with pytest.raises(ValueError, match="page_size = 100") as caught:
            target.reserve_split(make_pool(DSV4, SIZE, PAGES).view, 100, layout=DSV4)

        assert type(caught.value).__name__ == "LayoutError"
        assert not isinstance(caught.value, errors.LayoutError)


def test_a_copy_is_gone_afterwards() -> None:
    path = list(sys.path)
    with patched([], "own copy") as target:
        split_first_byte(target)
        folder = Path(target.compile_origin()[1] or "")
        assert folder.is_dir()

    assert sys.path == path
    assert copies() == []
    assert not folder.exists()


def test_a_copy_is_gone_after_an_error_too() -> None:
    path, folders = list(sys.path), []

    with contextlib.suppress(ZeroDivisionError), patched([], "own copy") as target:
        folders.append(Path(target.compile_origin()[1] or ""))
        raise ZeroDivisionError

    assert sys.path == path
    assert copies() == []
    assert not folders[0].exists()


@pytest.mark.parametrize(
    ("patch", "found"),
    [
        (Patch("layout.py", "no such text", ""), "found 0 times"),
        (Patch("layout.py", "def ", "def "), r"found \d+ times"),
    ],
)
def test_a_patch_must_match_exactly_once(patch: Patch, found: str) -> None:
    path = list(sys.path)

    refused = pytest.raises(ArgumentError, match=rf"patch = layout\.py: .*{found}.*in step with the source")
    with refused, patched([RENAME, patch], "own with a stale fault"):
        raise AssertionError("unreachable")

    assert sys.path == path
    assert copies() == []


def test_patches_are_applied_one_after_another() -> None:
    second = Patch("layout.py", 'name="dsv4x",', 'name="dsv4y",')

    with patched([RENAME, second], "own, twice") as target:
        assert importlib.import_module(f"{target.compile_origin()[0]}.layout").DSV4.name == "dsv4y"


def test_the_sources_themselves_are_not_touched() -> None:
    before = (PACKAGE / "layout.py").read_text(encoding="utf-8")

    with patched([RENAME], "own"):
        assert (PACKAGE / "layout.py").read_text(encoding="utf-8") == before
