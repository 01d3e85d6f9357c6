"""House limits (docs: STYLE): how long a file or function may be, what a module must open with, what names are not used."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("relax", "examples", "benchmarks")
MAX_FILE_LINES = 399
MAX_FUNCTION_LINES = 60
MAX_PROTOCOL_METHODS = 8
MAX_DOCSTRING_LINES = 12
FORBIDDEN_MODULE = re.compile(r"(^|_)(utils?|helpers?)(_|$)")
FORBIDDEN_CLASS = re.compile(r"(Manager|Helper|Base)$")

EXCEPTIONS: frozenset[str] = frozenset()
"""Violations that are allowed for now, as `violations` prints them up to the colon. The set may only shrink."""


def files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def violations(name: str, source: str) -> Iterator[tuple[str, str]]:
    """Pairs of what is wrong (`file what thing`) and how, for one file with path `name`."""
    tree = ast.parse(source)
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{name} file", f"{num_lines} lines, at most {MAX_FILE_LINES}"
    if FORBIDDEN_MODULE.search(Path(name).stem):
        yield f"{name} module", "a helper lives in the lowest room that needs it, under the noun it is about"
    docstring = ast.get_docstring(tree, clean=False)
    if tree.body and docstring is None:
        yield f"{name} docstring", "missing: what the module is, who calls it, the invariant it keeps"
    elif docstring is not None and len(docstring.splitlines()) > MAX_DOCSTRING_LINES:
        yield f"{name} docstring", f"{len(docstring.splitlines())} lines, at most {MAX_DOCSTRING_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name} function {node.name}", f"{length} lines, at most {MAX_FUNCTION_LINES}"
        elif isinstance(node, ast.ClassDef):
            yield from class_violations(name, node)


def class_violations(name: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    if FORBIDDEN_CLASS.search(node.name):
        yield f"{name} class {node.name}", "classes are nouns without Manager, Helper or Base"
    is_protocol = any(ast.unparse(base).split("[")[0].split(".")[-1] == "Protocol" for base in node.bases)
    num_methods = sum(isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) for member in node.body)
    if is_protocol and num_methods > MAX_PROTOCOL_METHODS:
        yield f"{name} protocol {node.name}", f"{num_methods} methods, at most {MAX_PROTOCOL_METHODS}"


def all_violations() -> dict[str, str]:
    return {
        what: how for path in files() for what, how in violations(str(path.relative_to(ROOT)), path.read_text("utf-8"))
    }


def test_every_file_keeps_the_house_limits() -> None:
    found = {what: how for what, how in all_violations().items() if what not in EXCEPTIONS}
    assert not found, "\n".join(f"{what}: {how}" for what, how in sorted(found.items()))


def test_no_exception_is_stale() -> None:
    stale = EXCEPTIONS - all_violations().keys()
    assert not stale, f"these are fixed; take them out of EXCEPTIONS: {sorted(stale)}"


def test_there_is_something_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in files()} >= {"relax"}


LONG = "\n".join(["    pass"] * 60)
METHODS = "\n".join(f"    def verb{index}(self): ..." for index in range(9))


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("a.py", '"""A."""\n' + "x = 1\n" * 399, ["a.py file"]),
        ("a.py", "x = 1", ["a.py docstring"]),
        ("a.py", '"""' + "line\n" * 12 + 'last"""', ["a.py docstring"]),
        ("a.py", f'"""A."""\ndef verb():\n{LONG}', ["a.py function verb"]),
        ("a.py", f'"""A."""\nclass Thing(Protocol):\n{METHODS}', ["a.py protocol Thing"]),
        ("a.py", f'"""A."""\nclass Thing:\n{METHODS}', []),
        ("a.py", '"""A."""\nclass RunManager: ...', ["a.py class RunManager"]),
        ("room/utils.py", '"""A."""', ["room/utils.py module"]),
        ("room/test_helper.py", '"""A."""', ["room/test_helper.py module"]),
        ("room/__init__.py", "", []),
        ("a.py", '"""A."""\n' + "x = 1\n" * 398, []),
    ],
)
def test_the_limits_see_what_they_are_for(name: str, source: str, expected: list[str]) -> None:
    assert [what for what, _ in violations(name, source)] == expected
