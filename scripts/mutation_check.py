"""Flip one thing at a time in the numeric core, and see whether the tests notice.

    python scripts/mutation_check.py --jobs 2 --out mutants.json
    python scripts/mutation_check.py --module scores --sample 40

Mutants are made from the source as it is, by kinds (a sign, a scale, an axis, off by one, a mask
turned round, raw and effective bias, ...), each in a copy of the package. The tests run once on
the package as it is, with a trace of the lines that each of them reaches (needs `coverage`). A
mutant then meets the tests that reach its line, the quickest first, and after them the others
that reach its module. It is caught if one of them fails, an import breaks or the time is up; it
survives if none has failed when `--budget` seconds are over. Outcomes in `--out` are kept, and a
second run goes on from there; with `--again` those that survived meet the tests once more, with
new tests, more time, or another transformer-lens. `survivors.json` lists which survive, and why.
Exits with 1 if fewer than `--least` are caught, or one survives that is not listed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from changed_copies import PACKAGE, Job, Outcome, preload, run

MODULES = (
    *("ablations", "attention", "circuits", "epe", "fidelity", "guard", "massive"),
    *("measures", "metrics", "model", "scores"),
)
TESTS = (
    "situations",
    "test_ablations.py",
    "test_architectures.py",
    "test_blocks.py",
    "test_capture.py",
    "test_errors.py",
    "test_extension.py",
    "test_finders.py",
    "test_folded_weights.py",
    "test_identities.py",
    "test_leaves_no_trace.py",
    "test_massive.py",
    "test_metrics.py",
    "test_mitigations.py",
    "test_other_architectures.py",
    "test_padding_changes_nothing.py",
    "test_planted.py",
    "test_random_models.py",
    "test_reference.py",
    "test_restoration.py",
    "test_sink_metrics.py",
    "test_small_and_strange.py",
    "test_survey.py",
    "test_tolerances.py",
)
"""The tests that may catch a mutant: those that no file, process or browser slows down."""

SURVIVORS = Path(__file__).with_name("survivors.json")
"""What is known to survive: mutants as in `--out`, each with the reason why no test finds it."""

FEW = 2
"""So many test files meet a mutant at first: to import them all takes longer than most tests."""

SLICE = 20
"""After so many mutants those that still live meet the rest, so that what is kept is no choice."""

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
    last: int
    before: str
    after: str
    nth: int
    """Of those that read alike."""


def mutants_of(module: str) -> Iterator[tuple[Mutant, str]]:
    """Each mutant of a module with the module's whole changed source."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text("utf-8"))
    count = sum(1 for _ in _sites(tree))
    alike: Counter[tuple[str, ...]] = Counter()
    for number in range(count):
        changed = copy.deepcopy(tree)
        owner, statement, _, kind, change = list(_sites(changed))[number]
        before = ast.unparse(statement)
        change()
        after = ast.unparse(statement)
        ast.fix_missing_locations(changed)
        if before != after:
            what = (owner, kind, before, after)
            where = (statement.lineno, statement.end_lineno)
            yield (
                Mutant(module, owner, kind, *where, before, after, alike[what]),
                ast.unparse(changed),
            )
            alike[what] += 1


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
    # `strict=` only turns a mistake of ours into an error.
    elif isinstance(node, ast.keyword) and node.arg != "strict" and _is_flag(node.value):
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


class Trace:
    """A plugin of pytest that writes down how long each test takes and which lines it reaches."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._seconds: dict[str, float] = {}

    def pytest_configure(self) -> None:
        import coverage

        self._coverage = coverage.Coverage(data_file=None, include=["*/sinkscope/*.py"])
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        import sinkscope

        data = self._coverage.get_data()
        lines: dict[str, dict[str, list[str]]] = {}
        for module in MODULES:
            file = str(Path(sinkscope.__file__).with_name(f"{module}.py"))
            lines[module] = {
                str(line): [name for name in tests if name]
                for line, tests in data.contexts_by_lineno(file).items()
            }
        self._out.write_text(json.dumps({"seconds": self._seconds, "lines": lines}), "utf-8")


class Chosen:
    """A plugin of pytest that runs chosen tests in a given order, until the time is over."""

    def __init__(self, order: Sequence[str], budget: float) -> None:
        self._place = {name: n for n, name in enumerate(order)}
        self._budget = budget
        self._began = 0.0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self._place]
        items.sort(key=lambda item: self._place[item.nodeid])
        self._began = time.monotonic()

    def pytest_runtest_teardown(self, item: Any) -> None:
        if time.monotonic() - self._began > self._budget:
            item.session.shouldstop = "the time is over"

    def pytest_sessionfinish(self, session: Any) -> None:
        if session.shouldstop == "the time is over" and not session.testsfailed:
            session.exitstatus = 0


def trace(out: Path) -> dict[str, Any]:
    """Run all tests on the package as it is; what `Trace` wrote down.

    Raises:
        SystemExit: a test failed.
    """
    ((_, outcome),) = run([Job({}, TESTS, ["-x"], [Trace(out)])], 1, math.inf)
    if outcome.code:
        raise SystemExit(f"The tests fail without any mutant:\n{outcome.log[-2000:]}")
    return json.loads(out.read_text("utf-8"))


def order_for(mutant: Mutant, traced: dict[str, Any]) -> list[str]:
    """Tests that reach the mutant's lines, then others of files that reach its module, varied.

    What tests share is made by the first of them, which alone then reaches the lines that make
    it, though others look at it: so all of a file count.
    """
    lines = traced["lines"].get(mutant.module, {})
    near: set[str] = set()
    for line in range(mutant.line, mutant.last + 1):
        near.update(lines.get(str(line), ()))
    files = {_file(name) for names in lines.values() for name in names}
    rest = {name for name in traced["seconds"] if _file(name) in files} - near
    return [name for group in (near, rest) for name in _varied(group, traced["seconds"])]


def _varied(tests: set[str], seconds: dict[str, float]) -> list[str]:
    """The quickest test of each case (an architecture, a padding), then their second quickest...

    By their time alone a hundred tests of one small model would come before any of another.
    """
    cases: dict[str, list[str]] = {}
    for name in sorted(tests, key=lambda name: (seconds[name], name)):
        cases.setdefault(name.partition("[")[2] or name, []).append(name)
    return [name for turn in zip_longest(*cases.values()) for name in turn if name is not None]


def outcomes_of(
    mutants: Sequence[tuple[Mutant, str]], traced: dict[str, Any], jobs: int, budget: float
) -> Iterator[dict]:
    """Run each mutant's tests: first those of two files, and all where these let it live."""
    living: list[int] = []
    orders = [order_for(mutant, traced) for mutant, _ in mutants]
    files = [list(dict.fromkeys(map(_file, order))) for order in orders]
    for few in (True, False):
        numbers = [n for n, order in enumerate(orders) if order] if few else living
        work = []
        for n in numbers:
            mutant, source = mutants[n]
            chosen = files[n][:FEW] if few else files[n][FEW:]
            plugin = Chosen([name for name in orders[n] if _file(name) in chosen], budget)
            work.append(Job({f"{mutant.module}.py": source}, chosen, ["-x"], [plugin]))
        for place, ran in run(work, jobs, 3 * budget):
            number = numbers[place]
            found, by = verdict(ran)
            if few and found == "survived" and len(files[number]) > FEW:
                living.append(number)
                continue
            ended = {"outcome": found, "by": by, "seconds": ran.seconds}
            yield asdict(mutants[number][0]) | ended
    for number, order in enumerate(orders):
        if not order:  # no test comes near its module
            yield asdict(mutants[number][0]) | {"outcome": "survived", "by": "", "seconds": 0.0}


def _file(test: str) -> str:
    return test.split("::", maxsplit=1)[0].removeprefix("tests/")


def verdict(outcome: Outcome) -> tuple[str, str]:
    """Whether a mutant was caught or survived or took too long, and the test that caught it."""
    if outcome.code is None:
        return "timeout", ""
    if outcome.code == 0:
        return "survived", ""
    return "caught", outcome.failed[0][:160] if outcome.failed else ""


def _key(mutant: dict) -> str:
    """A mutant by what it changes, so that lines may move between two runs."""
    return "|".join(
        str(mutant[name]) for name in ("module", "function", "kind", "before", "after", "nth")
    )


def reasons() -> dict[str, str]:
    """Why a mutant survives, by its key."""
    return {_key(one): one["reason"] for one in json.loads(SURVIVORS.read_text("utf-8"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="append", choices=MODULES, help="some modules")
    parser.add_argument("--function", help="only functions whose name holds this")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--budget", type=float, default=120, help="seconds of tests for a mutant")
    parser.add_argument("--least", type=float, default=0.95, help="share that must be caught")
    parser.add_argument("--out", type=Path, help="where to keep the outcomes as JSON")
    parser.add_argument("--again", action="store_true", help="also those that survived before")
    parser.add_argument("--tests", nargs="+", choices=TESTS, help="only these of the tests")
    parser.add_argument("--trace", type=Path, help="where to keep the trace, to use it again")
    parser.add_argument("--list", action="store_true", help="only say which mutants there are")
    arguments = parser.parse_args()

    chosen = [m for name in arguments.module or MODULES for m in mutants_of(name)]
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
    kept = arguments.trace
    if kept and kept.exists():
        traced = json.loads(kept.read_text("utf-8"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            traced = trace(kept or Path(folder) / "trace.json")
    if arguments.tests:
        of = {
            n: t for n, t in traced["seconds"].items() if _file(n).split("/")[0] in arguments.tests
        }
        traced["seconds"] = of
        for module in traced["lines"].values():
            for line, names in module.items():
                module[line] = [name for name in names if name in of]
    known: dict[str, dict] = {}
    if arguments.out and arguments.out.exists():
        before = json.loads(arguments.out.read_text("utf-8"))
        again = ("survived",) if arguments.again else ()
        known = {_key(o): o for o in before if o["outcome"] not in again}
    outcomes = [known[key] for m, _ in chosen if (key := _key(asdict(m))) in known]
    left = [m for m in chosen if _key(asdict(m[0])) not in known]
    slices = (left[at : at + SLICE] for at in range(0, len(left), SLICE))
    ended = (outcomes_of(part, traced, arguments.jobs, arguments.budget) for part in slices)
    for outcome in chain.from_iterable(ended):
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
    living = [o for o in outcomes if o["outcome"] == "survived"]
    share = 1 - len(living) / max(1, len(outcomes))
    listed = reasons()
    unlisted = [o for o in living if _key(o) not in listed]
    for outcome in unlisted:
        print("not in survivors.json: {module}:{line} {function} [{kind}]".format(**outcome))
    print(f"{share:.1%} of {len(outcomes)} caught")
    return 0 if share >= arguments.least and not unlisted else 1


if __name__ == "__main__":
    raise SystemExit(main())
