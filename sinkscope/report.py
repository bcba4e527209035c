"""One HTML page of a run: what ran, the verdict, Table 1, every figure, and how to repeat it.

The page works offline. Figures lie in it as data and are drawn when they come into view. All
text that comes from prompts, models or paths is escaped.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from sinkscope import metrics
from sinkscope.bench import MitigationBench
from sinkscope.circuits import Survey, SurveyRow
from sinkscope.display import percent
from sinkscope.errors import InvalidInputError
from sinkscope.experiments.attention_maps import AttentionMaps
from sinkscope.loading import DEMO_NAME
from sinkscope.reproduction import Reproduction
from sinkscope.results import write_text
from sinkscope.verdict import mitigation_verdict, verdict

if TYPE_CHECKING:
    import plotly.graph_objects as go

PlotlyJs = Literal["inline", "cdn"]
MOVED_BY = "Swap EPE"
"""The condition beside the baseline in the figure of sink positions: the one that moves a sink."""


def figures(run: Reproduction) -> dict[str, go.Figure]:
    """Every figure that a run's results allow, by name, in reading order.

    Args:
        run: a finished reproduction.
    """
    from sinkscope import plots

    name = str(run.provenance["model"])
    beside = run.table1.beside_published
    layer, head = strongest_head(run)
    drawn: dict[str, go.Figure] = {
        "table1_bars": plots.table1_bars(run.table1, model=name),
        "sink_score_map": plots.sink_score_map(run.table1, model=name),
    }
    if run.massive_activations is not None:
        drawn["massive_line"] = plots.massive_line(run.massive_activations, model=name)
    if run.coordinate_alignment is not None:
        drawn["coordinate_histogram"] = plots.coordinate_histogram(
            run.coordinate_alignment, published=beside, model=name
        )
        drawn["shift_share_bars"] = plots.shift_share_bars(
            run.coordinate_alignment, layer, head, model=name
        )
    if run.epe_bias_alignment is not None:
        drawn["epe_bias_histogram"] = plots.epe_bias_histogram(run.epe_bias_alignment, model=name)
    if run.delta is not None:
        drawn["delta_histogram"] = plots.delta_histogram(run.delta, model=name)
        drawn["delta_ribbon"] = plots.delta_ribbon(run.delta, published=beside, model=name)
    if run.epe_fidelity is not None:
        drawn["fidelity_ribbon"] = plots.fidelity_ribbon(
            run.epe_fidelity, published=beside, model=name
        )
    if run.score_terms is not None:
        drawn["score_terms_bars"] = plots.score_terms_bars(
            run.score_terms, layer=layer, head=head, model=name
        )
    drawn["attention_maps"] = plots.attention_maps(run.attention_maps, model=name)
    if MOVED_BY in run.attention_maps.conditions:
        before, after = (_sink_positions(run.attention_maps, c) for c in ("Baseline", MOVED_BY))
        drawn["sink_positions"] = plots.sink_positions(
            before, after, names=("Baseline", MOVED_BY), model=name
        )
    return drawn


def strongest_head(run: Reproduction) -> tuple[int, int]:
    """Layer and head with the strongest sink on the untouched model, among the mid layers."""
    layers = list(run.table1.mid_layers)
    scores = run.table1.scores[0][:, layers].mean(0)
    row, head = np.unravel_index(int(scores.argmax()), scores.shape)
    return layers[int(row)], int(head)


def _sink_positions(maps: AttentionMaps, condition: str) -> np.ndarray:
    """`[layer head]`, where the mapped prompt's attention goes under a condition."""
    patterns = torch.from_numpy(maps.patterns[maps.conditions.index(condition)])
    mask = torch.ones(patterns.shape[0], patterns.shape[-1], dtype=torch.bool)
    return metrics.sink_position(metrics.received_attention(patterns, mask), mask).numpy()


def write_all(
    run: Reproduction,
    directory: Path,
    plotlyjs: PlotlyJs = "inline",
    survey: Survey | None = None,
) -> None:
    """Write report.html and the figures' own pages, drawing each figure once.

    Args:
        run: a finished reproduction.
        directory: the run's directory.
        plotlyjs: see `write_report`.
        survey: of the same model, as a section of the report.

    Raises:
        WriteError: the directory or a file can't be written.
    """
    drawn = figures(run)
    write_figures(drawn, directory / "figures")
    write_text(directory / "report.html", report_html(run, plotlyjs, drawn, survey))


def write_figures(drawn: Mapping[str, go.Figure], directory: Path) -> None:
    """Each figure as a page of its own, all sharing one plotly.js beside them.

    Args:
        drawn: from `figures`.
        directory: where the pages go.

    Raises:
        WriteError: the directory or a file can't be written.
    """
    from plotly.offline import get_plotlyjs

    from sinkscope.plots import HTML_CONFIG

    write_text(directory / "plotly.min.js", get_plotlyjs())
    for name, figure in drawn.items():
        page = figure.to_html(
            include_plotlyjs="directory", config=HTML_CONFIG, div_id=f"figure-{name}"
        )
        write_text(directory / f"{name}.html", page)


def write_report(run: Reproduction, path: Path, plotlyjs: PlotlyJs = "inline") -> None:
    """Write the report.

    Args:
        run: a finished reproduction.
        path: the file, as a rule `report.html` in the run's directory.
        plotlyjs: "inline" puts plotly.js into the page, so that it works offline; "cdn" links
            it, for a page of a few hundred kilobytes that needs the network.

    Raises:
        WriteError: the file can't be written.
    """
    write_text(path, report_html(run, plotlyjs))


def report_html(
    run: Reproduction,
    plotlyjs: PlotlyJs = "inline",
    drawn: Mapping[str, go.Figure] | None = None,
    survey: Survey | None = None,
) -> str:
    """The report as text, see `write_report`.

    Args:
        run: a finished reproduction.
        plotlyjs: "inline" or "cdn".
        drawn: its figures, if they were drawn already.
        survey: of the same model, as a section of its own.
    """
    from sinkscope.plots import READING

    drawn = figures(run) if drawn is None else drawn
    sections = {
        "What ran": _provenance(run),
        "Verdict": _verdict(run),
        "Table 1": _table1(run),
        **{
            _TITLES[name]: f"<p>{_text(READING[name])}</p>{_figure(name, figure)}"
            for name, figure in drawn.items()
        },
        "Do the sums hold?": _identities(run),
    }
    if survey is not None:
        sections["Which circuit"] = _survey(survey)
    if _missing(run):
        sections["Not applicable"] = _not_applicable(run)
    sections["Repeat it"] = _repeat(run)
    return _page(f"Attention sinks in {run.provenance['model']}", sections, plotlyjs)


def survey_html(survey: Survey, plotlyjs: PlotlyJs = "inline") -> str:
    """A survey as a page of its own.

    Args:
        survey: of one model or several.
        plotlyjs: "inline" or "cdn", see `write_report`.
    """
    names = ", ".join(row.model for row in survey.rows)
    return _page(f"Sink circuits of {names}", {"Which circuit": _survey(survey)}, plotlyjs)


def mitigation_figures(bench: MitigationBench, model: str | None = None) -> dict[str, go.Figure]:
    """The figures that a bench allows, by name, in reading order.

    Args:
        bench: from `mitigation_bench`.
        model: what ran, for the subtitles.
    """
    from sinkscope import plots

    drawn = {"mitigation_tradeoff": plots.mitigation_tradeoff(bench, model=model)}
    if any(family and bench.families.count(family) > 1 for family in bench.families):
        drawn["dose_response"] = plots.dose_response(bench, model=model)
    return drawn


def mitigation_sections(bench: MitigationBench, model: str | None = None) -> dict[str, str]:
    """The sections of a page about a bench: verdict, table, figures, what did not apply.

    Args:
        bench: from `mitigation_bench`.
        model: what ran.

    Returns:
        Title -> HTML.
    """
    from sinkscope.plots import READING

    words = mitigation_verdict(bench)
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in words.sentences)
    planted = f"<p>{_text(_PLANTED)}</p>" if model == DEMO_NAME else ""
    headline = f'<p class="headline">{_text(words.headline)}</p>{planted}<ul>{items}</ul>'
    sections = {
        "What removing the sink costs": headline,
        "Mitigations": _mitigations(bench),
    }
    for name, figure in mitigation_figures(bench, model).items():
        reading = f"<p>{_text(READING[name])}</p>"
        sections[_MITIGATION_TITLES[name]] = reading + _figure(name, figure)
    missing = (*bench.not_applicable, *((f"control of {n}", r) for n, r in bench.no_control))
    if missing:
        sections["Not applicable"] = _table(["what", "reason"], missing)
    return sections


def write_mitigation(
    bench: MitigationBench,
    provenance: Mapping[str, Any],
    path: Path,
    plotlyjs: PlotlyJs = "inline",
) -> None:
    """Write a bench as a page of its own.

    Args:
        bench: from `mitigation_bench`.
        provenance: what ran on what, from `reproduction.provenance`.
        path: the file.
        plotlyjs: see `write_report`.

    Raises:
        WriteError: the directory or a file can't be written.
    """
    model = str(provenance["model"])
    ran = _table(None, [(key, value) for key, value in provenance.items() if key != "lengths"])
    sections = {**mitigation_sections(bench, model), "What ran": ran}
    write_text(path, _page(f"Mitigations in {model}", sections, plotlyjs))


def _page(title: str, sections: Mapping[str, str], plotlyjs: str) -> str:
    if plotlyjs not in ("inline", "cdn"):
        raise InvalidInputError(
            "Unknown source of plotly.js", expected="'inline' or 'cdn'", got=repr(plotlyjs)
        )
    contents = "".join(f'<li><a href="#{_anchor(t)}">{_text(t)}</a></li>' for t in sections)
    return _PAGE.format(
        title=_text(title),
        style=_STYLE,
        plotly=_plotly_script(plotlyjs),
        contents=contents,
        sections="\n".join(_section(name, body) for name, body in sections.items()),
        script=_SCRIPT,
    )


_PLANTED = (
    "This model's circuit was planted at initialisation and then trained: the verdict tests "
    "sinkscope against a known truth and is not evidence about natural models."
)

_TITLES = {
    "table1_bars": "Sink score under each condition",
    "sink_score_map": "Sink score of every head",
    "massive_line": "Massive activations of EPE_0",
    "coordinate_histogram": "Query bias by coordinate",
    "shift_share_bars": "Which coordinates carry the query-bias term",
    "epe_bias_histogram": "Query bias and positions",
    "delta_histogram": "The source-agnostic shift",
    "delta_ribbon": "The source-agnostic shift by layer",
    "fidelity_ribbon": "How far the EPE stands for positions",
    "score_terms_bars": "The scores of one query",
    "attention_maps": "Attention of one prompt",
    "sink_positions": "Where the sink is",
}

_MITIGATION_TITLES = {
    "mitigation_tradeoff": "Sink removed against loss added",
    "dose_response": "Dose and response",
}


# --- sections -----------------------------------------------------------------------------


def _provenance(run: Reproduction) -> str:
    p = run.provenance
    low, high = p["prompt_lengths"]
    length = f"{low}" if low == high else f"{low} to {high}"
    starts = f"{p['starts_with_bos']} of {p['n_prompts']} start with the BOS token"
    rows = [
        ("Model", f"{p['model']} ({p['architecture']})"),
        ("Size", f"{p['n_layers']} layers, {p['n_heads']} heads, d_model {p['d_model']}"),
        ("Weights", f"{p['dtype']} on {p['device']}, SHA-256 {p['weights_sha256']}"),
        ("Prompts", f"{p['n_prompts']} from {p['prompts']}, {length} tokens each; {starts}"),
        ("First prompt", " ".join(repr(t)[1:-1] for t in run.attention_maps.tokens)),
        ("Versions", f"sinkscope {p['sinkscope']}, Python {p['python']}, " + _versions(p)),
    ]
    return _table(None, rows)


def _versions(provenance: Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in provenance["packages"].items())


def _verdict(run: Reproduction) -> str:
    words = verdict(run.table1)
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in words.sentences)
    name = run.provenance["model"]
    known = name == DEMO_NAME or name.startswith(f"{DEMO_NAME}-planted")
    planted = f"<p>{_text(_PLANTED)}</p>" if known else ""
    return f'<p class="headline">{_text(words.headline)}</p>{planted}<ul>{items}</ul>'


def _table1(run: Reproduction) -> str:
    frame = run.table1.to_dataframe()
    formats: dict[str, Callable[[Any], str]] = {
        "sink_score": "{:.4f}".format,
        "stderr": "{:.4f}".format,
        "relative": percent,
        "all_layers": "{:.4f}".format,
        "published": "{:.4f}".format,
        "published_stderr": "{:.4f}".format,
        "difference": "{:+.4f}".format,
    }
    rows = [
        [formats.get(column, str)(value) for column, value in row.items()]
        for row in frame.to_dict("records")
    ]
    layers = run.table1.mid_layers
    note = (
        f"sink_score: mean attention to position 0 from the second half of each prompt, layers "
        f"{layers[0]} to {layers[-1]}; stderr: of the mean over prompts; relative: to the "
        "untouched model; all_layers: the same mean over all layers."
    )
    return f"<p>{_text(note)}</p>{_table(list(frame.columns), rows)}"


MITIGATION_FORMATS: Mapping[str, str] = {
    "mitigation": "",
    "sink_score": ".4f",
    "sink_removed": ".1%",
    "at_first": ".0%",
    "loss_added": "+.4f",
    "loss_added_low": "+.4f",
    "loss_added_high": "+.4f",
    "kl": ".4f",
    "control_sink_removed": ".1%",
    "control_loss_added": "+.4f",
    "control_loss_added_std": ".4f",
    "quantisation_cost": "+.4f",
    "windowed": ".4f",
    "windowed_kept": ".4f",
    "peak": ".1f",
    "kurtosis": ".1f",
    "entropy": ".3f",
    "pareto": "",
}
"""Columns of a bench's table that are shown, and how their numbers are written."""


def mitigation_rows(bench: MitigationBench) -> list[list[str]]:
    """The cells of a bench's table as text, "-" where there is no number.

    Args:
        bench: from `mitigation_bench`.
    """
    return [
        [_number(row[name], spec) for name, spec in MITIGATION_FORMATS.items()]
        for row in bench.to_dataframe().to_dict("records")
    ]


def _number(value: Any, spec: str) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    missing = isinstance(value, float) and np.isnan(value)
    return "-" if missing else format(value, spec)


def _mitigations(bench: MitigationBench) -> str:
    note = (
        f"Losses in nats per token, with 95 % bootstrap intervals over prompts; sink scores over "
        f"layers {bench.mid_layers[0]} to {bench.mid_layers[-1]}; controls are means over "
        f"{len(bench.seeds)} random twins of the same budget; quantisation_cost: W{bench.bits}"
        f"A{bench.bits} against floating point; windowed: the last {bench.window} keys in view, "
        f"and with the first {bench.keep_first} kept."
    )
    return f"<p>{_text(note)}</p>{_table(list(MITIGATION_FORMATS), mitigation_rows(bench))}"


def _identities(run: Reproduction) -> str:
    terms = run.score_terms
    if terms is None:
        return "<p>This model's scores were not decomposed, see below.</p>"
    rows = [
        ("sum of the terms against the model's own scores", f"{terms.max_error:.2e}"),
        ("softmax of the sum against the model's own patterns", f"{terms.pattern_error:.2e}"),
        ("tolerance", f"{terms.tolerance:.2e}"),
    ]
    note = "Largest differences over all prompts, layers, heads and visible pairs."
    return f"<p>{_text(note)}</p>{_table(['identity', 'largest difference'], rows)}"


def _survey(survey: Survey) -> str:
    """Verdicts, the figure, and a column of numbers for each model."""
    from sinkscope.plots import READING, survey_map

    verdicts = "".join(
        f"<li><b>{_text(row.model)}</b>: {_text(row.verdict)}</li>" for row in survey.rows
    )
    names = [f.name for f in fields(SurveyRow) if f.name not in ("model", "verdict")]
    rows = [
        [name.replace("_", " "), *(_survey_cell(getattr(row, name)) for row in survey.rows)]
        for name in names
    ]
    table = _table(["", *(row.model for row in survey.rows)], rows)
    figure = _figure("survey_map", survey_map(survey))
    return f"<ul>{verdicts}</ul><p>{_text(READING['survey_map'])}</p>{figure}{table}"


def _survey_cell(value: Any) -> str:
    if isinstance(value, tuple):
        pairs = bool(value) and all(isinstance(item, tuple) for item in value)
        cells = [": ".join(map(_survey_cell, v)) if pairs else _survey_cell(v) for v in value]
        return ("; " if pairs else ", ").join(cells) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _not_applicable(run: Reproduction) -> str:
    return _table(["result", "reason"], _missing(run))


def _missing(run: Reproduction) -> list[tuple[str, str]]:
    """Results and forms of results that the model does not have, with the reason."""
    forms = () if run.epe_fidelity is None else run.epe_fidelity.not_applicable
    return [*run.not_applicable.items(), *((f"epe_fidelity, {f}", reason) for f, reason in forms)]


def _repeat(run: Reproduction) -> str:
    p = run.provenance
    words = ["sinkscope", "reproduce", "--model", str(p["model"]), "--prompts", str(p["prompts"])]
    words += ["--length", str(p["prompt_lengths"][1]), "--dtype", str(p["dtype"])]
    if p["batch_size"] is not None:
        words += ["--batch-size", str(p["batch_size"])]
    command = shlex.join(words).replace(DEMO_NAME, "demo")
    return (
        f"<p>With the versions above:</p><pre>{_text(command)}</pre><p>All numbers are in "
        "results.json and table1.csv, the arrays behind them in arrays/.</p>"
    )


# --- pieces of the page -------------------------------------------------------------------


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _anchor(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower())


def _section(title: str, body: str) -> str:
    return f'<section id="{_anchor(title)}"><h2>{_text(title)}</h2>{body}</section>'


def _table(header: Sequence[str] | None, rows: Sequence[Sequence[object]]) -> str:
    head = ""
    if header is not None:
        head = "<thead><tr>" + "".join(f"<th>{_text(c)}</th>" for c in header) + "</tr></thead>"
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _figure(name: str, figure: go.Figure) -> str:
    """The figure's data, with no `<` in it that could end the script element."""
    data = json.loads(figure.to_json())
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    height = int(figure.layout.height or 450)
    return (
        f'<div class="figure" id="figure-{name}" data-name="{name}" '
        f'style="min-height:{height}px"></div>'
        f'<script type="application/json" id="data-{name}">{content}</script>'
    )


def _plotly_script(plotlyjs: str) -> str:
    if plotlyjs == "cdn":
        from plotly.offline import get_plotlyjs_version

        source = f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js"
        return f'<script src="{source}" charset="utf-8"></script>'
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1060px; margin: 0 auto;
       padding: 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd;
         vertical-align: top; overflow-wrap: anywhere; }
.scroll, .figure { overflow-x: auto; } .headline { font-weight: 600; }
pre { background: #f4f4f4; padding: 0.7rem; overflow-x: auto; }
nav ul { columns: 2; padding-left: 1.2rem; }
@media print { nav { display: none; } section { break-inside: avoid; } }
"""

_SCRIPT = """
const config = {displaylogo: false, showSendToCloud: false};
function draw(place) {
  if (place.dataset.drawn) { return; }
  place.dataset.drawn = "1";
  const figure = JSON.parse(document.getElementById("data-" + place.dataset.name).textContent);
  Plotly.newPlot(place, figure.data, figure.layout, config);
}
const places = document.querySelectorAll(".figure");
if (typeof Plotly === "undefined") {
  places.forEach((place) => { place.textContent = "plotly.js could not be loaded."; });
} else if ("IntersectionObserver" in window) {
  const observer = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) { draw(entry.target); observer.unobserve(entry.target); }
  }), {rootMargin: "600px"});
  places.forEach((place) => observer.observe(place));
  window.addEventListener("beforeprint", () => places.forEach(draw));
} else {
  places.forEach(draw);
}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
{plotly}
</head>
<body>
<h1>{title}</h1>
<nav><ul>{contents}</ul></nav>
{sections}
<script>{script}</script>
</body>
</html>
"""
