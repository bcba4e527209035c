"""What the figures hold: planted values, error bars, labels, scales, legends, escaping."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import inspect
import json
import re
from dataclasses import fields, replace

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from sinkscope import plots
from sinkscope.bench import MEASURES, MitigationBench
from sinkscope.circuits import Survey, SurveyRow
from sinkscope.errors import InvalidInputError, WriteError
from sinkscope.experiments.attention_maps import AttentionMaps
from sinkscope.experiments.coordinate_alignment import CoordinateAlignment
from sinkscope.experiments.delta import Delta
from sinkscope.experiments.epe_bias_alignment import EpeBiasAlignment
from sinkscope.experiments.epe_fidelity import EpeFidelity
from sinkscope.experiments.massive_activations import MassiveActivations
from sinkscope.experiments.score_terms import QueryTerms
from sinkscope.experiments.table1 import Table1
from sinkscope.massive import MeanStd, TopK
from sinkscope.plots import export
from sinkscope.plots._text import safe, token_label, wrapped
from sinkscope.published import published
from sinkscope.scores import ScoreTerms
from sinkscope.sweep import HeadSweep

FIGURES = sorted(set(plots.__all__) - {"READING", "HTML_CONFIG", "save_figure"})
HOSTILE = "<script>alert(1)</script> <b>x</b> $y$ a & b"


# --- results with planted truths ----------------------------------------------------------


def make_delta(layers: int = 3, positions: int = 6, convention: str = "paper") -> Delta:
    """Position 0 gets 10 (20 in the last layer), position j gets j, plus 0 to 0.9 over prompts."""
    values = np.zeros((10, layers, 2, positions))
    values += np.arange(positions) + 0.1 * np.arange(10)[:, None, None, None]
    values[..., 0] += 10
    values[:, -1, :, 0] += 10
    return Delta(values=values, convention=convention)


def make_table(beside_published: bool = False) -> Table1:
    scores = np.zeros((2, 4, 3, 2))
    scores[0] = 0.6
    scores[0, :, 1] += np.array([0.1, -0.1, 0.2, 0.0])[:, None]
    scores[1] = 0.2
    return Table1(
        scores=scores,
        conditions=("Baseline", "No Query Bias"),
        corpora=("math", "math", "code", "code"),
        mid_layers=(1,),
        uniform=0.034,
        not_applicable=(("No PE", "no position table"),),
        beside_published=beside_published,
    )


def make_maps(tokens: tuple[str, ...] | None = None, heads: int = 6) -> AttentionMaps:
    """Head h of layer l in condition c gives position 0 its own share; the rest is even."""
    tokens = ("The", " cat", "\n", "<b>", "<script>") if tokens is None else tokens
    n, layers, conditions = len(tokens), 5, ("Baseline", "No <b>PE</b>")
    patterns = np.zeros((2, layers, heads, n, n))
    for c in range(2):
        for la in range(layers):
            for h in range(heads):
                share = (1 + la) * (1 + h) / ((1 + c) * 40)
                for q in range(1, n):
                    patterns[c, la, h, q, : q + 1] = (1 - share) / q
                    patterns[c, la, h, q, 0] = share
                patterns[c, la, h, 0, 0] = 1
    return AttentionMaps(patterns, conditions, tuple(range(10, 10 + layers)), tokens)


def make_alignment() -> CoordinateAlignment:
    gamma = np.full((2, 3, 8), 0.25)
    gamma[..., 5] = -2.0
    gamma[1, 2] = [1, -3, 0, 0, 2, -10, 0, 4]
    return CoordinateAlignment(gamma, (5,), "MeanStd(k=3.0)")


def make_massive() -> MassiveActivations:
    epe = np.zeros(20)
    epe[[3, 11]] = [-9.0, 6.0]
    rules = (repr(MeanStd(3.0)), repr(TopK(3)), "far", "open")
    thresholds = (5.0, 0.5, 1000.0, float("-inf"))
    return MassiveActivations(epe, 0, rules, ((3, 11), (0, 3, 11), (), ()), thresholds)


def make_terms() -> ScoreTerms:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2, 3, 4, 4)
    content = torch.randn(shape, generator=generator)
    query_bias = torch.randn(2, 2, 3, 1, 4, generator=generator).expand(shape)
    key_bias = torch.randn(2, 2, 3, 4, 1, generator=generator).expand(shape)
    bias_bias = torch.randn(1, 2, 3, 1, 1, generator=generator).expand(shape)
    visible = torch.ones(2, 2, 4, 4, dtype=torch.bool).tril().clone()
    visible[1, :, :, 0] = visible[1, :, 0] = False  # the second prompt is padded on the left
    return ScoreTerms(
        terms={
            "content": content,
            "query_bias": query_bias,
            "key_bias": key_bias,
            "bias_bias": bias_bias,
        },
        visible=visible,
        layers=(4, 7),
        bias_kind="raw",
        max_error=0.0,
        pattern_error=0.0,
        tolerance=1.0,
    )


def make_fidelity(positions: int = 5) -> EpeFidelity:
    ramp = np.linspace(0.5, 0.9, 11)[:, None] * np.ones(positions)
    return EpeFidelity(mlp=ramp, block=ramp - 0.3, causal_block=ramp - 0.4)


def make_cosines() -> EpeBiasAlignment:
    cosines = np.full((3, 2, 4), -0.2)
    cosines[..., 0] = 0.8
    return EpeBiasAlignment(cosines)


def make_survey() -> Survey:
    """Two models; the second has no query bias."""
    first = SurveyRow(
        model="<i>one</i>",
        size=(2, 2, 2, 8),
        query_bias="yes",
        effective_query_bias="yes",
        positions="learned",
        first_mlp=True,
        normalization="LN",
        other_parts=(),
        starts_with_bos=0,
        n_prompts=3,
        sink_score=0.5,
        uniform=0.1,
        sink_score_by_layer=(0.1, 0.5),
        sink_rate_3=0.5,
        sink_rate_8=0.0,
        sink_position=0,
        sink_position_share=0.9,
        strongest=(1, 1, 0.7),
        peak_by_layer=(1.0, 4.0, 2.0),
        peak=4.0,
        peak_entry=9.0,
        jump_layer=0,
        value_drain=0.2,
        epe_coordinates=(3,),
        coordinates=(3,),
        appear_after=0,
        score_shares=(("content", 1.0),),
        ablations=(("No Query Bias", 0.25), ("No MLP", 1.5)),
        not_applicable=(),
        identity_errors=(0.0, 0.0, 1e-4),
        verdict="A sink.",
    )
    second = replace(first, model="two", sink_score=0.25, ablations=(("No MLP", 0.5),))
    return Survey(tuple(tuple(getattr(r, f.name) for f in fields(r)) for r in (first, second)))


def make_bench() -> MitigationBench:
    """Four runs that take 0, 50, 90 and 20 % of a sink of 0.4 at 0, 0.1, 0.3 and 0.2 nats; the
    first two are doses, and their controls take 10 % at 0.05."""
    values = np.zeros((4, 6, len(MEASURES)))
    values[..., 0] = 0.4 * (1 - np.array([0, 0.5, 0.9, 0.2]))[:, None]
    values[..., 1] = 3 + np.array([0, 0.1, 0.3, 0.2])[:, None] + 0.1 * np.arange(6)
    controls = np.full((4, 2, 6, 3), np.nan)
    controls[1:3, :, :, 0] = 0.36
    controls[1:3, :, :, 1] = values[0, :, 1] + 0.05
    heads = np.zeros((4, 6, 2, 2))
    return MitigationBench(
        values=values,
        controls=controls,
        sinks=heads,
        rates=heads,
        positions=heads.astype(np.int64),
        residual=np.ones((4, 6, 2, 4)),
        names=("Untouched", "half <b>", "none", "other"),
        families=("", "ScaleQueryBias", "ScaleQueryBias", ""),
        doses=(float("nan"), 0.5, 0.0, float("nan")),
        corpora=("prompts",) * 6,
        mid_layers=(0,),
        bits=8,
        window=4,
        keep_first=2,
        seeds=(0, 1),
    )


def make_sweep() -> HeadSweep:
    sink = np.zeros((2, 3, 4))
    sink[1, 2] = -0.25
    return HeadSweep(
        sink=sink,
        loss=-2 * sink,
        layer_sink=sink.sum(1),
        layer_loss=-2 * sink.sum(1),
        layers=(3, 5),
        mid_layers=(1,),
        ablation="ZeroQueryBias()",
    )


BEFORE = np.zeros((2, 2), dtype=np.int64)
AFTER = np.array([[0, 1], [1, 7]])

MAKERS = {
    "delta_histogram": lambda **k: plots.delta_histogram(make_delta(), **k),
    "delta_ribbon": lambda **k: plots.delta_ribbon(make_delta(), **k),
    "epe_bias_histogram": lambda **k: plots.epe_bias_histogram(make_cosines(), **k),
    "fidelity_ribbon": lambda **k: plots.fidelity_ribbon(make_fidelity(), **k),
    "coordinate_histogram": lambda **k: plots.coordinate_histogram(make_alignment(), **k),
    "massive_line": lambda **k: plots.massive_line(make_massive(), **k),
    "attention_maps": lambda **k: plots.attention_maps(make_maps(), **k),
    "table1_bars": lambda **k: plots.table1_bars(make_table(), **k),
    "score_terms_bars": lambda **k: plots.score_terms_bars(
        make_terms(), layer=7, head=1, query=2, **k
    ),
    "shift_share_bars": lambda **k: plots.shift_share_bars(make_alignment(), 1, 2, **k),
    "sink_score_map": lambda **k: plots.sink_score_map(make_table(), **k),
    "sink_positions": lambda **k: plots.sink_positions(BEFORE, AFTER, **k),
    "survey_map": lambda **k: plots.survey_map(make_survey(), **k),
    "mitigation_tradeoff": lambda **k: plots.mitigation_tradeoff(make_bench(), **k),
    "dose_response": lambda **k: plots.dose_response(make_bench(), **k),
    "head_sweep_map": lambda **k: plots.head_sweep_map(make_sweep(), **k),
}


def named(figure: go.Figure, name: str) -> list:
    return [trace for trace in figure.data if trace.name == name]


def one(figure: go.Figure, name: str):
    (trace,) = named(figure, name)
    return trace


def raw(function):
    """The function as users have it: in the tests a hook checks annotations before it runs."""
    return inspect.unwrap(function)


def percent(trace, low: float, high: float) -> float:
    """Per cent of a histogram trace's values whose bins lie within a range."""
    x = np.asarray(trace.x)
    return float(np.asarray(trace.y)[(x >= low) & (x <= high)].sum())


# --- all figures --------------------------------------------------------------------------


def test_every_figure_is_exported_read_and_tested():
    assert set(FIGURES) == set(MAKERS) == set(plots.READING)
    for text in plots.READING.values():
        assert len(re.findall(r"[.](?: |$)", text)) == 2, text


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_labelled_and_leave_nothing_behind(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure = MAKERS[name](model="tiny <b>model</b>")
    assert isinstance(figure, go.Figure)
    assert list(tmp_path.iterdir()) == []
    layout = figure.layout
    assert layout.title.text
    assert layout.title.subtitle.text.startswith("tiny &lt;b&gt;model&lt;/b&gt;")
    assert layout.width == 1000
    assert layout.height > layout.margin.t + layout.margin.b + 100
    assert any(axis.title.text for axis in figure.select_xaxes())
    assert any(axis.title.text for axis in figure.select_yaxes())
    assert "sendChartToCloud" in layout.modebar.remove


@pytest.mark.parametrize("name", FIGURES)
def test_each_call_gives_the_same_figure_and_a_json_that_reads(name):
    assert MAKERS[name]().to_json() == MAKERS[name]().to_json()
    json.loads(MAKERS[name]().to_json())


@pytest.mark.parametrize("name", FIGURES)
def test_every_colour_has_a_legend_entry(name):
    figure = MAKERS[name]()
    colours, explained = set(), set()
    for trace in figure.data:
        if trace.type == "heatmap":
            if trace.coloraxis is None:  # discrete colours, explained by markers
                colours |= {colour for _, colour in trace.colorscale}
            else:
                assert figure.layout.coloraxis.colorbar.title.text
            continue
        colour = trace.line.color if trace.type == "scatter" and trace.mode != "markers" else None
        colour = colour or trace.marker.color
        colours.add(colour)
        if trace.showlegend is not False and trace.name:
            explained.add(colour)
    assert colours <= explained | {"#8C8C8C"}
    if explained:
        assert figure.layout.showlegend


@pytest.mark.parametrize(
    "name", [n for n in FIGURES if not n.startswith(("shift", "sink", "survey"))]
)
def test_another_result_is_refused(name):
    with pytest.raises(InvalidInputError, match=f"{name} can't draw this.*Got: dict"):
        raw(getattr(plots, name))({})


# --- Delta --------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [None, 0, 2])
def test_delta_histogram_counts_each_group_in_per_cent(layer):
    figure = plots.delta_histogram(make_delta(), layers=layer, bins=200)
    first_full, first_cut = named(figure, "position 0")[:2]
    others_full, others_cut = named(figure, "all other positions")[:2]
    expected = {None: (100 * 2 / 3, 100 / 3), 0: (100, 0), 2: (0, 100)}[layer]
    assert percent(first_full, 9.9, 11.1) == pytest.approx(expected[0], abs=0.01)
    assert percent(first_full, 19.9, 21.1) == pytest.approx(expected[1], abs=0.01)
    assert percent(others_full, 0, 6) == pytest.approx(100, abs=0.01)
    assert sum(first_cut.y) >= 98.9
    assert sum(others_cut.y) == pytest.approx(100, abs=0.01)


def test_delta_histogram_truncates_the_lower_panel_alone_and_says_what_it_leaves_out():
    values = np.ones((1, 1, 1, 101))
    values[..., 0] = 2.0
    values[..., 1] = 500.0
    figure = plots.delta_histogram(Delta(values), truncated=0.9, bins=10)
    full, cut = named(figure, "all other positions")
    assert np.asarray(full.x).max() > 400
    assert np.asarray(cut.x).max() < 2
    assert sum(cut.y) == pytest.approx(99)
    text = figure.layout.annotations[1].text
    assert "0.0 % of position 0's values and 1.0 % of the others'" in text


def test_delta_histogram_offers_each_layer():
    figure = plots.delta_histogram(make_delta())
    (menu,) = figure.layout.updatemenus
    assert [b.label for b in menu.buttons] == ["all layers", "layer 0", "layer 1", "layer 2"]
    shown = np.array([t.visible for t in figure.data])
    assert shown.sum() == 4
    for number, button in enumerate(menu.buttons):
        visible = np.array(button.args[0]["visible"])
        assert visible.sum() == 4
        assert visible[4 * number : 4 * number + 4].all()
        assert "position 0" in button.args[1]["annotations[0].text"]
    last = [t for t, v in zip(figure.data, menu.buttons[3].args[0]["visible"], strict=True) if v]
    assert percent(last[1], 19.9, 21.1) == pytest.approx(100)


def test_delta_units_follow_the_convention():
    texts = {
        convention: plots.delta_histogram(make_delta(convention=convention)).layout.xaxis.title.text
        for convention in ("paper", "score")
    }
    assert "unscaled score units" in texts["paper"]
    assert texts["score"] == "Delta (score units)"


@pytest.mark.parametrize("truncated", [0.0, -1.0, 1.5])
def test_a_truncation_that_is_no_share_is_refused(truncated):
    with pytest.raises(InvalidInputError, match="share of the values"):
        plots.delta_histogram(make_delta(), truncated)


def test_delta_ribbon_draws_the_percentiles_of_each_layer():
    delta = make_delta()
    figure = plots.delta_ribbon(delta)
    for layer in range(3):
        p10, p50, p90 = delta.percentiles[:, layer]
        median = named(figure, "median")[layer]
        np.testing.assert_allclose(median.y, p50[1:])
        np.testing.assert_allclose(median.customdata, np.stack([p10[1:], p90[1:]], -1))
        band = named(figure, "p10 to p90")[layer]
        np.testing.assert_allclose(band.y, [*p90[1:], *p10[:0:-1]])
        first = named(figure, "position 0 (median, p10 to p90)")[layer]
        np.testing.assert_allclose(first.error_y.array, [p90[0] - p50[0]])
        np.testing.assert_allclose(first.error_y.arrayminus, [p50[0] - p10[0]])
        highest = named(figure, "highest p90 of the other positions")[layer]
        np.testing.assert_allclose(highest.y, [p90[1:].max()] * 2)
    assert [t.showlegend for t in named(figure, "median")] == [True, False, False]
    assert [a.text for a in figure.layout.annotations] == [
        f"layer {n} (0 stands apart)" for n in range(3)
    ]


def test_delta_ribbon_does_not_claim_a_layer_that_does_not_stand_apart():
    delta = make_delta()
    delta.values[:, 1, :, 0] = 3
    figure = plots.delta_ribbon(delta, layers=[1, 2])
    assert [a.text for a in figure.layout.annotations] == ["layer 1", "layer 2 (0 stands apart)"]


def test_delta_ribbon_beside_the_published_medians():
    delta = make_delta(layers=12, positions=40)
    figure = plots.delta_ribbon(delta, published=True)
    lines = named(figure, "published median")
    np.testing.assert_allclose([t.y for t in lines], np.array(published()["delta"])[..., 1])
    with pytest.raises(InvalidInputError, match=r"12 layers and 40 positions.*Got: 3 layers"):
        plots.delta_ribbon(make_delta(), published=True)


def test_padding_leaves_delta_figures_as_they_are():
    delta = make_delta()
    padded = Delta(np.concatenate([delta.values, np.full((10, 3, 2, 2), np.nan)], axis=-1))
    a, b = plots.delta_histogram(delta), plots.delta_histogram(padded)
    for one_trace, other in zip(a.data, b.data, strict=True):
        np.testing.assert_array_equal(one_trace.y, other.y)
    ribbon = plots.delta_ribbon(padded)
    assert np.isfinite(np.asarray(named(ribbon, "p10 to p90")[0].y)).all()


@pytest.mark.parametrize("layers", [3, -1, [0, 0], [], [0, 9], 1.0, True, "0"])
def test_unknown_layers_are_refused(layers):
    for draw in (
        lambda: raw(plots.delta_histogram)(make_delta(), layers=layers),
        lambda: raw(plots.delta_ribbon)(make_delta(), layers=layers),
        lambda: raw(plots.epe_bias_histogram)(make_cosines(), layers=layers),
    ):
        with pytest.raises(InvalidInputError, match=r"Unknown layer.*0, 1, 2"):
            draw()


# --- weights ------------------------------------------------------------------------------


def test_epe_bias_histogram_has_a_pooled_panel_and_one_per_layer():
    alignment = make_cosines()
    alignment.cosines[1, :, 0] = -0.2
    figure = plots.epe_bias_histogram(alignment)
    titles = [a.text for a in figure.layout.annotations]
    assert titles == ["3 layers pooled", "layer 0", "layer 1", "layer 2"]
    first = named(figure, "position 0")
    assert percent(first[0], 0.7, 0.9) == pytest.approx(100 * 2 / 3, abs=0.01)
    assert [percent(t, 0.7, 0.9) for t in first[1:]] == [100, 0, 100]
    assert [percent(t, -0.3, -0.1) for t in named(figure, "all other positions")] == [100] * 4


def test_coordinate_histogram_separates_magnitudes_and_draws_the_means():
    alignment = CoordinateAlignment(make_alignment().gamma[:1], (5,), "MeanStd(k=3.0)")
    figure = plots.coordinate_histogram(alignment, bins=20)
    assert percent(one(figure, "massive coordinates"), 1.9, 2) == 100
    assert percent(one(figure, "other coordinates"), 0.2, 0.3) == 100
    assert set(one(figure, "mean of massive coordinates: 2.0000").x) == {2.0}
    assert set(one(figure, "mean of other coordinates: 0.2500").x) == {0.25}
    assert "MeanStd(k=3.0): 5" in figure.layout.title.subtitle.text


def test_coordinate_histogram_beside_the_published_means_and_without_massive_ones():
    none = CoordinateAlignment(make_alignment().gamma, (), "MeanStd(k=3.0)")
    figure = plots.coordinate_histogram(none, published=True)
    assert not named(figure, "massive coordinates")
    means = {t.name: t.x[0] for t in figure.data if t.name.startswith("published")}
    assert sorted(means.values()) == sorted(published()["gamma_mean"].values())


def test_massive_line_labels_coordinates_and_draws_thresholds():
    figure = plots.massive_line(make_massive())
    np.testing.assert_array_equal(figure.data[0].y, make_massive().epe)
    points = one(figure, "massive by MeanStd(k=3.0)")
    assert list(zip(points.x, points.y, strict=True)) == [(3, -9.0), (11, 6.0)]
    assert sorted(a.text for a in figure.layout.annotations) == ["11", "3"]
    assert one(figure, "MeanStd(k=3.0): 2 found, threshold 5").y == (5.0, 5.0, None, -5.0, -5.0)
    far = one(figure, "far: 0 found, threshold 1e+03 (beyond the axis)")
    assert set(far.y) == {None}
    assert not [t for t in figure.data if t.name.startswith("open")]
    assert figure.layout.yaxis.range[1] < 20


def test_massive_line_labels_the_rule_that_is_asked_for():
    for rule in (TopK(3), "TopK(k=3)"):
        figure = plots.massive_line(make_massive(), rule=rule)
        assert list(one(figure, "massive by TopK(k=3)").x) == [0, 3, 11]
    with pytest.raises(InvalidInputError, match="Unknown rule"):
        plots.massive_line(make_massive(), rule=TopK(4))


def test_fidelity_ribbon_draws_all_forms():
    fidelity = make_fidelity()
    figure = plots.fidelity_ribbon(fidelity)
    for form in ("mlp", "block", "causal_block"):
        (line,) = [t for t in figure.data if t.name.startswith(f"{form}: the first")]
        p10, p50, p90 = fidelity.percentiles(form)
        np.testing.assert_allclose(line.y, p50)
        np.testing.assert_allclose(line.customdata, np.stack([p10, p90], -1))
        np.testing.assert_allclose(one(figure, f"{form}: p10 to p90").y, [*p90, *p10[::-1]])


def test_fidelity_ribbon_beside_the_published_medians():
    figure = plots.fidelity_ribbon(make_fidelity(40), published=True)
    for form in ("mlp", "block"):
        expected = np.array(published()["fidelity"][form])[:, 1]
        np.testing.assert_allclose(one(figure, f"{form}: published median").y, expected)
    only = plots.fidelity_ribbon(make_fidelity(40), forms="block", published=True)
    assert len(only.data) == 3
    with pytest.raises(InvalidInputError, match=r"40 positions.*Got: 5 positions"):
        plots.fidelity_ribbon(make_fidelity(), published=True)
    with pytest.raises(InvalidInputError, match="Unknown form"):
        plots.fidelity_ribbon(make_fidelity(), forms="attention")


# --- attention maps -----------------------------------------------------------------------


def test_attention_maps_share_one_colour_scale_and_hold_the_patterns():
    maps = make_maps()
    figure = plots.attention_maps(maps, layers=[11, 13], heads=[0, 4, "mean"])
    assert len(figure.data) == 2 * 2 * 3
    assert {t.coloraxis for t in figure.data} == {"coloraxis"}
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    for trace in figure.data:
        condition = [safe(c) for c in maps.conditions].index(trace.meta["condition"])
        heads = maps.patterns[condition, trace.meta["layer"] - 10]
        expected = heads.mean(0) if trace.meta["head"] == "mean" else heads[trace.meta["head"]]
        seen = np.tril(np.ones((5, 5), dtype=bool))
        np.testing.assert_allclose(trace.z[seen], expected[seen], atol=1e-4)
        assert np.isnan(trace.z[~seen]).all()


def test_what_a_condition_lets_see_later_keys_is_shown():
    maps = make_maps()
    maps.patterns[1, :, :, 0] = 0.2
    figure = plots.attention_maps(maps, layers=10, heads=0)
    assert np.isnan(figure.data[0].z[0, 1:]).all()
    np.testing.assert_allclose(figure.data[1].z[0], 0.2, atol=1e-4)


def test_the_two_menus_of_attention_maps_show_one_trace_in_each_panel():
    figure = plots.attention_maps(make_maps(), layers=[10, 12, 14], heads=["mean", 2])
    by_head, by_layer = figure.layout.updatemenus
    assert [b.label for b in by_head.buttons] == ["mean over heads", "head 2"]
    assert [b.label for b in by_layer.buttons] == ["layer 10", "layer 12", "layer 14"]
    assert by_layer.buttons[by_layer.active].label == "layer 12"

    def seen(visible, opacity):
        both = zip(figure.data, visible, opacity, strict=True)
        return [(t.xaxis, t.meta["layer"], t.meta["head"]) for t, v, o in both if v and o == 1]

    at_first = seen([t.visible for t in figure.data], [t.opacity for t in figure.data])
    assert at_first == [("x", 12, "mean"), ("x2", 12, "mean")]
    for head_button, head in zip(by_head.buttons, ("mean", 2), strict=True):
        for layer_button, layer in zip(by_layer.buttons, (10, 12, 14), strict=True):
            change = head_button.args[0]
            shown = seen(layer_button.args[0]["visible"], change["opacity"])
            assert shown == [("x", layer, head), ("x2", layer, head)]
            hovers = [h == "all" for h in change["hoverinfo"]]
            assert hovers == [o == 1 for o in change["opacity"]]


def test_attention_maps_choose_few_layers_and_the_strongest_heads():
    figure = plots.attention_maps(make_maps(heads=9))
    assert {t.meta["layer"] for t in figure.data} == {11, 12, 13}
    assert {t.meta["head"] for t in figure.data} == {"mean", 6, 7, 8}


def test_tokens_are_axis_labels_escaped_and_visible():
    figure = plots.attention_maps(make_maps())
    expected = ("The", "␣cat", "↵", "&lt;b&gt;", "&lt;script&gt;")
    assert figure.layout.xaxis.ticktext == expected
    assert figure.layout.yaxis.ticktext == expected
    assert [a.text for a in figure.layout.annotations] == ["Baseline", "No &lt;b&gt;PE&lt;/b&gt;"]


def test_long_prompts_get_fewer_labels():
    tokens = tuple(f"t{n}" for n in range(150))
    axis = plots.attention_maps(make_maps(tokens, heads=1), layers=10, heads=0).layout.xaxis
    assert len(axis.ticktext) < 60
    assert axis.ticktext[1] == f"t{axis.tickvals[1]}"


@pytest.mark.parametrize(
    "wrong", [{"layers": 0}, {"heads": 6}, {"heads": "median"}, {"conditions": "No PE"}]
)
def test_attention_maps_refuse_what_the_result_lacks(wrong):
    (name,) = wrong
    with pytest.raises(InvalidInputError, match=f"Unknown {name.removesuffix('s')}"):
        raw(plots.attention_maps)(make_maps(), **wrong)


# --- Table 1 ------------------------------------------------------------------------------


def test_table1_bars_hold_means_and_standard_errors():
    figure = plots.table1_bars(make_table())
    pooled = one(figure, "all prompts pooled (n = 4)")
    np.testing.assert_allclose(pooled.y, [0.65, 0.2])
    stderr = np.std([0.7, 0.5, 0.8, 0.6], ddof=1) / 2
    np.testing.assert_allclose(pooled.error_y.array, [stderr, 0], atol=1e-12)
    np.testing.assert_allclose(one(figure, "math (n = 2)").y, [0.6, 0.2])
    np.testing.assert_allclose(one(figure, "code (n = 2)").y, [0.7, 0.2])
    assert figure.layout.xaxis.ticktext == ("Baseline", "No Query<br>Bias")
    assert figure.layout.yaxis.title.text == "attention to position 0 (share)"
    assert "Not applicable: No PE" in figure.layout.title.subtitle.text


def test_bars_of_one_condition_stand_side_by_side():
    figure = plots.table1_bars(make_table())
    x = np.array([t.x for t in figure.data])
    assert np.all(np.diff(x, axis=0) >= figure.data[0].width)
    np.testing.assert_allclose(x.mean(0), [0, 1])


def test_table1_bars_beside_the_published_values():
    figure = plots.table1_bars(make_table(beside_published=True))
    diamonds = named(figure, "published")
    table = published()["table1"]
    for corpus, trace in zip(("math", "code", "all"), diamonds, strict=True):
        expected = np.array([table[corpus][c] for c in ("Baseline", "No Query Bias")])
        np.testing.assert_allclose(trace.y, expected[:, 0])
        np.testing.assert_allclose(trace.error_y.array, expected[:, 1])
    assert [t.showlegend for t in diamonds] == [True, False, False]
    assert not named(plots.table1_bars(make_table()), "published")


def test_one_prompt_has_no_error_bars():
    table = make_table()
    single = Table1(table.scores[:, :1], table.conditions, ("<b>",), (1,), 0.03)
    figure = plots.table1_bars(single)  # the pooled prompts would be the same bars again
    assert [t.name for t in figure.data] == ["&lt;b&gt; (n = 1)"]
    assert len(plots.table1_bars(single, corpora=("<b>", "all")).data) == 2
    assert figure.data[0].error_y.array is None
    with pytest.raises(InvalidInputError, match=r"Unknown corpus.*all"):
        plots.table1_bars(single, corpora="math")


# --- survey -------------------------------------------------------------------------------


def test_survey_map_shows_what_is_left_and_leaves_out_what_does_not_apply():
    figure = plots.survey_map(make_survey())
    (heat,) = figure.data
    np.testing.assert_array_equal(heat.z, [[0.25, 1.5], [np.nan, 0.5]])
    assert [list(line) for line in heat.text] == [["25%", "150%"], ["", "50%"]]
    assert list(figure.layout.xaxis.ticktext) == ["No Query<br>Bias", "No MLP"]
    assert figure.layout.yaxis.ticktext[0] == "&lt;i&gt;one&lt;/i&gt; (sink score 0.50)"


# --- score terms and shares ---------------------------------------------------------------


def test_stacked_terms_add_up_to_the_markers():
    terms = make_terms()
    figure = plots.score_terms_bars(terms, 0, layer=7, head=1, query=2)
    bars, total = figure.data[:4], figure.data[4]
    assert figure.layout.barmode == "relative"
    np.testing.assert_allclose(np.sum([b.y for b in bars], axis=0), total.y, rtol=1e-6)
    np.testing.assert_allclose(total.y, terms.total[0, 1, 1, 2, :3], rtol=1e-5)
    np.testing.assert_allclose(bars[0].y, terms.content[0, 1, 1, 2, :3])
    np.testing.assert_allclose(bars[1].y, terms.query_bias[0, 1, 1, 2, :3])
    np.testing.assert_allclose(total.customdata, terms.total[0, 1, 1, 2, :3].softmax(0), rtol=1e-5)


def test_score_terms_leave_padding_out_and_label_tokens():
    tokens = ["PAD", "a", " <b>", "c"]
    figure = plots.score_terms_bars(make_terms(), 1, layer=4, head=0, query=2, tokens=tokens)
    assert list(figure.data[0].x) == ["1 a", "2 ␣&lt;b&gt;"]
    assert "&lt;b&gt;" in figure.layout.title.text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_row": 2}, "Unknown batch_row"),
        ({"layer": 1}, "Unknown layer.*4, 7"),
        ({"head": 3}, "Unknown head"),
        ({"query": -1}, "Unknown query"),
        ({"batch_row": 1, "query": 0}, "sees no key"),
        ({"tokens": ["a"]}, "One token for each column"),
    ],
)
def test_score_terms_refuse_what_is_not_there(wrong, message):
    arguments = {"layer": 4, "head": 0, "query": 2} | wrong
    with pytest.raises(InvalidInputError, match=message):
        plots.score_terms_bars(make_terms(), **arguments)


def make_query_terms(model_terms: ScoreTerms) -> QueryTerms:
    """The last query of the first prompt, as the experiment keeps it."""
    total = model_terms.total[0, :, :, 3]
    return QueryTerms(
        terms=np.stack([term[0, :, :, 3].numpy() for term in model_terms.terms.values()]),
        names=tuple(model_terms.terms),
        attention=total.softmax(-1).numpy(),
        query=3,
        tokens=("a", " b", "<i>", "d"),
        bias_kind="effective",
        max_error=0.0,
        pattern_error=0.0,
        tolerance=1.0,
    )


def test_the_experiment_s_terms_are_drawn_like_those_of_a_batch():
    terms = make_terms()
    kept = make_query_terms(terms)
    figure = plots.score_terms_bars(kept, layer=1, head=2)
    same = plots.score_terms_bars(terms, layer=7, head=2)
    for a, b in zip(figure.data, same.data, strict=True):
        np.testing.assert_allclose(a.y, b.y, rtol=1e-6)
    assert list(figure.data[0].x) == ["0 a", "1 ␣b", "2 &lt;i&gt;", "3 d"]
    assert "effective" in figure.layout.title.subtitle.text
    with pytest.raises(InvalidInputError, match=r"Unknown query.*one of 3"):
        plots.score_terms_bars(kept, query=2)
    with pytest.raises(InvalidInputError, match="Unknown batch_row"):
        plots.score_terms_bars(kept, 1)


def test_without_layer_and_head_the_strongest_sink_is_drawn():
    terms = make_terms()
    attention = terms.total[0, :, :, 3].softmax(-1)[..., 0]
    layer, head = divmod(int(attention.argmax()), 3)
    figure = plots.score_terms_bars(terms)
    np.testing.assert_allclose(figure.data[4].customdata[0], attention.max(), rtol=1e-5)
    assert f"layer {(4, 7)[layer]}, head {head}, query 3" in figure.layout.title.text
    assert f"layer 4, head {int(attention[0].argmax())}" in (
        plots.score_terms_bars(terms, layer=4).layout.title.text
    )


def test_shift_shares_from_weights():
    figure = plots.shift_share_bars(make_alignment(), 1, 2, top=3)
    (bar,) = figure.data
    assert list(bar.x) == ["5<br>(massive)", "7", "1", "the other<br>5"]
    assert list(bar.y) == [10, 4, 3, 3]
    assert list(bar.text) == ["50%", "20%", "15%", "15%"]


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_shift_shares_from_contributions(kind):
    contributions = np.zeros((2, 1, 1, 3, 4))
    contributions[:, :, :, 0] = [6.0, 0.0, 3.0, 1.0]  # of these 0 and 2 are drawn
    contributions[0, :, :, 1:] = [1.0, 0.5, 0.0, 0.0]
    contributions[1, :, :, 1:] = np.nan  # padding
    figure = plots.shift_share_bars(kind(contributions), 9, 0, top=2, massive=(2,), layers=[9])
    first, others = figure.data
    assert list(first.x) == ["0", "2<br>(massive)", "the other<br>2"]
    assert list(first.y) == [6, 3, 1]
    assert list(first.text) == ["60%", "30%", "10%"]
    np.testing.assert_allclose(others.y, [1, 0, 0.5])
    assert first.name == "position 0: sum 10"


def test_a_share_that_rounds_to_nothing_has_no_sign():
    contributions = np.array([10.0, -0.01]).reshape(1, 1, 1, 1, 2)
    assert plots.shift_share_bars(contributions, 0, 0).data[0].text == ("100%", "0%")


def test_no_share_is_told_of_parts_that_cancel():
    contributions = np.zeros((1, 1, 1, 1, 3))
    contributions[..., :] = [5.0, -5.0, 0.01]
    (bar,) = plots.shift_share_bars(contributions, 0, 0).data
    assert set(bar.text) == {""}


@pytest.mark.parametrize(
    "call",
    [
        lambda: plots.shift_share_bars(np.zeros((2, 3)), 0, 0),
        lambda: plots.shift_share_bars(make_alignment(), 2, 0),
        lambda: plots.shift_share_bars(make_alignment(), 0, 3),
        lambda: plots.shift_share_bars(make_alignment(), 0, 0, top=0),
        lambda: plots.shift_share_bars(np.zeros((1, 1, 1, 2, 3)), 0, 0, position=2),
        lambda: plots.shift_share_bars(np.zeros((1, 1, 1, 2, 3)), 0, 0, layers=[1, 2]),
        lambda: plots.shift_share_bars("gamma", 0, 0),
    ],
)
def test_shift_shares_refuse_what_does_not_fit(call):
    with pytest.raises(InvalidInputError):
        call()


# --- maps by layer and head ---------------------------------------------------------------


def test_sink_score_map_of_a_table_is_the_mean_over_prompts():
    figure = plots.sink_score_map(make_table())
    np.testing.assert_allclose(figure.data[0].z, [[0.6, 0.6], [0.65, 0.65], [0.6, 0.6]])
    assert [t.visible for t in figure.data] == [True, False]
    assert {t.coloraxis for t in figure.data} == {"coloraxis"}
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    (menu,) = figure.layout.updatemenus
    assert [b.label for b in menu.buttons] == ["Baseline", "No Query Bias"]
    assert menu.buttons[1].args[0]["visible"] == [False, True]
    assert menu.buttons[1].args[1]["title.text"].endswith("No Query Bias")


def test_sink_score_map_of_an_array_leaves_nan_out():
    scores = np.array([[[0.2, np.nan]], [[0.4, np.nan]]])
    figure = plots.sink_score_map(torch.tensor(scores), layers=[7])
    np.testing.assert_allclose(figure.data[0].z, [[0.3, np.nan]])
    assert list(figure.data[0].y) == ["7"]
    assert not figure.layout.updatemenus


def test_sink_positions_show_where_each_sink_went():
    figure = plots.sink_positions(BEFORE, AFTER, names=("Baseline", "Swap <b>"), layers=[3, 5])
    before, after = figure.data[:2]
    assert before.text == (["0", "0"], ["0", "0"])
    assert after.text == (["0", "<b>1</b>"], ["<b>1</b>", "<b>7</b>"])
    colours = {position: after.z[position == AFTER].tolist() for position in (0, 1, 7)}
    assert len({tuple(set(z)) for z in colours.values()}) == 3
    assert [t.name for t in figure.data[2:]] == ["position 0", "position 1", "position 7"]
    assert figure.layout.title.text.endswith("3 of 4 heads moved")
    assert [a.text for a in figure.layout.annotations] == ["Baseline", "Swap &lt;b&gt;"]
    assert list(after.y) == ["3", "5"]


def test_sink_positions_of_a_batch_are_those_of_most_prompts():
    batch = np.array([[[0]], [[2]], [[2]]])
    figure = plots.sink_positions(batch, np.zeros_like(batch))
    assert figure.data[0].text == (["2"],)
    np.testing.assert_allclose(figure.data[0].customdata, [[2 / 3]])
    np.testing.assert_allclose(figure.data[1].customdata, [[1.0]])


def test_rare_positions_share_one_colour():
    many = np.arange(12).reshape(3, 4)
    figure = plots.sink_positions(many, np.zeros((3, 4), dtype=int))
    assert [t.name for t in figure.data[2:]][-1] == "another position"
    assert len(np.unique(figure.data[0].z)) == 6


@pytest.mark.parametrize(
    "call",
    [
        lambda: plots.sink_score_map(np.zeros(3)),
        lambda: plots.sink_score_map(np.zeros((2, 3)), layers=[0]),
        lambda: plots.sink_score_map(np.zeros((2, 3)), conditions="Baseline"),
        lambda: plots.sink_score_map(make_table(), conditions="none"),
        lambda: plots.sink_score_map([[0.1], [0.2, 0.3]]),
        lambda: plots.sink_positions(BEFORE, AFTER[:1]),
        lambda: plots.sink_positions(BEFORE.astype(float), AFTER.astype(float)),
        lambda: raw(plots.sink_positions)(BEFORE, AFTER, names=("one",)),
        lambda: plots.sink_positions(BEFORE[:0], AFTER[:0]),
    ],
)
def test_maps_refuse_what_does_not_fit(call):
    with pytest.raises(InvalidInputError):
        call()


# --- text that comes from outside ---------------------------------------------------------


@pytest.mark.parametrize("make", [safe, token_label, wrapped])
def test_markup_is_escaped(make):
    for text in ("<script>", "<b>", '<a href="x">', "a&b", "&lt;", "$x$"):
        shown = make(text).replace("<br>", "")
        assert "<" not in shown
        assert "$" not in shown
        assert "&" not in shown.replace("&lt;", "").replace("&gt;", "").replace(
            "&amp;", ""
        ).replace("&#36;", "")


def test_tokens_show_what_can_not_be_seen():
    assert token_label(" the") == "␣the"
    assert token_label("\n\t") == "↵⇥"
    assert token_label("\x00\u200b\ud800") == "\\x00\\u200b\\ud800"[:11] + "…"
    assert token_label("") == "(empty)"
    assert token_label("naïve 中文") == "naïve␣中文"
    assert token_label("x" * 30) == "x" * 11 + "…"
    json.dumps(token_label("\ud800")).encode("utf-8")


def test_hostile_names_reach_no_figure_as_markup():
    table = make_table()
    hostile = Table1(table.scores, (HOSTILE, HOSTILE + "2"), (HOSTILE,) * 4, (1,), 0.03)
    maps = make_maps((HOSTILE, "b"), heads=1)
    maps = AttentionMaps(maps.patterns, (HOSTILE, "x"), maps.layers, maps.tokens)
    massive = make_massive()
    rules = MassiveActivations(massive.epe, 0, (HOSTILE,), ((3,),), (1.0,))
    for figure in (
        plots.table1_bars(hostile, model=HOSTILE),
        plots.sink_score_map(hostile),
        plots.attention_maps(maps),
        plots.massive_line(rules),
        plots.sink_positions(BEFORE, AFTER, names=(HOSTILE, HOSTILE)),
    ):
        text = json.dumps(figure.to_dict(), default=lambda array: array.tolist())
        assert "<script" not in text
        assert "<b>x" not in text
        assert "$y" not in text
        assert "&lt;script" in text


# --- files --------------------------------------------------------------------------------


def test_html_is_always_written(tmp_path):
    figure = MAKERS["massive_line"]()
    path = plots.save_figure(figure, tmp_path / "new" / "figure.HTML", plotlyjs="cdn")
    page = path.read_text("utf-8")
    assert "Plotly.newPlot" in page
    assert "MeanStd(k=3.0)" in page
    assert '"showSendToCloud": false' in page
    assert len(page) < 200_000
    again = plots.save_figure(MAKERS["massive_line"](), tmp_path / "again.html", plotlyjs="cdn")
    assert again.read_text("utf-8") == page
    inline = plots.save_figure(figure, tmp_path / "inline.html").read_text("utf-8")
    assert len(inline) > 2_000_000
    assert not re.search(r"<script[^>]*src=", inline)


@pytest.mark.parametrize("name", ["figure", "figure.gif", "figure.html.txt"])
def test_unknown_endings_are_refused(name, tmp_path):
    with pytest.raises(InvalidInputError, match=r"\.html, \.png, \.svg, \.pdf"):
        plots.save_figure(go.Figure(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_only_figures_are_written(tmp_path):
    with pytest.raises(InvalidInputError, match="Figure"):
        raw(plots.save_figure)({"data": []}, tmp_path / "figure.html")


def only_kaleido(found):
    """`find_spec` with an answer of its own for kaleido; plotly asks it for its templates."""
    ask = importlib.util.find_spec
    return lambda name, *args: found if name == "kaleido" else ask(name, *args)


def test_missing_kaleido_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", only_kaleido(None))
    with pytest.raises(WriteError, match=r"no package kaleido.*pip install.*\.html"):
        plots.save_figure(go.Figure(), tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise RuntimeError('no Chrome here')", "no Chrome here"),
        ("import time; time.sleep(600)", "within 1 s"),
        ("pass", "exit status 0"),
    ],
)
def test_images_that_fail_or_hang_are_told(program, message, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", only_kaleido(object()))
    monkeypatch.setattr(export, "_RENDER", program)
    with pytest.raises(WriteError, match=message):
        plots.save_figure(go.Figure(), tmp_path / "figure.png", timeout=1.0)
    assert list(tmp_path.iterdir()) == []


def test_images_hold_what_the_renderer_gave(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", only_kaleido(object()))
    echo = (
        "import json, sys, base64; options = json.loads(sys.argv[1]); "
        "figure = json.load(sys.stdin); "
        "sys.stdout.buffer.write(base64.b64encode(json.dumps([options, figure]).encode()))"
    )
    monkeypatch.setattr(export, "_RENDER", echo)
    path = plots.save_figure(MAKERS["table1_bars"](), tmp_path / "figure.svg", width=640)
    options, figure = json.loads(base64.b64decode(path.read_bytes()))
    assert options == {"format": "svg", "width": 640, "height": None, "scale": 2.0}
    assert figure["layout"]["title"]["text"] == "Sink score under each condition"


def test_figures_say_what_they_draw():
    for name in FIGURES:
        text = inspect.getdoc(getattr(plots, name))
        assert "Args:" in text
        assert "Raises:" in text


# --- mitigations --------------------------------------------------------------------------


def test_the_tradeoff_has_every_run_its_control_and_the_front():
    figure = plots.mitigation_tradeoff(make_bench())
    runs = one(figure, "mitigation (95 % interval over prompts)")
    np.testing.assert_allclose(runs.x, [0, 0.5, 0.9, 0.2])
    np.testing.assert_allclose(runs.y, [0, 0.1, 0.3, 0.2], atol=1e-12)
    np.testing.assert_allclose(runs.error_y.array, 0, atol=1e-12)
    assert list(runs.text) == ["", "half &lt;b&gt;", "none", ""]
    front = one(figure, "Pareto front")
    np.testing.assert_allclose(front.x, [0, 0.5, 0.9])
    controls = one(figure, "random control (mean of 2)")
    np.testing.assert_allclose(controls.x, [0.1, 0.1])
    np.testing.assert_allclose(controls.y, [0.05, 0.05])
    assert controls.customdata[0] == "half &lt;b&gt;"


def test_a_dose_response_ends_at_the_untouched_model():
    figure = plots.dose_response(make_bench())
    sink = one(figure, "sink score")
    np.testing.assert_allclose(sink.x, [0, 0.5, 1])
    np.testing.assert_allclose(sink.y, [0.04, 0.2, 0.4])
    loss = one(figure, "loss added (95 % interval over prompts)")
    np.testing.assert_allclose(loss.y, [0.3, 0.1, 0], atol=1e-12)
    sinks, losses = named(figure, "random control")
    np.testing.assert_allclose(sinks.y, [0.36, 0.36])
    np.testing.assert_allclose(losses.y, [0.05, 0.05])
    with pytest.raises(InvalidInputError, match="Unknown family"):
        plots.dose_response(make_bench(), families="ScaleEPE")


def test_a_bench_without_doses_has_no_curve():
    bench = dataclasses.replace(make_bench(), families=("",) * 4)
    with pytest.raises(InvalidInputError, match="two doses"):
        plots.dose_response(bench)


def test_the_sweep_map_has_heads_layers_and_a_scale_about_zero():
    figure = plots.head_sweep_map(make_sweep())
    sink, loss = figure.data
    np.testing.assert_allclose(sink.z, [[0, 0, 0, 0], [0, 0, -0.25, -0.25]])
    np.testing.assert_allclose(loss.z, [[0, 0, 0, 0], [0, 0, 0.5, 0.5]])
    assert list(sink.y) == ["3", "5"]
    assert list(sink.x) == ["0", "1", "2", "all"]
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-0.25, 0.25)
    assert (figure.layout.coloraxis2.cmin, figure.layout.coloraxis2.cmax) == (-0.5, 0.5)
