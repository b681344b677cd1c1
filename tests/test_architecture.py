"""The folders are the architecture.

A module may import from the rows above its own and from modules to its left in its row. A starred folder is
one place, acyclic within. `__init__.py` only re-exports and `testing/` may import anything; the package never
imports `testing`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROWS = r"""
    errors units config outcomes machine
    system: clock descriptor lock fs overlay
    block: layout anchors hashing identity
    speeds
    policy: base lru arc registry
    tier: base arena workers copier stream tensor slab_format slab_file slab_piece slab lmdb_store
    wal: records format reader writer
    table: key_index column snapshot block_table catalog state checkpoint journal recovery salvage trace
    audit: report sessions kept_log timeline history follow crash repair rescue
    span pace plan residency disk spiller prefix room mover
    namespace session_file sessions removal cache
    attention* hf*
    metrics cli*
"""

FORBIDDEN = {
    "import pickle": "runs code from a file",
    "import marshal": "its format changes with the interpreter",
    "torch.load": "unpickles",
    "allow_pickle": "unpickles",
    "hash()": "salted, so a key would differ in every process",
    "bare except": "swallows KeyboardInterrupt, and hides what it caught",
}

MAX_FUNCTION_LINES = 60

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "tieredkv"


class Place(NamedTuple):
    row: int
    column: int


def parse_rows(text: str) -> dict[str, Place]:
    """`a b` and `folder: a b` and `folder*`, a row a line, as module name → place."""
    places: dict[str, Place] = {}
    for row, line in enumerate(text.strip().replace("\\\n", "").splitlines()):
        folder, colon, names = line.strip().rpartition(":")
        for column, name in enumerate(names.split()):
            places[f"{folder}.{name}" if colon else name] = Place(row, column)
    return places


PLACES = parse_rows(ROWS)


def place_of(module: str) -> Place | None:
    """Where a module stands; a folder itself stands where its rightmost module does."""
    starred = PLACES.get(module.partition(".")[0] + "*")
    inside = [place for name, place in PLACES.items() if name.startswith(module + ".")]
    return starred or PLACES.get(module) or max(inside, default=None)


def name_of(path: Path) -> str:
    """`tieredkv/tier/slab.py` is `tier.slab`, `tieredkv/tier/__init__.py` is `tier`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
BOUND = [
    name
    for name, path in MODULES.items()
    if path.name != "__init__.py" and name.partition(".")[0] != "testing"
]


def imports_of(module: str, tree: ast.AST, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of every module of the package that the module imports, wherever in its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top, _, rest = alias.name.partition(".")
                if top == "tieredkv":
                    yield node.lineno, rest
        elif isinstance(node, ast.ImportFrom):
            base = origin_of(module, node)
            for alias in node.names if base is not None else ():
                inner = f"{base}.{alias.name}".lstrip(".")
                yield node.lineno, inner if inner in known else str(base)


def origin_of(module: str, node: ast.ImportFrom) -> str | None:
    """What follows `from`, as a name inside the package ("" is the package); None if it is none of ours."""
    if node.level:
        above = module.split(".")[: -node.level]
        return ".".join(above + ([node.module] if node.module else []))
    top, _, rest = (node.module or "").partition(".")
    return rest if top == "tieredkv" else None


def wrong_imports(module: str, source: str, known: set[str]) -> list[str]:
    """What a module imports against the direction of `ROWS`, in words."""
    here = place_of(module)
    if here is None:
        return [f"{module} has no place in ROWS"]
    wrong = []
    for line, imported in imports_of(module, ast.parse(source), known):
        there = place_of(imported) if imported else PLACES["cache"]
        same_folder = imported.partition(".")[0] + "*" in PLACES and here == there
        if there is None or not (there < here or same_folder):
            wrong.append(f"{module}:{line} imports {imported or 'tieredkv'}")
    return wrong


def forbidden_in(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        for found in forbidden_names(node):
            if found in FORBIDDEN:
                yield getattr(node, "lineno", 0), f"{found}: {FORBIDDEN[found]}"


def forbidden_names(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [f"import {alias.name}" for alias in names]
        case ast.ImportFrom(module=module, names=names):
            return [f"import {module}", *(f"{module}.{alias.name}" for alias in names)]
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            return [f"{owner}.{name}"]
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.Call(func=ast.Name(id=name)):
            return [f"{name}()"]
        case ast.ExceptHandler(type=None):
            return ["bare except"]
    return []


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield node.name, num_lines


@pytest.mark.parametrize("module", BOUND)
def test_imports_go_up_or_left(module: str) -> None:
    assert wrong_imports(module, MODULES[module].read_text(), set(MODULES)) == []


@pytest.mark.parametrize("folder", [name[:-1] for name in PLACES if name.endswith("*")])
def test_a_starred_folder_has_no_cycle(folder: str) -> None:
    graph: dict[str, set[str]] = {}
    for module in BOUND:
        if module.startswith(folder + "."):
            imported = imports_of(module, ast.parse(MODULES[module].read_text()), set(MODULES))
            graph[module] = {name for _, name in imported if name.startswith(folder + ".")}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_forbidden(module: str) -> None:
    assert list(forbidden_in(MODULES[module].read_text())) == []


@pytest.mark.parametrize("folder", ["tieredkv", "tools"])
def test_functions_are_short(folder: str) -> None:
    found = {
        f"{path.relative_to(CHECKOUT)}: {name}": num_lines
        for path in sorted((CHECKOUT / folder).rglob("*.py"))
        for name, num_lines in long_functions(path.read_text())
    }
    assert found == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("units", "from .config import Config"),
        ("policy.lru", "from .arc import ARC"),
        ("policy.lru", "from ..tier.arena import Arena"),
        ("policy.lru", "from ..tier import Arena"),
        ("policy.lru", "if TYPE_CHECKING:\n    from ..table.block_table import BlockTable"),
        ("tier.slab", "def f():\n    import tieredkv.wal.format"),
        ("tier.slab", "from tieredkv.wal import format"),
        ("tier.slab", "from .. import cache"),
        ("sessions", "from .cache import TieredCache"),
        ("cache", "from . import open"),
        ("cache", "from .hf.chat import ChatModel"),
        ("hf.chat", "from ..cli.app import run"),
        ("cache", "from .testing.fake_device import FakeDevice"),
        ("stray", "import os"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    known = {*MODULES, *(name for name in PLACES if not name.endswith("*")), "hf.chat", "cli.app"}
    assert len(wrong_imports(module, source, known)) == 1


def test_a_right_import_is_not_seen() -> None:
    known = {*PLACES, "hf.chat", "hf.layers", "cli.app"}
    for module, source in [
        ("policy.lru", "from .base import K\nfrom ..errors import BadConfig\nimport tierless, os"),
        ("cache", "from .policy import make_policy\nfrom .mover import Mover\nfrom . import units"),
        ("hf.chat", "from .layers import Layer\nfrom ..sessions import Sessions"),
        ("cli.app", "from .. import open\nfrom ..hf.chat import ChatModel"),
    ]:
        assert wrong_imports(module, source, known) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(path)",
        "from torch import load",
        "np.load(path, allow_pickle=True)",
        "key = hash(tokens)",
        "try:\n    f()\nexcept:\n    pass",
    ],
)
def test_a_forbidden_thing_is_seen(source: str) -> None:
    assert len(list(forbidden_in(source))) == 1


WHAT_WAS_SAID = {"tokens", "ids", "text", "held", "given", "sequences", "messages", "content"}


def _shown_by_repr(tree: ast.AST) -> Iterator[str]:
    """Fields of dataclasses that hold a prompt, or some of it, and that `repr` would print."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or "dataclass" not in map(_name_of, node.decorator_list):
            continue
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or _name_of(field.target) not in WHAT_WAS_SAID:
                continue
            options = field.value.keywords if isinstance(field.value, ast.Call) else []
            if not any(o.arg == "repr" and ast.literal_eval(o.value) is False for o in options):
                yield f"{node.name}.{_name_of(field.target)}"


def _name_of(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else ""


def test_repr_shows_nothing_of_a_prompt() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "testing" not in path.parts]
    shown = {path.name: [*_shown_by_repr(ast.parse(path.read_text()))] for path in files}
    assert not {name: fields for name, fields in shown.items() if fields}
    source = "@dataclass\nclass A:\n    ids: int\n    text: str = field(repr=False)"
    assert [*_shown_by_repr(ast.parse(source))] == ["A.ids"]
