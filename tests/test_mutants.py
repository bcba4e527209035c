"""The list of mutants that survive names mutants of the source as it is."""

from __future__ import annotations

import ast
import json

from changed_copies import PACKAGE
from mutation_check import MODULES, SURVIVORS, _sites, reasons


def test_what_is_listed_can_still_be_mutated_and_says_why_no_test_finds_it() -> None:
    """A change of such a line asks for a new look at whether its mutants survive."""
    there = set()
    for module in MODULES:
        tree = ast.parse((PACKAGE / f"{module}.py").read_text("utf-8"))
        for function, statement, _, kind, _ in _sites(tree):
            there.add((module, function, kind, ast.unparse(statement)))
    listed = json.loads(SURVIVORS.read_text("utf-8"))
    for one in listed:
        assert (one["module"], one["function"], one["kind"], one["before"]) in there, one
        assert one["before"] != one["after"]
        assert len(one["reason"]) > 20
    assert len(reasons()) == len(listed)
