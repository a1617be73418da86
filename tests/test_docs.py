"""What docs/, README and CONTRIBUTING name exists, and what names a section of docs/design.md finds it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from test_architecture import LAYERS

from sm120_mla.layout import DSV4
from sm120_mla.tools import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
FOLDERS = ("sm120_mla", "tests", "property_tests", "fixtures")
SOURCES = sorted(
    [
        *DOCS,
        *(
            p
            for folder in FOLDERS
            for end in ("py", "json", "md", "ambr")
            for p in ROOT.glob(f"{folder}/**/*.{end}")
        ),
    ]
)

COMMANDS = {
    name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    for name, command in typer.main.get_command(cli.app).commands.items()
}
OTHER_PROGRAMS = {"--snapshot-update"}
"""Options in prose that are of pytest and its plugins."""

PLACE = re.compile(
    r"^(?:(?:sm120_mla|tests|property_tests|fixtures|docs|\.ci)/[\w./{},*-]*|\w+/[\w/]+\.(?:py|md|json))$"
)
A_DOCUMENT = re.compile(r"\b[A-Z][A-Z_]{3,}(?:\.md)?,? sections? \d|\breports? [A-Z]\d\d\b")


def sections(text: str) -> dict[str, str]:
    """Text of each numbered section."""
    parts = re.split(r"^## (\d+)\. .*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def cited(text: str) -> list[str]:
    """Numbers of the sections of docs/design.md that a text names; a line may end anywhere in between."""
    return re.findall(r"docs/design\.md[,`)\]]*\s+(?:#\s+)?section\s+(?:#\s+)?(\d+)", text)


def spans(text: str) -> list[str]:
    """What stands in backticks on one line, or in a fence."""
    fences = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for fence in fences for line in fence.splitlines()]
    return [*re.findall(r"`([^`\n]+)`", rest), *lines]


def expanded(path: str) -> Iterator[str]:
    """A path with braces, spelled out."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    return ("".join(choice) for choice in itertools.product(*parts))


def places(text: str) -> set[str]:
    """Files and folders of this repository that a text names."""
    named = {word.rstrip(".,;:").split("::")[0] for span in spans(text) for word in span.split()}
    links = re.findall(r"\]\(([^)#:\s]+)\)", text)
    return {path for path in named if PLACE.match(path)} | set(links)


def missing(doc: Path) -> list[str]:
    """Places that are not there: from the root, from the document's folder, or within the package."""
    roots = (ROOT, doc.parent, ROOT / "sm120_mla")
    return sorted(
        path
        for path in places(doc.read_text(encoding="utf-8"))
        if not all(any(list(root.glob(one.rstrip("/"))) for root in roots) for one in expanded(path))
    )


def unknown_options(text: str) -> list[str]:
    """Options that are given to a command and are none of it, and options in prose that no command has."""
    found, everything = [], set().union(*COMMANDS.values(), OTHER_PROGRAMS)
    for line in text.splitlines():
        row = re.match(r"\| `sm120-mla (\w+)[^`]*` \|(.*)", line)
        if row:
            found += [f"{row[1]} {o}" for o in options(row[2]) if o not in COMMANDS.get(row[1], ())]
    for span in spans(text):
        called = re.search(r"sm120-mla (\w+)([^#|]*)", span)
        if called:
            known = COMMANDS.get(called[1])
            found += [f"{called[1]} (no such command)"] if known is None else []
            found += [f"{called[1]} {o}" for o in options(called[2]) if o not in (known or ())]
        elif span.startswith("--"):
            found += [o for o in options(span)[:1] if o not in everything]
    return found


def options(text: str) -> list[str]:
    """Long options."""
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)


# ---- docs/design.md


def test_its_sections_are_numbered_without_a_gap() -> None:
    numbers = re.findall(r"^## (.*?)\.? ", DESIGN, re.MULTILINE)

    assert numbers == [str(n) for n in range(1, len(numbers) + 1)]


def test_every_section_that_is_cited_exists() -> None:
    there = sections(DESIGN)
    found = {path.name: cited(path.read_text(encoding="utf-8")) for path in SOURCES if path != Path(__file__)}

    assert sum(map(len, found.values())) >= 8
    assert {name: n for name, n in found.items() if not set(n) <= set(there)} == {}


def test_no_document_is_cited_that_is_not_here() -> None:
    """Origins of invariants are shown to users: they name public issues, or pages of docs/."""
    found = [
        f"{path.relative_to(ROOT)}: {hit[0]}"
        for path in SOURCES
        if path != Path(__file__)
        for hit in A_DOCUMENT.finditer(path.read_text(encoding="utf-8"))
    ]

    assert found == []


def test_its_layers_are_those_of_the_dependency_rule() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", sections(DESIGN)["12"], re.MULTILINE)

    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == [set(layer) for layer in LAYERS]


@pytest.mark.parametrize("tokens", [64, 256])
def test_its_pages_are_those_of_the_layout(tokens: int) -> None:
    text = sections(DESIGN)["3"]

    assert f"{DSV4.payload(tokens):,}" in text
    assert f"{DSV4.default_stride(tokens):,}" in text
    assert f"P*{DSV4.bytes_per_token}" in text
    assert f"`[P*{DSV4.offset('scales', 1, 1) - DSV4.footer_bytes} + t*{DSV4.footer_bytes}," in text


# ---- every document


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_every_place_it_names_exists(doc: Path) -> None:
    assert missing(doc) == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_every_option_it_names_exists(doc: Path) -> None:
    assert unknown_options(doc.read_text(encoding="utf-8")) == []


# ---- that these checks see


def test_a_place_that_is_not_there_is_seen(tmp_path: Path) -> None:
    doc = tmp_path / "page.md"
    doc.write_text(
        "`sm120_mla/layout.py`, `kernels/spec.py::x`, `sm120_mla/{errors,nothing}.py`, [x](gone.md)\n"
        "```\npytest tests/test_gone.py\n```\n",
        encoding="utf-8",
    )

    assert missing(doc) == ["gone.md", "sm120_mla/{errors,nothing}.py", "tests/test_gone.py"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`sm120-mla verify --mode reference`", []),
        ("`sm120-mla verify --good A`", ["verify --good"]),
        ("`sm120-mla verity`", ["verity (no such command)"]),
        ("| `sm120-mla replay CASE.json` | judges; `--mode`, `--examples N` |", ["replay --examples"]),
        ("say `--absent-is-good`, or `--absent-is-bad`", ["--absent-is-bad"]),
        ("```sh\nsm120-mla bisect --good A --better B\n```", ["bisect --better"]),
    ],
)
def test_an_option_that_is_not_there_is_seen(text: str, found: list[str]) -> None:
    assert unknown_options(text) == found


def test_a_citation_is_seen_across_lines() -> None:
    assert cited("docs/design.md, section 4, and (docs/design.md,\n    section 12)") == ["4", "12"]
    assert A_DOCUMENT.search("as DESIGN section 8 says")
    assert A_DOCUMENT.search("report A09")
