"""The dependency rule, what a bare import may load, and that the README's table of places is true."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from sm120_mla import settings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sm120_mla"
FILES = sorted(PACKAGE.rglob("*.py"))
PROPERTY_TESTS = sorted((ROOT / "property_tests").glob("*.py"))

LAYERS = (
    ("errors",),
    ("layout", "settings", "widths", "contract", "known_failures", "envelopes", "own_envelopes"),
    ("device", "case", "codec"),
    ("reference", "buffers", "graph_recorder"),
    ("graphs", "kernels"),
    ("pages", "cache", "metadata", "placement"),
    ("backends",),
    ("attention", "attention_checks", "preflight"),
    ("targets",),
    ("testing",),
    ("tools",),
)
"""docs/design.md, section 12: a unit imports what stands above it, and of its own layer what is no circle."""

ONLY = {
    "layout": {"errors"},
    "case": {"errors", "layout"},
    "codec": {"errors", "layout"},
    "reference": {"errors", "layout", "codec", "widths"},
    "kernels": {"errors", "layout", "settings", "device", "widths"},
}
"""Units that import nothing but these. Kernels never import the reference they are judged by."""

NEVER = {
    **{
        unit: {"reference", "case"}
        for unit in ("buffers", "graphs", "pages", "cache", "metadata", "attention")
    },
    "targets": {"reference", "buffers", "pages", "cache", "metadata", "backends", "attention"},
}
"""The product does not know its specification; a target reaches the product by name, so that a patched
copy of the package can stand in for it."""

TESTING_SEES_PRODUCT = {
    "testing.field_model": {"pages"},  # both take the geometry of a view as the product does
    "testing.attn_inputs": {"pages"},
}
"""Modules of ``testing`` that import an operation and not a target."""
KERNEL_NAMES = {unit: {"kernels.spec", "kernels.runtime"} for unit in ("targets", "testing")}
"""What of ``kernels`` is no kernel: the description of a launch, and Triton itself."""
PRODUCT = {"buffers", "pages", "cache", "metadata", "backends", "attention"}

IMPORTS_TRITON = {
    "kernels/runtime.py": "where kernels get it from, in the mode of the process",
    "kernels/compile_key.py": "asks Triton's own rules about a launch",
    "graph_recorder.py": "hooks the interpreter's launches",
    "targets/interpreter_fixes.py": "corrects the interpreter around kernels of other trees",
    "tools/aot_child.py": "a process of its own, without the interpreter",
    "tools/bench.py": "measures by triton.testing",
}
LONG_FILES = {
    "testing/interp_facts.py": (510, "a table of facts, each with its probe"),
    "testing/orderings.py": (450, "a boot: its notes, and a function for each step"),
}
MOST_LINES = 440

MACHINE = re.compile(r"/(?:work|home|root|Users|tmp)/")
"""Beginnings of paths of one machine."""

TORCH_FREE = (
    "",
    ".errors",
    ".settings",
    ".widths",
    ".layout",
    ".device",
    ".case",
    ".contract",
    ".envelopes",
    ".own_envelopes",
    ".preflight.judge",
    ".preflight.hazards",
    ".preflight.matrix",
    ".known_failures.match",
    ".testing.machine",
)
"""What may be imported without torch: the mode of a run is fixed before anything imports it."""


@dataclass(frozen=True)
class Import:
    """One import statement's target; ``own`` where it is a module of this package (dotted, from its root)."""

    target: str
    own: bool
    relative: bool


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    return module.split(".")[0]


def is_module(parts: list[str]) -> bool:
    place = PACKAGE.joinpath(*parts)
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> tuple[Import, ...]:
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    inside = path.is_relative_to(PACKAGE)
    folder = list(path.relative_to(PACKAGE).parts[:-1]) if inside else []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                own = alias.name.split(".")[0] == PACKAGE.name
                yield Import(alias.name.removeprefix(f"{PACKAGE.name}.") if own else alias.name, own, False)
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                own = (node.module or "").split(".")[0] == PACKAGE.name
                base = (node.module or "").split(".")[1:] if own else [node.module or ""]
            else:
                own, base = True, folder[: len(folder) - node.level + 1] + (node.module or "").split(".")
            base = [part for part in base if part]
            for alias in node.names:
                deeper = own and is_module([*base, alias.name])
                yield Import(".".join([*base, alias.name] if deeper else base), own, node.level > 0)


def own_imports(path: Path) -> set[str]:
    return {found.target for found in imports_of(path) if found.own and found.target}


def foreign(path: Path) -> set[str]:
    return {
        found.target.split(".")[0] for found in imports_of(path) if not found.own
    } - sys.stdlib_module_names


UNKNOWN = len(LAYERS)
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def edges() -> Iterator[tuple[str, str]]:
    """(module, imported module) for every import of one unit by another."""
    for path in FILES:
        module = module_of(path)
        for target in sorted(own_imports(path) - {"__version__"}):
            if unit_of(target) != unit_of(module):
                yield module, target


# ---- the dependency rule


def test_every_unit_has_a_layer() -> None:
    units = {unit_of(module_of(path)) for path in FILES} - {""}

    assert units - set(RANK) == set(), "give it a place in LAYERS"
    assert len(RANK) == sum(map(len, LAYERS))


def test_imports_point_down() -> None:
    def rank(module: str) -> int:
        return RANK.get(unit_of(module), UNKNOWN)

    up = [f"{m} -> {t}" for m, t in edges() if m and rank(t) > rank(m)]

    assert up == []
    assert own_imports(PACKAGE / "__init__.py") == {"settings"}, "importing the package loads nothing else"


def test_units_do_not_import_in_circles() -> None:
    graph: dict[str, set[str]] = {}
    for module, target in edges():
        graph.setdefault(unit_of(module), set()).add(unit_of(target))

    order = list(TopologicalSorter(graph).static_order())  # raises on a circle

    assert order.index("layout") < order.index("kernels") < order.index("targets") < order.index("tools")


def test_some_units_know_a_few_others_only() -> None:
    strangers = [
        f"{module} -> {target}"
        for module, target in edges()
        if unit_of(target) not in ONLY.get(unit_of(module), {unit_of(target)})
        or unit_of(target) in NEVER.get(unit_of(module), ())
    ]

    assert strangers == []


def test_testing_sees_kernels_and_operations_through_a_target_only() -> None:
    direct = [
        f"{module} -> {target}"
        for module, target in edges()
        if unit_of(module) in ("testing", "targets")
        and (
            (unit_of(target) == "kernels" and target not in KERNEL_NAMES[unit_of(module)])
            or (unit_of(target) in PRODUCT and unit_of(target) not in TESTING_SEES_PRODUCT.get(module, ()))
        )
    ]

    assert direct == []


def test_the_exceptions_are_still_needed() -> None:
    for module, units in TESTING_SEES_PRODUCT.items():
        found = own_imports(PACKAGE / f"{module.replace('.', '/')}.py")
        assert units <= {unit_of(target) for target in found}
    for name in IMPORTS_TRITON:
        assert "triton" in foreign(PACKAGE / name)
    for name, (most, _) in LONG_FILES.items():
        assert MOST_LINES < line_count(PACKAGE / name) <= most


def test_the_package_imports_itself_relatively() -> None:
    absolute = [
        f"{name_of(path)}: {found.target}"
        for path in FILES
        for found in imports_of(path)
        if found.own and not found.relative
    ]

    assert absolute == []


def test_other_packages_are_imported_where_they_belong() -> None:
    misplaced = []
    for path in FILES:
        unit, found = unit_of(module_of(path)), foreign(path)
        allowed = {"torch", "numpy", "pydantic"}
        if unit == "testing":
            allowed |= {"pytest", "hypothesis"}  # the product does without the extra "test"
        if unit == "tools":
            allowed |= {"typer", "rich", "jinja2"}
        if unit in ("backends", "preflight", "testing", "tools"):
            allowed |= {"flashinfer"}
        if name_of(path) in IMPORTS_TRITON:
            allowed |= {"triton"}
        misplaced += [f"{name_of(path)}: {package}" for package in sorted(found - allowed)]

    assert misplaced == []


def test_property_tests_read_like_the_specification() -> None:
    assert PROPERTY_TESTS
    for path in PROPERTY_TESTS:
        units = {unit_of(found) for found in own_imports(path)}
        assert units <= {"testing", "targets", "case", "layout", "codec"}, path.name
        assert foreign(path) <= {"hypothesis", "pytest", "torch"}, path.name


# ---- what an import loads


def test_the_plugin_is_light_in_projects_that_do_not_use_it() -> None:
    tree = tree_of(ROOT / "sm120_mla_pytest.py")
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}

    assert names <= {"argparse", "pytest"}
    assert all(node.module == "__future__" for node in top if isinstance(node, ast.ImportFrom))


def test_a_bare_import_loads_neither_torch_nor_triton() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module('sm120_mla' + name)\n"
        "    print(name or 'sm120_mla', *({'torch', 'triton'} & set(sys.modules)))\n"
        "import sm120_mla\n"
        "dir(sm120_mla)\n"
        "print('DSV4', sm120_mla.DSV4.name, *({'torch', 'triton'} & set(sys.modules)))\n"
        "sm120_mla.PersistentBuffers\n"
        "print('then', 'torch' in sys.modules)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=settings.environment(SM120_MLA_MODE="reference"),
        cwd=ROOT,
    )

    assert done.returncode == 0, done.stderr
    names = [name or "sm120_mla" for name in TORCH_FREE]
    assert done.stdout.splitlines() == [*names, "DSV4 dsv4", "then True"]


# ---- the environment


def environment_reads(path: Path) -> list[int]:
    """Lines that reach for the environment of the process."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found += [node.lineno] if node.attr in names else []
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [node.lineno for alias in node.names if alias.name in names]
    return found


def test_the_environment_is_read_in_one_place() -> None:
    outside = [ROOT / "conftest.py", ROOT / "sm120_mla_pytest.py", *PROPERTY_TESTS]

    assert [name_of(path) for path in FILES if environment_reads(path)] == ["settings.py"]
    assert not any(environment_reads(path) for path in outside)


# ---- documentation and size


def assigned_names(tree: ast.Module) -> set[str]:
    targets: list[ast.AST] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_every_module_says_what_it_is() -> None:
    assert [name_of(path) for path in FILES if not ast.get_docstring(tree_of(path))] == []


def test_public_names_exist_and_are_documented() -> None:
    wrong = []
    for path in FILES:
        if path == PACKAGE / "__init__.py":
            continue  # its names are those of other modules, and computed
        tree = tree_of(path)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        defined = {node.name: node for node in tree.body if isinstance(node, kinds)}
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for name in public_names(tree):
            if name not in {*defined, *assigned_names(tree), *imported}:
                wrong.append(f"{name_of(path)}: {name} is not there")
            elif name in defined and not ast.get_docstring(defined[name]):
                wrong.append(f"{name_of(path)}: {name} has no docstring")

    assert wrong == []


def test_files_stay_small() -> None:
    long = {name_of(path): line_count(path) for path in FILES}

    assert {n: k for n, k in long.items() if k > LONG_FILES.get(n, (MOST_LINES, ""))[0]} == {}


def test_nothing_of_one_machine_is_named() -> None:
    texts = [*FILES, *PROPERTY_TESTS, *ROOT.glob("*.md"), *ROOT.glob("*.py"), *ROOT.glob("fixtures/*/*.json")]
    found = [path.name for path in texts if MACHINE.search(path.read_text(encoding="utf-8"))]

    assert found == []


def places() -> list[tuple[str, list[str]]]:
    """The rows of the README's table: what to add, and every path its cells name."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n## Where do I add …\n" in text
    section = text.split("\n## Where do I add …\n")[1].split("\n## ")[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    found = []
    for what, *cells in rows[2:]:
        code = " ".join(re.findall(r"`([^`]+)`", " ".join(cells)))
        found.append((what.strip(), [word for word in code.split() if "/" in word]))
    return found


def test_the_table_of_places_is_true() -> None:
    rows = places()

    missing = {what: [p for p in paths if not list(ROOT.glob(p.rstrip("/")))] for what, paths in rows}
    assert {what: paths for what, paths in missing.items() if paths} == {}
    assert len(rows) >= 6
    assert all(paths for _, paths in rows), "every row says where"
    wanted = ("page layout", "kernel", "invariant", "fault", "target", "setting", "command")
    assert [word for word in wanted if not any(word in what for what, _ in rows)] == []
