"""The mitigation bench and the sweep: against the measures themselves, and planted numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import hook, tiny_gpt2
from test_leaves_no_trace import state

import sinkscope as ss
from sinkscope import metrics
from sinkscope.ablations import Ablation, ZeroKeyColumns, ZeroQueryBias, ZeroToken
from sinkscope.bench import MEASURES, UNTOUCHED, MitigationBench
from sinkscope.errors import InvalidInputError, NoEffectWarning, NotApplicableError
from sinkscope.mitigations import OffByOneSoftmax, ScaleQueryBias, SinkLogit, SwitchOffHeads
from sinkscope.report import mitigation_sections
from sinkscope.verdict import mitigation_verdict

IDS = torch.randint(1, 50, (5, 8), generator=torch.Generator().manual_seed(0))
MITIGATIONS: dict[str, Ablation] = {
    "half": ScaleQueryBias(0.5),
    "none": ScaleQueryBias(0.0),
    "columns": ZeroKeyColumns((1, 2)),
    "heads": SwitchOffHeads(((1, 1),)),
    "softmax": OffByOneSoftmax(),
    "logit": SinkLogit(-1.0),
    "own": Ablation.from_hook(ss.Site("resid_post", 0), lambda x, hook: 0.9 * x, "own"),
}


@pytest.fixture(scope="module")
def bench_model() -> Any:
    return hook(tiny_gpt2(), "bridge")


@pytest.fixture(scope="module")
def batch(bench_model: Any) -> ss.TokenBatch:
    return ss.token_batch(bench_model, IDS)


@pytest.fixture(scope="module")
def bench(bench_model: Any, batch: ss.TokenBatch) -> MitigationBench:
    return ss.mitigation_bench(bench_model, batch, MITIGATIONS, seeds=(0, 5), window=3)


def test_received_attention_is_summed_once_a_layer(
    bench_model: Any, batch: ss.TokenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    plain = metrics.received_attention

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return plain(*arguments)

    monkeypatch.setattr(metrics, "received_attention", counted)
    ss.mitigation_bench(bench_model, batch, {"heads": SwitchOffHeads(((0, 0),))}, seeds=(0,))
    assert len(calls) == 2 * 3, "two runs of three layers; controls do not ask for it"


def test_every_number_is_that_of_its_own_measure(
    bench: MitigationBench, bench_model: Any, batch: ss.TokenBatch
) -> None:
    m = bench_model
    for n, (name, ablation) in enumerate([(UNTOUCHED, None), *MITIGATIONS.items()]):
        assert bench.names[n] == name
        expected = {
            "sink_score": ss.sink_score(m, batch, ablation).mean((1, 2)),
            "loss": ss.next_token_loss(m, batch, ablation),
            "kl": ss.kl_to_untouched(m, batch, ablation),
            "entropy": ss.attention_entropy(m, batch, ablation).mean((1, 2)),
            "quantised_loss": ss.quantised_loss(m, batch, ablation),
            "windowed": ss.streaming_loss(m, batch, 3, 0, ablation),
            "windowed_kept": ss.streaming_loss(m, batch, 3, 4, ablation),
        }
        assert tuple(expected) == MEASURES
        for measure, values in expected.items():
            np.testing.assert_allclose(bench.of(measure)[n], values.numpy(), atol=1e-10)
        rate = ss.sink_rate(m, batch, ablation)
        np.testing.assert_array_equal(bench.rates[n], rate.numpy())
        position = ss.sink_position(m, batch, ablation)
        np.testing.assert_array_equal(bench.positions[n], position.numpy())
        statistics = ss.residual_statistics(m, batch, ablation)
        for k, field in enumerate(("peak", "ratio", "kurtosis", "outliers")):
            np.testing.assert_allclose(bench.residual[n, ..., k], getattr(statistics, field))


def test_controls_are_those_of_the_seeds(
    bench: MitigationBench, bench_model: Any, batch: ss.TokenBatch
) -> None:
    for s, seed in enumerate((0, 5)):
        twin = ss.equal_budget_control(
            bench_model, MITIGATIONS["columns"], seed, n_positions=IDS.shape[1]
        )
        loss = ss.next_token_loss(bench_model, batch, twin)
        np.testing.assert_allclose(bench.controls[3, s, :, 1], loss.numpy(), atol=1e-10)
    assert dict(bench.no_control).keys() == {"own"}
    assert np.isnan(bench.controls[[0, 7]]).all()
    assert np.isfinite(bench.controls[1:7]).all()


def test_the_chunk_size_changes_nothing(
    bench: MitigationBench, bench_model: Any, batch: ss.TokenBatch
) -> None:
    told: list[int] = []
    total: list[int] = []
    again = ss.mitigation_bench(
        bench_model,
        batch,
        MITIGATIONS,
        seeds=(0, 5),
        window=3,
        batch_size=2,
        total=total.append,
        progress=told.append,
    )
    for field in ("values", "controls", "sinks", "residual"):
        np.testing.assert_allclose(getattr(again, field), getattr(bench, field), atol=1e-10)
    assert sum(told) == total[0]


def test_doses_belong_to_families(bench: MitigationBench) -> None:
    assert bench.families == (
        *("", "ScaleQueryBias", "ScaleQueryBias", "", "", "SinkLogit", "SinkLogit", ""),
    )
    assert bench.doses[1:3] == (0.5, 0.0)
    assert bench.doses[5:7] == (0.0, -1.0)


def test_it_comes_back_from_a_file(bench: MitigationBench, tmp_path: Path) -> None:
    bench.save(tmp_path)
    assert MitigationBench.load(tmp_path) == bench


def planted(removed: list[float], added: list[float], n_prompts: int = 50) -> MitigationBench:
    """Runs that take these shares of a sink of 0.5, at these losses over 3 nats, with noise that
    is the same for all runs, so that paired differences have none."""
    runs = len(removed)
    noise = np.random.default_rng(1).normal(size=n_prompts)
    values = np.zeros((runs, n_prompts, len(MEASURES)))
    values[..., 0] = 0.5 * (1 - np.array(removed))[:, None]
    values[..., 1] = 3 + noise + np.array(added)[:, None]
    values[..., 4] = values[..., 1] + 0.25
    controls = np.full((runs, 2, n_prompts, 3), np.nan)
    controls[1:, :, :, 0] = 0.45
    controls[1:, 0, :, 1] = values[0, :, 1] + 0.1
    controls[1:, 1, :, 1] = values[0, :, 1] + 0.3
    layers = np.zeros((runs, n_prompts, 2, 2))
    return MitigationBench(
        values=values,
        controls=controls,
        sinks=layers,
        rates=layers,
        positions=layers.astype(np.int64),
        residual=np.ones((runs, n_prompts, 2, 4)),
        names=(UNTOUCHED, *(f"m{n}" for n in range(1, runs))),
        families=("", *["ScaleQueryBias"] * (runs - 1)),
        doses=(float("nan"), *(n / runs for n in range(1, runs))),
        corpora=("prompts",) * n_prompts,
        mid_layers=(0,),
        bits=8,
        window=4,
        keep_first=2,
        seeds=(0, 1),
    )


def test_the_front_is_what_no_other_beats() -> None:
    bench = planted([0.0, 0.5, 0.4, 0.9, 0.9, -0.1, 0.5], [0.0, 0.1, 0.2, 0.5, 0.6, -0.2, 0.1])
    assert bench.pareto == (5, 0, 1, 6, 3)
    np.testing.assert_allclose(bench.sink_removed, [0.0, 0.5, 0.4, 0.9, 0.9, -0.1, 0.5])
    np.testing.assert_allclose(bench.loss_added, [0.0, 0.1, 0.2, 0.5, 0.6, -0.2, 0.1], atol=1e-12)


def test_intervals_are_of_paired_differences() -> None:
    bench = planted([0.0, 0.5], [0.0, 0.1])
    for name, value in (("sink_removed", 0.5), ("loss_added", 0.1), ("quantisation_cost", 0.25)):
        np.testing.assert_allclose(bench.intervals()[name][1], [value, value], atol=1e-12)
    over = bench.intervals()["loss_added_over_control"][1]
    np.testing.assert_allclose(over, [-0.1, -0.1], atol=1e-12)
    assert np.isnan(bench.intervals()["loss_added_over_control"][0]).all()


def test_intervals_are_as_wide_as_the_mean_is_uncertain() -> None:
    bench = planted([0.0, 0.5], [0.0, 0.1], n_prompts=400)
    bench.values[1, :, 1] += np.random.default_rng(2).normal(size=400)
    low, high = bench.intervals()["loss_added"][1]
    difference = bench.of("loss")[1] - bench.of("loss")[0]
    error = difference.std(ddof=1) / 20
    assert low == pytest.approx(difference.mean() - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(difference.mean() + 1.96 * error, abs=0.2 * error)


def test_the_table_has_means_and_spreads_of_controls() -> None:
    row = planted([0.0, 0.5], [0.0, 0.1]).to_dataframe().iloc[1]
    assert row["control_sink_removed"] == pytest.approx(0.1)
    assert row["control_loss_added"] == pytest.approx(0.2)
    assert row["control_loss_added_std"] == pytest.approx(np.std([0.1, 0.3], ddof=1))
    assert row["loss_added_over_control"] == pytest.approx(-0.1)


def test_the_verdict_says_what_goes_and_what_it_costs() -> None:
    words = mitigation_verdict(planted([0.0, 0.55, 0.4, 0.9], [0.0, 0.12, 0.2, 0.5]))
    assert words.headline.startswith("m1 takes 55% of the sink at +0.120 nats per token")
    text = " ".join(words.sentences)
    assert "m2 takes 40% of the sink at +0.200 nats per token [+0.200, +0.200]" in text
    assert "its random control takes 10% of the sink at +0.200" in text
    assert "Not beaten on both counts: m1, m3." in text
    assert "W8A8 costs the untouched model +0.250" in text
    none = mitigation_verdict(planted([0.0, 0.3, -0.2], [0.0, 0.0, 0.0]))
    assert none.headline == "No mitigation takes away half of the sink."
    assert "m2 adds 20% to the sink" in " ".join(none.sentences)
    assert "not told from none" in " ".join(none.sentences)


def test_the_page_escapes_names_and_gives_reasons(bench: MitigationBench) -> None:
    hostile = "<script>alert(1)</script>"
    named = dataclasses.replace(bench, names=(UNTOUCHED, hostile, *bench.names[2:]))
    sections = dict(mitigation_sections(named, "model"))
    body = "".join(sections.values())
    assert hostile not in body
    assert "&lt;script&gt;alert(1)" in sections["Mitigations"]
    assert "control of own" in sections["Not applicable"]
    assert 'id="figure-mitigation_tradeoff"' in body
    assert 'id="figure-dose_response"' in body


# --- what is given ------------------------------------------------------------------------


def test_the_defaults_are_built_for_the_model(bench_model: Any, batch: ss.TokenBatch) -> None:
    made = ss.default_mitigations(bench_model, batch)
    assert {"Query bias x 0", "Off-by-one softmax", "Massive to mean"} <= set(made)
    assert all(isinstance(ablation, Ablation) for ablation in made.values())


def test_a_hook_that_is_never_reached_is_no_mitigation_without_effect(
    bench_model: Any, batch: ss.TokenBatch
) -> None:
    never = Ablation.from_hook("blocks.0.hook_mlp_in", lambda x, hook: 0 * x)
    with pytest.warns(NoEffectWarning, match="hook_mlp_in was never reached"):
        ss.mitigation_bench(bench_model, batch, {"never": never}, seeds=[0])


def test_a_model_without_the_parts_gets_the_others() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                attn_implementation="eager",
            )
        )
    model = ss.load_model(llama.eval())
    made = ss.default_mitigations(model, ss.token_batch(model, IDS))
    result = ss.mitigation_bench(model, IDS, seeds=[0])
    missing = dict(result.not_applicable)
    assert "no query bias" in missing["Query bias x 0"]
    assert "no learned position" in missing["EPE_0 x 0"]
    assert set(result.names) == {UNTOUCHED, *made} - set(missing)
    assert "Off-by-one softmax" in result.names
    assert np.isfinite(result.of("quantised_loss")).all()


BAD: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "none": (lambda m, b: ss.mitigation_bench(m, b, {}), "at least one"),
    "taken name": (lambda m, b: ss.mitigation_bench(m, b, {UNTOUCHED: ZeroToken()}), "other names"),
    "no seed": (lambda m, b: ss.mitigation_bench(m, b, MITIGATIONS, seeds=()), "at least one"),
    "seed twice": (lambda m, b: ss.mitigation_bench(m, b, MITIGATIONS, seeds=(1, 1)), "each once"),
    "measure": (lambda m, b: planted([0.0], [0.0]).of("perplexity"), "windowed_kept"),
    "sweep of what has no heads": (lambda m, b: ss.head_sweep(m, b, ZeroToken()), "heads="),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_say_what_is_right(name: str, bench_model: Any, batch: ss.TokenBatch) -> None:
    call, message = BAD[name]
    with pytest.raises(InvalidInputError, match=message):
        call(bench_model, batch)


@pytest.mark.parametrize("name", ["bench", "sweep", "quantised", "raises"])
def test_a_call_leaves_no_trace(kind: str, name: str) -> None:
    model = hook(tiny_gpt2(), kind)
    model.train()
    batch = ss.token_batch(model, IDS)

    def boom(x: Any, hook: Any) -> None:
        raise RuntimeError("boom")

    before = state(model)
    if name == "bench":
        ss.mitigation_bench(model, batch, MITIGATIONS, seeds=(0,))
    elif name == "sweep":
        ss.head_sweep(model, batch, ZeroQueryBias())
    elif name == "quantised":
        ss.quantised_loss(model, batch, ZeroKeyColumns((1,)))
    else:
        raising = {"boom": Ablation.from_hook(ss.Site("z", 1), boom)}
        with pytest.raises(RuntimeError, match="boom"):
            ss.mitigation_bench(model, batch, raising)
    after = state(model)
    assert [key for key in before if before[key] != after[key]] == []


# --- head by head -------------------------------------------------------------------------


@pytest.mark.parametrize("ablation", [None, ZeroQueryBias(), ZeroKeyColumns((1, 4))])
def test_a_sweep_is_each_head_alone(
    bench_model: Any, batch: ss.TokenBatch, ablation: Ablation | None
) -> None:
    sweep = ss.head_sweep(bench_model, batch, ablation, layers=[0, 2], batch_size=3)
    loss = ss.next_token_loss(bench_model, batch)
    sink = ss.sink_score(bench_model, batch).mean((1, 2))
    for n, layer in enumerate((0, 2)):
        for head in (0, 1, 2, None):
            heads = [0, 1, 2] if head is None else [head]
            alone = (
                SwitchOffHeads(tuple((layer, h) for h in heads))
                if ablation is None
                else dataclasses.replace(ablation, layers=[layer], heads=heads)
            )
            losses = ss.next_token_loss(bench_model, batch, alone) - loss
            sinks = ss.sink_score(bench_model, batch, alone).mean((1, 2)) - sink
            got = (
                (sweep.layer_loss[n], sweep.layer_sink[n])
                if head is None
                else (sweep.loss[n, head], sweep.sink[n, head])
            )
            np.testing.assert_allclose(got[0], losses.numpy(), atol=1e-10)
            np.testing.assert_allclose(got[1], sinks.numpy(), atol=1e-10)
    assert np.abs(sweep.loss).max() > 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
def test_side_by_side_is_one_after_the_other_on_padded_prompts(kind: str, side: str) -> None:
    model = hook(tiny_gpt2(), kind)
    mask = torch.ones(5, 8)
    for row, pads in enumerate((0, 1, 2, 3, 0)):
        mask[row, slice(0, pads) if side == "left" else slice(8 - pads, 8)] = 0
    batch = ss.token_batch(model, IDS, mask=mask)
    ablation = ScaleQueryBias(0.0, positions=(1, 2))
    together = ss.head_sweep(model, batch, ablation)
    apart = ss.head_sweep(model, batch, ablation, side_by_side=False)
    for field in ("sink", "loss", "layer_sink", "layer_loss"):
        np.testing.assert_allclose(getattr(together, field), getattr(apart, field), atol=1e-10)
    assert np.abs(together.loss).min() >= 0
    assert np.abs(together.loss).max() > 1e-4


def test_a_sweep_comes_back_and_has_a_table(
    bench_model: Any, batch: ss.TokenBatch, tmp_path: Path
) -> None:
    sweep = ss.head_sweep(bench_model, batch, ZeroQueryBias())
    sweep.save(tmp_path)
    assert ss.HeadSweep.load(tmp_path) == sweep
    frame = sweep.to_dataframe()
    assert list(frame["head"]) == ["0", "1", "2", "all"] * 3
    row = frame[(frame["layer"] == 1) & (frame["head"] == "2")].iloc[0]
    assert row["loss_change"] == pytest.approx(sweep.loss[1, 2].mean())
    with pytest.raises(NotApplicableError):
        ss.head_sweep(ss.load_model(_without_query_bias()), batch, ZeroQueryBias())


def _without_query_bias() -> Any:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    return GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=64,
            hidden_size=32,
            num_layers=3,
            num_heads=4,
            attention_types=[[["global"], 3]],
            intermediate_size=64,
            max_position_embeddings=16,
        )
    ).eval()
