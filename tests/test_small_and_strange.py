"""Models of one layer, views without parts, batches of other models, prompts that tell nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope import mitigations as mi
from sinkscope.ablations import ZeroQueryBias, ZeroRandomKeyColumns
from sinkscope.cli import main
from sinkscope.errors import InvalidInputError, NotApplicableError
from sinkscope.verdict import mitigation_verdict, verdict

IDS = torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model() -> Any:
    return ss.load_model(tiny_gpt2())


def test_a_model_of_one_layer_has_numbers_everywhere(kind: str) -> None:
    one = hook(tiny_gpt2(n_layers=1), kind)
    batch = ss.token_batch(one, IDS)
    assert list(ss.model_view(one).mid_or_all_layers) == [0]
    table = ss.reproduce(one, batch).table1
    own = float(ss.patterns(one, batch)[:, 0, :, 4:, 0].mean())
    assert table.to_dataframe().sink_score.iloc[0] == pytest.approx(own)
    assert ss.survey(one, batch).rows[0].sink_score == pytest.approx(own)
    sweep = ss.head_sweep(one, batch, ZeroQueryBias())
    assert sweep.summary()["layer_sink"].shape == (1,)


def test_a_model_has_its_own_name_or_its_class(model: Any) -> None:
    assert ss.model_view(model).name == model.cfg.model_name != type(model).__name__
    unnamed = hook(tiny_gpt2(), "bridge")
    unnamed.cfg.model_name = None
    assert ss.model_view(unnamed).name == type(unnamed).__name__


@pytest.mark.parametrize("values", [{"n": 0}, {"n": 1.0}, {"seed": 1.5}, {"n": True}])
def test_columns_are_drawn_by_whole_numbers(model: Any, values: dict[str, Any]) -> None:
    view = ss.model_view(model)
    assert [len(row) for row in ZeroRandomKeyColumns(n=1).draws(view)] == [1] * view.n_layers
    wrong = ZeroRandomKeyColumns()
    for name, value in values.items():
        object.__setattr__(wrong, name, value)  # past the tests' own checks of types
    with pytest.raises(InvalidInputError, match="drawn by two whole numbers"):
        wrong.draws(view)


def test_what_is_no_logits_has_no_loss(model: Any) -> None:
    """A view whose run gives something else of `[batch pos ...]`."""

    class NoHead(ss.ModelView):
        def run(self, ids: Any, mask: Any = None, stop_at_layer: int | None = None) -> Any:
            return super().run(ids, mask, stop_at_layer)[..., : self.d_model]

    view = NoHead.of(ss.load_model(tiny_gpt2()))
    batch = ss.token_batch(view, IDS)
    for measure in (ss.next_token_loss, ss.kl_to_untouched):
        with pytest.raises(NotApplicableError, match="gives back no logits"):
            measure(view, batch)


def test_a_batch_of_another_model_is_told(model: Any) -> None:
    other = ss.token_batch(ss.load_model(tiny_gpt2(d_vocab=90)), IDS + 40)
    with pytest.raises(InvalidInputError, match="made for another"):
        ss.sink_score(model, other)


def test_too_short_prompts_tell_nothing(model: Any) -> None:
    short = ss.token_batch(model, IDS[:, :2])
    assert "too short to tell" in ss.survey(model, short).rows[0].verdict
    table = ss.experiments.table1.run(model, short)
    assert "too short to tell" in verdict(table).headline


def test_models_of_one_name_keep_their_rows(model: Any) -> None:
    both = ss.survey([model, model], IDS)
    assert len(both.summary()) == 2


def test_one_prompt_has_no_interval(model: Any) -> None:
    one = ss.token_batch(model, IDS[:1])
    bench = ss.mitigation_bench(model, one, {"none": mi.ScaleQueryBias(0.0)}, seeds=[0])
    assert torch.tensor(bench.intervals()["loss_added"]).isnan().all()
    assert "nan" not in mitigation_verdict(bench).headline


def test_a_long_list_of_layers_gives_a_short_message(model: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ss.sink_score(model, ss.token_batch(model, IDS), ZeroQueryBias(layers=[999] * 5000))
    assert len(str(caught.value)) < 600


def test_a_batch_is_not_cut_again(model: Any) -> None:
    with pytest.raises(InvalidInputError, match="has its length"):
        ss.survey(model, ss.token_batch(model, IDS), length=4)


@pytest.mark.parametrize("option", [["--bits", "99"], ["--window", "0"], ["--keep-first", "-1"]])
def test_unusable_sizes_are_told_before_anything_is_loaded_or_made(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["mitigate", "--model", "no such model", "--out", str(out), *option]) == 1
    assert "no such model" not in capsys.readouterr().err
    assert not out.exists()
