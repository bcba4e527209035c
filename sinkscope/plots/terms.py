"""The figure of a query's scores, split into their terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch

from sinkscope.attention import ScoreRule
from sinkscope.errors import InvalidInputError
from sinkscope.experiments.score_terms import QueryTerms
from sinkscope.plots._checks import as_array, index_of
from sinkscope.plots._style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, finish
from sinkscope.plots._text import token_label
from sinkscope.scores import ScoreTerms

_LOOKS = {
    "content": ("content", BLUE, ""),
    "query_bias": ("query bias", ORANGE, "/"),
    "key_bias": ("key bias", SKY, "."),
    "bias_bias": ("bias-bias", GREY, "x"),
    "position_bias": ("ALiBi", GREEN, "-"),
    "soft_cap": ("soft cap", PURPLE, "|"),
}


@dataclass(frozen=True, eq=False)
class _Query:
    """One query of one prompt: terms and attention `[layer head key]`, and what each layer sees."""

    terms: dict[str, np.ndarray]
    attention: np.ndarray
    sees: np.ndarray
    layers: Sequence[int]
    number: int
    tokens: Sequence[str] | None
    bias_kind: str


def score_terms_bars(
    terms: ScoreTerms | QueryTerms,
    batch_row: int = 0,
    *,
    layer: int | None = None,
    head: int | None = None,
    query: int | None = None,
    tokens: Sequence[str] | None = None,
    model: str | None = None,
) -> go.Figure:
    """The terms of one query's scores, stacked for each key it can see, with their sum.

    Positive terms stack up from 0, negative ones down; the markers are the scores before the
    softmax. Score units, the scale included.

    Args:
        terms: from `decompose_scores` or the score-terms experiment.
        batch_row: which prompt; the experiment holds one.
        layer: the layer's number; the one of `head` that attends most to its first key if None.
        head: the head; the one that attends most to its first key if None.
        query: the column of the query; the last one if None.
        tokens: the text at each column, for the labels; the experiment holds its own.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another object, an unknown row, layer, head or query, a query that
            sees no key (padding), or tokens of another number.
    """
    if isinstance(terms, QueryTerms):
        one = _of_experiment(terms, batch_row, query, tokens)
    elif isinstance(terms, ScoreTerms):
        one = _of_batch(terms, batch_row, query, tokens)
    else:
        raise InvalidInputError(
            "score_terms_bars can't draw this",
            expected="ScoreTerms or QueryTerms",
            got=type(terms).__name__,
        )
    n_keys = one.sees.shape[1]
    if one.tokens is not None and len(one.tokens) != n_keys:
        raise InvalidInputError(
            "One token for each column", expected=f"{n_keys} tokens", got=len(one.tokens)
        )
    at, head_at = _where(one, layer, head)
    keys = np.nonzero(one.sees[at])[0].tolist()
    labels = [str(k) if one.tokens is None else f"{k} {token_label(one.tokens[k])}" for k in keys]
    values = {name: term[at, head_at, keys] for name, term in one.terms.items()}
    total = np.sum(list(values.values()), axis=0)
    figure = go.Figure([_bar(name, labels, term) for name, term in values.items()])
    figure.add_trace(
        go.Scatter(
            x=labels,
            y=total,
            mode="markers",
            marker={
                "symbol": "diamond",
                "size": 8,
                "color": "white",
                "line": {"color": BLACK, "width": 1.6},
            },
            name="sum = score before softmax",
            customdata=one.attention[at, head_at, keys],
            hovertemplate="key %{x}: %{y:.4f}, attention %{customdata:.4f}",
        )
    )
    named = one.tokens is not None
    figure.update_xaxes(
        title_text="key (column and token)" if named else "key (column)",
        type="category",
        tickangle=-90 if named else None,
        tickfont={"size": 10},
        dtick=max(1, -(-len(keys) // 64)),
    )
    figure.update_yaxes(title_text="score before softmax (score units)")
    figure.update_layout(barmode="relative", bargap=0.15)
    of_query = f"query {one.number}"
    if one.tokens is not None:
        of_query += f" ({token_label(one.tokens[one.number])})"
    return finish(
        figure,
        f"Terms of the attention scores: layer {one.layers[at]}, head {head_at}, {of_query}",
        subtitle="Stacked terms add up to the score; "
        + (f"query bias is {one.bias_kind}" if "query_bias" in one.terms else "no query bias"),
        model=model,
        body=400,
        bottom=130 if named else 70,
    )


def _of_batch(
    terms: ScoreTerms, batch_row: int, query: int | None, tokens: Sequence[str] | None
) -> _Query:
    rows, _, _, queries, _ = terms.content.shape
    row = index_of(batch_row, range(rows), "batch_row")
    visible = as_array(terms.visible[row], "score_terms_bars").astype(bool)
    if query is None:
        seeing = np.nonzero(visible.any((0, 2)))[0]
        query = int(seeing[-1]) if seeing.size else 0
    number = index_of(query, range(queries), "query")
    sees = visible[:, number]
    sinks = terms.sink_logits
    attention = []
    for at, visible_keys in enumerate(sees):
        rule = ScoreRule(1.0, sink_logits=None if sinks is None else sinks[at])
        scores = terms.total[row : row + 1, at, :, number : number + 1].detach()
        seen = torch.from_numpy(visible_keys)[None, None, None].to(scores.device)
        attention.append(as_array(rule.pattern(scores, seen)[0, :, 0], "terms"))
    return _Query(
        terms={n: as_array(t[row, :, :, number], "terms") for n, t in terms.terms.items()},
        attention=np.stack(attention),
        sees=sees,
        layers=terms.layers,
        number=number,
        tokens=tokens,
        bias_kind=terms.bias_kind,
    )


def _of_experiment(
    terms: QueryTerms, batch_row: int, query: int | None, tokens: Sequence[str] | None
) -> _Query:
    index_of(batch_row, [0], "batch_row")
    n_layers = terms.terms.shape[1]
    return _Query(
        terms=dict(zip(terms.names, as_array(terms.terms, "terms"), strict=True)),
        attention=as_array(terms.attention, "attention"),
        sees=np.isfinite(terms.attention).any(1),
        layers=range(n_layers),
        number=terms.query if query is None else index_of(query, [terms.query], "query"),
        tokens=terms.tokens if tokens is None else tokens,
        bias_kind=terms.bias_kind,
    )


def _where(one: _Query, layer: int | None, head: int | None) -> tuple[int, int]:
    """Layer and head as indices; where not given, those that attend most to the first key."""
    n_heads = one.terms["content"].shape[1]
    at = range(len(one.layers)) if layer is None else [index_of(layer, one.layers, "layer")]
    heads = range(n_heads) if head is None else [index_of(head, range(n_heads), "head")]
    attention = {}
    for la in at:
        if one.sees[la].any():
            for h in heads:
                attention[la, h] = float(one.attention[la, h, one.sees[la]][0])
    if not attention:
        raise InvalidInputError(
            "This query sees no key",
            expected="a column that holds a token",
            got=f"query {one.number}",
        )
    return max(attention, key=lambda place: np.nan_to_num(attention[place], nan=-1.0))


def _bar(name: str, labels: list[str], values: np.ndarray) -> go.Bar:
    label, colour, pattern = _LOOKS[name]
    return go.Bar(
        x=labels,
        y=values,
        name=label,
        marker={
            "color": colour,
            "line": {"color": "white", "width": 0.5},
            "pattern": {"shape": pattern, "solidity": 0.2, "size": 6, "fillmode": "overlay"},
        },
        hovertemplate="key %{x}: %{y:.4f}",
    )
