"""The package's borders: who imports whom, who spells hook names, and what importing costs."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sinkscope as ss

ROOT = Path(ss.__file__).parent
MODULES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): ast.parse(path.read_text("utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}
ORDER = (
    "errors",
    "_types",
    "display",
    "sites",
    "metrics",
    "attention",
    "parts",
    "model",
    "loading",
    "massive",
    "prompts",
    "epe",
    "ablations",
    "guard",
    "capture",
    "scores",
    "fidelity",
    "measures",
    "testing",
    "mitigations",
    "controls",
    "costs",
    "results",
    "partial",
    "published",
    "experiments",
    "reproduction",
    "bench",
    "sweep",
    "verdict",
    "circuits",
    "plots",
    "report",
    "cli",
    "__main__",
)
"""Each module imports only from those before it; a package counts as one."""

HOOK_NAME = re.compile(r"\bhook_(?!dict\b)\w|\bblocks\.|\bhook_$")
"""What a hook name looks like; `model.hook_dict` is where they are found."""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            for other in node.orelse:
                yield from run_time_nodes(other)
            continue
        yield node
        yield from run_time_nodes(node)


def imported(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports when it runs, `from a import b` as `a.b`."""
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_modules(tree: ast.AST) -> set[str]:
    """The first names below sinkscope that a module imports."""
    names = (name.split(".") for name in imported(tree))
    return {parts[1] for parts in names if parts[0] == "sinkscope" and len(parts) > 1} & set(ORDER)


def test_the_order_names_every_module() -> None:
    tops = {name.partition("/")[0] for name in MODULES} - {"__init__"}
    assert tops == set(ORDER)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"__init__"}))
def test_modules_import_only_from_those_before_them(name: str) -> None:
    top = name.partition("/")[0]
    allowed = set(ORDER[: ORDER.index(top)]) | ({top} if "/" in name else set())
    assert own_modules(MODULES[name]) <= allowed


def test_the_package_itself_imports_nothing_at_once() -> None:
    heavy = {name.partition(".")[0] for name in imported(MODULES["__init__"])}
    assert heavy <= {"__future__", "importlib", "typing"}


def test_only_loading_knows_transformer_lens() -> None:
    users = {
        name
        for name, tree in MODULES.items()
        for module in imported(tree)
        if module.partition(".")[0] == "transformer_lens"
    }
    assert users == {"loading"}


def documentation(tree: ast.AST) -> set[int]:
    """The ids of strings that stand alone: docstrings, also of attributes."""
    return {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}


def hook_names(name: str) -> list[str]:
    tree = MODULES[name]
    skipped = documentation(tree)
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in skipped
        and HOOK_NAME.search(node.value)
    ]


def test_only_sites_spells_hook_names() -> None:
    assert "blocks.{layer}.attn.hook_q" in hook_names("sites"), "the search finds what there is"
    elsewhere = {name: hook_names(name) for name in MODULES if name != "sites"}
    assert {name: found for name, found in elsewhere.items() if found} == {}


def test_every_public_name_is_there() -> None:
    assert len(set(ss.__all__)) == len(ss.__all__)
    for name in ss.__all__:
        assert getattr(ss, name) is not None
        assert name in dir(ss)
    for module, names in ss._HOMES.items():
        home = importlib.import_module(f"sinkscope.{module}")
        for name in names:
            assert getattr(ss, name) is getattr(home, name)
    with pytest.raises(AttributeError, match="no attribute 'sink_scores'"):
        _ = ss.sink_scores  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    block = next(node for node in ast.walk(MODULES["__init__"]) if is_type_checking(node))
    seen = set()
    for node in ast.walk(block):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.name == alias.asname, "a name is exported by importing it as itself"
                seen.add((str(node.module), alias.name))
    homes = {(f"sinkscope.{module}", name) for module, names in ss._HOMES.items() for name in names}
    modules = {("sinkscope", name) for name in ss.__all__ if name not in ss._HOME_OF}
    assert seen == homes | modules


def test_importing_is_light() -> None:
    program = (
        "import json, sys, sinkscope; print(json.dumps(sorted(sys.modules)));"
        "sinkscope.SinkscopeError; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    for line in done.stdout.splitlines():
        loaded = {name.partition(".")[0] for name in json.loads(line)}
        assert "sinkscope" in loaded
        assert not loaded & {
            *("transformer_lens", "transformers", "torch", "plotly", "pandas", "numpy", "rich")
        }
