"""Flip one thing at a time in the numeric core, and see whether the tests notice.

    python scripts/mutation_check.py --jobs 2 --out mutants.json
    python scripts/mutation_check.py --module scores --sample 40

Mutants are made from the source as it is, by kinds (a sign, a scale, an axis, off by one, a mask
turned round, raw and effective bias, ...), each in a copy of the package. A mutant is caught if
a test fails, an import breaks or the time is up. Exits with 1 if fewer than `--least` of them are.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from changed_copies import PACKAGE, Job, Outcome, preload, run

SHARED = ("situations", "test_random_models.py", "test_padding_changes_nothing.py")
TESTS = {
    "metrics": ("test_sink_metrics.py", "test_metrics.py", "test_identities.py", *SHARED),
    "massive": ("test_massive.py", "test_finders.py", "test_errors.py"),
    "epe": ("test_identities.py", "test_folded_weights.py", "test_planted.py", *SHARED),
    "scores": (
        "test_identities.py",
        "test_folded_weights.py",
        "test_architectures.py",
        "test_other_architectures.py",
        *SHARED,
    ),
    "attention": ("test_architectures.py",),
    "circuits": ("test_survey.py",),
    "ablations": ("test_ablations.py", *SHARED, "test_other_architectures.py", "test_errors.py"),
    "fidelity": ("test_identities.py", *SHARED),
    "measures": ("test_identities.py", "test_other_architectures.py", *SHARED),
    "guard": ("situations/test_attention_maths.py", "test_other_architectures.py", *SHARED),
    "model": (
        "test_identities.py",
        "test_folded_weights.py",
        "test_other_architectures.py",
        "test_restoration.py",
        *SHARED,
        "test_leaves_no_trace.py",
        "test_ablations.py",
        "test_errors.py",
    ),
}
"""Which tests may catch a mutant of which module, the quickest first."""

NOT_NUMERIC = {"overview", "__str__", "__repr__", "name", "dtype", "device", "weights_hash"}
"""Functions that words, hashes and displays come from, tested elsewhere."""

SWAPPED = {
    "tril": "triu",
    "triu": "tril",
    "argmax": "argmin",
    "amax": "amin",
    "amin": "amax",
    "any": "all",
    "all": "any",
    "max": "min",
    "min": "max",
    "b_Q": "b_K",
    "b_K": "b_Q",
    "W_Q": "W_K",
    "W_K": "W_Q",
    "clamp_min": "clamp_max",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "new_ones": "new_zeros",
}
WORDS = {
    "raw": "effective",
    "effective": "raw",
    "paper": "score",
    "score": "paper",
    "q": "k",
    "k": "q",
}
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "argmax", "softmax", "norm", "std", "cumsum", "transpose"),
    *("stack", "cat", "repeat_interleave", "gather", "unsqueeze", "quantile", "any", "all"),
}


@dataclass(frozen=True)
class Mutant:
    """One change: where, of what kind, and what the line was and became."""

    module: str
    function: str
    kind: str
    line: int
    before: str
    after: str
    number: int


def mutants_of(module: str) -> Iterator[tuple[Mutant, str]]:
    """Each mutant of a module with the module's whole changed source."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text("utf-8"))
    count = sum(1 for _ in _sites(tree))
    for number in range(count):
        changed = copy.deepcopy(tree)
        owner, statement, node, kind, change = list(_sites(changed))[number]
        before = ast.unparse(statement)
        change()
        after = ast.unparse(statement)
        ast.fix_missing_locations(changed)
        if before != after:
            mutant = Mutant(module, owner, kind, node.lineno, before, after, number)
            yield mutant, ast.unparse(changed)


def _sites(tree: ast.Module) -> Iterator[tuple]:
    """Where a mutation is possible: owner, statement, node, kind, and what carries it out."""
    for owner, function in _functions(tree, ""):
        for statement in _statements(function.body):
            if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
                negated = ast.UnaryOp(ast.Not(), statement.test)
                change = _set(statement, "test", negated)
                yield owner, statement, statement, "negate the condition", change
                continue
            shown = _header_only(statement)
            for node in ast.walk(shown):
                yield from ((owner, shown, node, *c) for c in _changes(node))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef) and child.name not in NOT_NUMERIC:
            yield f"{prefix}{child.name}", child


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that compute, but for what only makes up an error or a docstring."""
    for statement in body:
        if isinstance(statement, (ast.Raise, ast.Import, ast.ImportFrom, ast.Pass)):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _header_only(statement: ast.stmt) -> ast.AST:
    """Of a block its test, iterator or items alone: what is inside has its own turn."""
    if isinstance(statement, (ast.If, ast.While)):
        return statement.test
    if isinstance(statement, ast.For):
        return statement.iter
    if isinstance(statement, ast.AnnAssign):
        return statement.value or ast.Pass(lineno=statement.lineno, col_offset=0)
    if isinstance(statement, (ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)):
        return ast.Pass(lineno=statement.lineno, col_offset=0)
    return statement


def _changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    if isinstance(node, ast.BinOp):
        new = OPERATORS.get(type(node.op))
        if new is not None and not _is_text(node):
            yield f"{type(node.op).__name__} -> {new.__name__}", _set(node, "op", new())
        if isinstance(node.op, ast.Mult):
            yield "drop a factor", _become(node, node.right)
            yield "drop a factor", _become(node, node.left)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = OPERATORS.get(type(node.ops[0]))
        if new is not None:
            yield f"{type(node.ops[0]).__name__} -> {new.__name__}", _set(node, "ops", [new()])
    elif isinstance(node, ast.BoolOp):
        new = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {new.__name__}", _set(node, "op", new())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.USub)):
        if not isinstance(node.operand, ast.Constant):
            yield f"drop {type(node.op).__name__}", _become(node, node.operand)
    elif isinstance(node, ast.IfExp):
        yield "swap the branches", _swap(node)
    elif isinstance(node, ast.Attribute) and node.attr in SWAPPED:
        yield f"{node.attr} -> {SWAPPED[node.attr]}", _set(node, "attr", SWAPPED[node.attr])
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in WORDS:
        yield "another word", _set(node, "value", WORDS[node.value])
    elif isinstance(node, ast.Call):
        yield from _call_changes(node)
    elif isinstance(node, ast.Subscript):
        yield from _index_changes(node.slice)
    elif isinstance(node, ast.keyword) and _is_flag(node.value):
        yield "another flag", _set(node.value, "value", not node.value.value)


def _call_changes(call: ast.Call) -> Iterator[tuple[str, object]]:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else None
    if method == "clone" and not call.args:
        yield "drop clone", _become(call, call.func.value)
    if method in REDUCTIONS:
        values = [*call.args, *(k.value for k in call.keywords if k.arg in ("dim", "correction"))]
        for value in values:
            number = _number(value)
            if number is not None:
                yield "another axis", _become(value, ast.Constant(number - 1 if number else 1))
    if method == "masked_fill" and len(call.args) == 2:
        yield "fill nothing", _become(call, call.func.value)
    if isinstance(call.func, ast.Name) and call.func.id in ("range", "max", "min"):
        for value in call.args:
            number = _number(value)
            if number is not None:
                yield "off by one", _become(value, ast.Constant(number + 1))


def _index_changes(index: ast.AST) -> Iterator[tuple[str, object]]:
    for part in index.elts if isinstance(index, ast.Tuple) else [index]:
        bounds = [part.lower, part.upper] if isinstance(part, ast.Slice) else [part]
        for bound in bounds:
            number = None if bound is None else _number(bound)
            if number is not None:
                yield "off by one", _become(bound, ast.Constant(number + 1))


def _number(node: ast.AST) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    ok = isinstance(node, ast.Constant) and type(node.value) is int
    return node.value if ok else None


def _is_flag(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def _set(node: ast.AST, name: str, value: object) -> object:
    return lambda: setattr(node, name, value)


def _swap(node: ast.IfExp) -> object:
    return _set(node, "test", ast.UnaryOp(ast.Not(), node.test))


def _become(node: ast.AST, other: ast.AST) -> object:
    """Turn a node into another in place."""

    def change() -> None:
        fields = dict(ast.iter_fields(other))
        position = {k: getattr(node, k) for k in ("lineno", "col_offset") if hasattr(node, k)}
        node.__class__ = type(other)
        node.__dict__.clear()
        node.__dict__.update(fields | position)

    return change


# --- running -----------------------------------------------------------------------------


def tests_of(mutant: Mutant, source: str) -> Job:
    """The tests that may catch a mutant, until one does."""
    return Job({f"{mutant.module}.py": source}, TESTS[mutant.module], ["-x"])


def unchanged(modules: list[str]) -> Outcome:
    """The tests of some modules on the package as it is: they must pass."""
    files = [name for module in modules for name in TESTS[module]]
    ((_, outcome),) = run([Job({}, files, ["-x"])], 1, math.inf)
    return outcome


def verdict(outcome: Outcome) -> tuple[str, str]:
    """Whether a mutant was caught or survived or took too long, and the test that caught it."""
    if outcome.code is None:
        return "timeout", ""
    if outcome.code == 0:
        return "survived", ""
    return "caught", outcome.failed[0][:160] if outcome.failed else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="append", choices=sorted(TESTS), help="some modules")
    parser.add_argument("--function", help="only functions whose name holds this")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one mutant")
    parser.add_argument("--least", type=float, default=0.95, help="share that must be caught")
    parser.add_argument("--out", type=Path, help="where to write the outcomes as JSON")
    parser.add_argument(
        "--no-baseline", action="store_true", help="trust that the tests pass without mutants"
    )
    parser.add_argument("--list", action="store_true", help="only say which mutants there are")
    arguments = parser.parse_args()

    chosen = [m for name in arguments.module or sorted(TESTS) for m in mutants_of(name)]
    if arguments.function:
        chosen = [m for m in chosen if arguments.function in m[0].function]
    if arguments.sample is not None and arguments.sample < len(chosen):
        chosen = random.Random(arguments.seed).sample(chosen, arguments.sample)
    if arguments.list:
        for mutant, _ in chosen:
            print(f"{mutant.module}:{mutant.line} {mutant.function} [{mutant.kind}]")
            print(f"    {mutant.before}\n    {mutant.after}")
        print(len(chosen), "mutants")
        return 0

    preload()
    modules = sorted({mutant.module for mutant, _ in chosen})
    baseline = Outcome(0, "", 0.0) if arguments.no_baseline else unchanged(modules)
    if baseline.code:
        print(f"The tests fail without any mutant:\n{baseline.log[-2000:]}")
        return 2
    outcomes: list[dict] = []
    jobs = [tests_of(mutant, source) for mutant, source in chosen]
    for number, ran in run(jobs, arguments.jobs, arguments.timeout):
        found, by = verdict(ran)
        ended = {"outcome": found, "by": by, "seconds": ran.seconds}
        outcome = asdict(chosen[number][0]) | ended
        outcomes.append(outcome)
        line = "{outcome:9} {seconds:6.1f} s  {module}:{line} {function} [{kind}]"
        print(f"{len(outcomes)}/{len(chosen)} {line.format(**outcome)}", flush=True)
        if outcome["outcome"] == "survived":
            print(f"    {outcome['before']}\n    {outcome['after']}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(outcomes, indent=1), "utf-8")

    print(f"\n{'module':12}{'mutants':>9}{'caught':>9}{'survived':>10}")
    counts = Counter((o["module"], o["outcome"] == "survived") for o in outcomes)
    for module in sorted({o["module"] for o in outcomes}):
        caught, survived = counts[module, False], counts[module, True]
        print(f"{module:12}{caught + survived:9}{caught:9}{survived:10}")
    share = sum(o["outcome"] != "survived" for o in outcomes) / max(1, len(outcomes))
    print(f"{share:.1%} of {len(outcomes)} caught")
    return 0 if share >= arguments.least else 1


if __name__ == "__main__":
    raise SystemExit(main())
