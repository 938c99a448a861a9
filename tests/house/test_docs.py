"""Documents name files, modules and documents that exist, and define each word once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")],
)
SOURCES = {"kdabench": ROOT, "kda_kernels": ROOT / "kernels"}
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?:kdabench|kernels|docs|scripts|sweeps|tests|results|\.ci)/[\w./*<>-]*")
_MODULE = re.compile(r"(?:kdabench|kda_kernels)(?:\.\w+)+")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_WRITTEN_BY_COMMANDS = {"verified.json", "report.html", "held.json", "weights.json"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchor(heading: str) -> str:
    """How a heading is linked to."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        assert not target.startswith(("http:", "https:")), f"{target}: outside of the repository"
        file, _, heading = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if heading:
            headings = _HEADING.findall(found.read_text(encoding="utf-8"))
            assert heading in map(anchor, headings), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_what_is_named_exists(path: Path) -> None:
    codes = _CODE.findall(path.read_text(encoding="utf-8"))
    missing = [code for code in codes if _PATH.fullmatch(code) and not exists(code)]
    missing += [code for code in codes if _MODULE.fullmatch(code) and not defined(code)]
    assert missing == []


def exists(named: str) -> bool:
    """Whether a path, whose parts in angle brackets and stars stand for any, has a match."""
    if named.rpartition("/")[2] in _WRITTEN_BY_COMMANDS:
        return True
    return any(ROOT.glob(re.sub(r"<\w+>", "*", named).rstrip("/")))


def defined(dotted: str) -> bool:
    """Whether a dotted name is a module, or what one defines at its top."""
    parts = dotted.split(".")
    folder = SOURCES[parts[0]]
    for end in range(len(parts), 0, -1):
        at = folder.joinpath(*parts[:end])
        files = [file for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file()]
        if files:
            rest = parts[end:]
            return not rest or (len(rest) == 1 and rest[0] in top_names(files[0]))
    return False


def top_names(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=found) | ast.ClassDef(name=found):
                yield found
            case ast.AnnAssign(target=ast.Name(id=found)):
                yield found
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_every_word_is_defined_once() -> None:
    text = (ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    words = Counter(word for row in rows for word in row[0].strip("| ").split(", "))
    headings = {"word", "---"}
    assert [word for word, count in words.items() if count > 1 and word not in headings] == []
    assert [row for row in rows if len(row) != 2] == []


def test_every_document_is_on_the_map() -> None:
    linked = {
        (ROOT / "docs" / target.partition("#")[0]).resolve()
        for target in _LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    }
    pages = {path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")}
    assert pages - linked == {ROOT / "docs" / "index.md"}


def test_names_that_do_not_exist_are_found() -> None:
    assert not exists("kdabench/data/nothing.py")
    assert exists("results/<device>/env.json")
    assert defined("kda_kernels.serving.prepared.PreparedKda")
    assert not defined("kda_kernels.serving.prepared.Nothing")
    assert not defined("kdabench.nothing")
