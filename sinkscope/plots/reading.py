"""How to read each figure, in two sentences."""

from __future__ import annotations

READING: dict[str, str] = {
    "delta_histogram": (
        "Delta is the part of every attention score that the query bias gives to a key, whoever "
        "asks; each colour's bars add up to 100 % of its values. Where position 0's bars lie to "
        "the right of the others', the query bias alone favours position 0."
    ),
    "delta_ribbon": (
        "Each panel is a layer: the line is the median of Delta over prompts and heads at each "
        "position, the band runs from p10 to p90. Position 0 stands apart in a layer where the "
        "low end of its bar is above the dotted line, the highest p90 of any other position."
    ),
    "epe_bias_histogram": (
        "The cosine says how far a head's query bias points along the key that a position alone "
        "would make; 1 is the same direction, 0 is unrelated. Bars of position 0 to the right of "
        "the others mean that the weights alone aim the query bias at position 0."
    ),
    "fidelity_ribbon": (
        "The cosine says how well the effective positional encoding (EPE) stands for what the "
        "position vector really changes; 1 is perfect. The forms answer different questions: "
        "through the MLP alone, or through the whole first block, where attention mixes tokens."
    ),
    "coordinate_histogram": (
        "|gamma| is how much one coordinate of a key adds to the query-bias term per unit; each "
        "colour's bars add up to 100 % of its values. Massive coordinates to the right of the "
        "others mean that the query bias reads the very coordinates that position 0 makes large."
    ),
    "massive_line": (
        "The line is the EPE of one position, coordinate by coordinate; the labelled peaks are "
        "the coordinates that the rule calls massive. Dashed lines are each rule's threshold on "
        "the magnitude, drawn on both signs."
    ),
    "attention_maps": (
        "Each panel is a condition, rows are queries, columns are keys, and all panels share one "
        "colour scale, so colours can be compared. A bright first column is a sink at position "
        "0; a condition that dims it removes the sink, and a bright column elsewhere moved it."
    ),
    "table1_bars": (
        "Bars are the sink score of each condition, the mean attention to position 0 from the "
        "second half of the prompt, with one standard error over prompts. A condition far below "
        "the baseline takes away something that the sink needs."
    ),
    "score_terms_bars": (
        "The four stacked terms of each key add up exactly to its score before the softmax, the "
        "marker. Key bias and bias-bias are the same for every key and leave the attention as it "
        "is, so what sets keys apart is content and query bias."
    ),
    "shift_share_bars": (
        "Bars split the query-bias term by coordinate of the key, and the last bar sums all "
        "coordinates that are not shown. Few long bars mean that a few coordinates carry it."
    ),
    "sink_score_map": (
        "Each cell is a head: the mean attention to position 0 from the second half of the "
        "prompt, on a scale from 0 to 1. Bright rows are layers whose heads have a sink at "
        "position 0; use the menu to see what a condition does to each head."
    ),
    "survey_map": (
        "Each row is a model, each column an ablation, and the number is what the ablation leaves "
        "of that model's sink; empty cells are parts that the model does not have. A dark cell "
        "names a part that carries the sink, and rows that differ are sinks by other circuits."
    ),
    "sink_positions": (
        "Each cell is a head, its number the position that receives most attention, left before "
        "and right after the ablation. Cells in bold on the right have changed: their sink was "
        "moved to another position rather than removed."
    ),
    "mitigation_tradeoff": (
        "To the right more of the sink is gone, upwards the model predicts worse; the dotted line "
        "joins the mitigations that no other beats on both counts. Open circles are random "
        "controls of the same budget: a mitigation's cost counts only as far as it lies above "
        "its control's."
    ),
    "dose_response": (
        "Each column scales one part: the upper curve is the sink score, the lower one the loss "
        "added, and a factor of 1 is the untouched model. A sink that falls before the loss rises "
        "can be thinned out for free; open circles are random controls."
    ),
    "head_sweep_map": (
        "Each cell is the ablation in one head alone, the last column in all heads of a layer: on "
        "the left the change of the mean sink score, on the right of the loss. Heads that stand "
        "out on the left alone carry the sink without being needed for predictions."
    ),
}
"""Figure name -> two sentences that say how to read it."""
