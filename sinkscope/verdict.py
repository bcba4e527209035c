"""What a run says about a model, in words: is there a sink, what carries it, what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkscope.bench import UNTOUCHED, MitigationBench
from sinkscope.errors import InvalidInputError
from sinkscope.experiments.table1 import POOLED, Table1

SINK_RATIO = 3.0
"""A sink is at least this many times what uniform attention would give position 0."""
CARRIES = 0.75
"""A part carries the sink if the sink falls below this share without it."""
CONTROL = 0.9
"""A control leaves the sink alone if at least this share of it stays."""

PARTS = {
    "No Query Bias": "the query bias b_Q",
    "Remove First PE": "the position vector of position 0",
    "Swap EPE": "the effective positional encoding of position 0",
    "No MLP": "the MLPs",
    "No PE": "the position embeddings",
    "Zero Top-3 Wk": "the key weights at the three largest coordinates of EPE_0",
}
CONTROLS = {
    "Swap PE": "swapping the raw position vectors after the first MLP",
    "Nullify BOS Token": "nulling the first token's embedding",
    "Zero Random Wk": "removing as many random key columns",
}
TOKEN = "Nullify BOS Token"
CIRCUIT = ("No Query Bias", "Remove First PE", "Swap EPE", "Zero Top-3 Wk")
"""Without any of these the paper's circuit is broken."""
HIDDEN = "Not applicable: no query of a prompt's second half sees the first position."
"""What windows on attention may do."""


@dataclass(frozen=True)
class Verdict:
    """What Table 1 says in words.

    Attributes:
        headline: one sentence.
        sentences: what each condition does, in the order of the table.
    """

    headline: str
    sentences: tuple[str, ...]


def verdict(table: Table1) -> Verdict:
    """Read a table: position 0's share against the uniform one, and each condition against it.

    A sink is a share of at least 3 times the uniform one. A part carries it if less than
    three quarters stay without the part; a control should leave at least nine tenths.

    Args:
        table: with the untouched model under the name Baseline.
    """
    rows = table.to_dataframe()
    pooled = rows[rows.corpus == (POOLED if POOLED in set(rows.corpus) else rows.corpus.iloc[-1])]
    scores = dict(zip(pooled.condition, pooled.sink_score, strict=True))
    uniform = table.uniform
    baseline = scores.get("Baseline")
    if baseline is None:
        return Verdict("The table has no untouched model to compare with.", ())
    if math.isnan(baseline):
        return Verdict(HIDDEN, ())
    share = f"Position 0 receives {baseline:.1%} of attention in layers {_span(table.mid_layers)}"
    share += f"; uniform attention would give it {uniform:.1%}"
    if SINK_RATIO * uniform >= 1:
        return Verdict(f"The prompts are too short to tell. {share}.", ())
    if baseline < SINK_RATIO * uniform:
        return Verdict(f"No sink at position 0. {share}.", ())
    kept = {name: score / baseline for name, score in scores.items()}
    missing = dict(table.not_applicable)
    sentences = [_sentence(name, kept, missing) for name in (*PARTS, *CONTROLS)]
    return Verdict(
        f"{circuit(kept, missing)} {share}.", tuple(s for s in sentences if s is not None)
    )


def circuit(kept: Mapping[str, float], missing: Mapping[str, str]) -> str:
    """Which circuit carries a sink, in a sentence.

    Args:
        kept: condition -> what is left of the sink score under it.
        missing: condition -> why it does not apply.
    """
    carrying = [name for name in CIRCUIT if kept.get(name, 1.0) < CARRIES]
    clean = all(kept[name] >= CONTROL for name in _controls(missing) if name in kept)
    if len(carrying) == len(CIRCUIT) and clean:
        return "A sink at position 0, carried by the paper's circuit."
    if carrying:
        parts = ", ".join(PARTS[name] for name in carrying)
        others = [n for n in CIRCUIT if n not in carrying and n not in missing]
        rest = "; not by " + ", ".join(PARTS[name] for name in others) if others else ""
        caveat = "" if clean else " A control moves it too, so read the single lines with care."
        part = f"A sink at position 0, carried by part of the paper's circuit: {parts}"
        return f"{part}{rest}.{caveat}"
    if TOKEN not in _controls(missing) and kept.get(TOKEN, 1.0) < CARRIES:
        return "A sink at position 0, carried by the token there and not by the paper's circuit."
    return "A sink at position 0, carried by something other than the paper's circuit."


def _controls(missing: Mapping[str, str]) -> tuple[str, ...]:
    """Without learned positions a nulled token leaves nothing at position 0: no control."""
    return tuple(name for name in CONTROLS if name != TOKEN or "Remove First PE" not in missing)


def _sentence(name: str, kept: dict[str, float], missing: dict[str, str]) -> str | None:
    what = PARTS.get(name) or CONTROLS[name]
    if name in missing:
        return f"{name}: not applicable. {missing[name]}"
    if name not in kept:
        return None
    change = kept[name] - 1
    moved = f"removes {-change:.0%} of the sink" if change < 0 else f"adds {change:.0%} to it"
    if name in _controls(missing):
        fit = "as a control should" if kept[name] >= CONTROL else "more than a control should"
        moved = f"leaves {kept[name]:.0%} of the sink, {fit}"
        return f"{name}: {what} {moved}."
    if name in CONTROLS:
        return f"{name}: {what} {moved}."
    return f"{name}: taking away {what} {moved}."


def _span(layers: tuple[int, ...]) -> str:
    return f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else str(layers[0])


# --- the mitigation bench -----------------------------------------------------------------

HALF = 0.5
"""The headline of a bench names the cheapest way to take away at least this share of the sink."""


def mitigation_verdict(bench: MitigationBench) -> Verdict:
    """Read a bench: what each mitigation takes of the sink, what it costs, and the control's.

    A cost is told from none where its 95 % bootstrap interval over prompts leaves out 0.

    Args:
        bench: from `mitigation_bench`.
    """
    if not isinstance(bench, MitigationBench):
        raise InvalidInputError(
            "This is no bench",
            expected="what mitigation_bench gives",
            got=type(bench).__name__,
            fix="call mitigation_bench(model, prompts) first",
        )
    rows = bench.to_dataframe().to_dict("records")
    untouched, mitigations = rows[0], rows[1:]
    share = f"Position 0 receives {untouched['sink_score']:.1%} of attention in layers "
    share += f"{_span(bench.mid_layers)} of the untouched model, whose loss is "
    share += f"{untouched['loss']:.3f} nats per token"
    halving = [row for row in mitigations if row["sink_removed"] >= HALF]
    if halving:
        best = min(halving, key=lambda row: (row["loss_added"], -row["sink_removed"]))
        headline = f"{_takes(best, sentence=False)}: the least cost at which half of the sink goes."
    else:
        headline = "No mitigation takes away half of the sink."
    front = [bench.names[n] for n in bench.pareto if bench.names[n] != UNTOUCHED]
    sentences = [f"{share}.", *(_takes(row) + _control(row) + "." for row in mitigations)]
    if front:
        sentences.append(f"Not beaten on both counts: {', '.join(front)}.")
    return Verdict(headline, (*sentences, *_precision(bench, rows), *_windows(bench, rows)))


def _takes(row: dict[str, Any], sentence: bool = True) -> str:
    cost = _cost("loss_added", row)
    told = ", not told from none" if row["loss_added_low"] <= 0 <= row["loss_added_high"] else ""
    does = f"{row['mitigation']} {_moves(row['sink_removed'])} at {cost}"
    return does + (told if sentence else "")


def _moves(removed: float) -> str:
    share = f"{abs(removed):.0%}"
    if share == "0%":
        return "leaves the sink as it is"
    return f"takes {share} of the sink" if removed > 0 else f"adds {share} to the sink"


def _cost(name: str, row: dict[str, Any]) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:+.3f} nats per token [{low:+.3f}, {high:+.3f}]"


def _control(row: dict[str, Any]) -> str:
    if np.isnan(row["control_loss_added"]):
        return "; no equal-budget control"
    moves = _moves(row["control_sink_removed"])
    return f"; its random control {moves} at {row['control_loss_added']:+.3f}"


def _precision(bench: MitigationBench, rows: list[dict[str, Any]]) -> list[str]:
    """What rounding costs with the sink, and where most of it is gone."""
    if np.isnan(rows[0]["quantisation_cost"]):
        return []
    least = min(rows, key=lambda row: row["sink_score"])
    words = (
        f"W{bench.bits}A{bench.bits} costs the untouched model "
        f"{_cost('quantisation_cost', rows[0])}"
    )
    if least["mitigation"] == UNTOUCHED:
        return [f"{words}."]
    return [f"{words}, and with {least['mitigation']} {_cost('quantisation_cost', least)}."]


def _windows(bench: MitigationBench, rows: list[dict[str, Any]]) -> list[str]:
    plain, kept = rows[0]["windowed"], rows[0]["windowed_kept"]
    if np.isnan(plain):
        return []
    loss = rows[0]["loss"]
    return [
        f"With the last {bench.window} keys in view the untouched model loses "
        f"{plain - loss:+.3f} nats per token, with the first {bench.keep_first} kept "
        f"{kept - loss:+.3f}."
    ]
