"""The figures: each function takes a result and gives a plotly Figure, shows and writes nothing.

The paper's results: `delta_histogram`, `delta_ribbon`, `epe_bias_histogram`,
`fidelity_ribbon`, `coordinate_histogram`, `massive_line`, `attention_maps`, `table1_bars`.
A closer look: `score_terms_bars`, `shift_share_bars`, `sink_score_map`, `sink_positions`.
Several models: `survey_map`.
What a mitigation costs: `mitigation_tradeoff`, `dose_response`, `head_sweep_map`.
`READING` says in two sentences how to read each; `save_figure` writes one to a file;
`HTML_CONFIG` is for pages that hold figures (`figure.to_html(config=HTML_CONFIG)`).

Tokens, names and labels are shown as they are: what plotly would take for markup is escaped,
and spaces, line breaks and control characters are made visible.
"""

from sinkscope.plots._style import HTML_CONFIG
from sinkscope.plots.alignment import coordinate_histogram, epe_bias_histogram
from sinkscope.plots.attention import attention_maps
from sinkscope.plots.coordinates import shift_share_bars
from sinkscope.plots.delta import delta_histogram, delta_ribbon
from sinkscope.plots.export import save_figure
from sinkscope.plots.fidelity import fidelity_ribbon
from sinkscope.plots.massive import massive_line
from sinkscope.plots.mitigation import dose_response, head_sweep_map, mitigation_tradeoff
from sinkscope.plots.reading import READING
from sinkscope.plots.sinks import sink_positions, sink_score_map
from sinkscope.plots.survey import survey_map
from sinkscope.plots.table1 import table1_bars
from sinkscope.plots.terms import score_terms_bars

__all__ = [
    "HTML_CONFIG",
    "READING",
    "attention_maps",
    "coordinate_histogram",
    "delta_histogram",
    "delta_ribbon",
    "dose_response",
    "epe_bias_histogram",
    "fidelity_ribbon",
    "head_sweep_map",
    "massive_line",
    "mitigation_tradeoff",
    "save_figure",
    "score_terms_bars",
    "shift_share_bars",
    "sink_positions",
    "sink_score_map",
    "survey_map",
    "table1_bars",
]
