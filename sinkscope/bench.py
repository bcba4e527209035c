"""The mitigation bench: what taking a sink away costs the model, against random controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sinkscope import metrics
from sinkscope.ablations import Ablation
from sinkscope.capture import (
    Pass,
    Progress,
    Reader,
    Total,
    no_effect_is_fine,
    require_progress,
    run_passes,
)
from sinkscope.controls import equal_budget_control
from sinkscope.costs import (
    DivergenceReader,
    HeldLogits,
    LossReader,
    entropy,
    quantised_loss,
    require_bits,
    require_window,
    residual_reader,
    streaming_loss,
)
from sinkscope.display import percent
from sinkscope.errors import InvalidInputError, NotApplicableError
from sinkscope.experiments._engine import split_by_applicability
from sinkscope.massive import TopK
from sinkscope.measures import PatternReader, of_received
from sinkscope.mitigations import (
    CalibrateAttention,
    ClampActivations,
    OffByOneSoftmax,
    ScaleEPE,
    ScaleKeyColumns,
    ScaleQueryBias,
    SetActivations,
    SinkLogit,
    SwitchOffHeads,
    massive_limit,
)
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, token_batch
from sinkscope.results import Result

if TYPE_CHECKING:
    import pandas as pd

UNTOUCHED = "Untouched"
DOSES = (0.0, 0.25, 0.5, 0.75)
MEASURES = ("sink_score", "loss", "kl", "entropy", "quantised_loss", "windowed", "windowed_kept")
"""The last axis of `MitigationBench.values`."""
CONTROLLED = MEASURES[:3]
"""What is measured of controls too."""
OUTLIERS = ("peak", "peak_ratio", "kurtosis", "outliers")
RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, eq=False)
class MitigationBench(Result):
    """What each mitigation does to the sink and to the model, prompt by prompt.

    Attributes:
        values: `[run prompt measure]`, see `measures`; the first run is the untouched model.
        controls: `[run seed prompt measure]`, the first three measures of the random controls,
            NaN where a run has none.
        sinks: `[run prompt layer head]`, sink scores of all layers.
        rates: `[run prompt layer head]`, 1 where position 0 receives over 0.3 (Gu et al.).
        positions: `[run prompt layer head]`, where most attention goes.
        residual: `[run prompt layer statistic]`: peak, its ratio to the median, kurtosis and
            share of outliers of what enters each layer.
        names: of the runs.
        families: of each run, for dose-response curves; "" for a run of no family.
        doses: of each run within its family; NaN for a run of no family.
        corpora: of the prompts.
        mid_layers: the layers that the sink score is about.
        bits: of the quantised loss.
        window: keys in view in the windowed losses.
        keep_first: first keys kept in the second of them.
        seeds: of the controls.
        no_control: pairs of run and the reason why it has no control.
        not_applicable: pairs of mitigation or measure and reason.
        measures: names along the last axis of `values`.
    """

    kind: ClassVar[str] = "mitigation_bench"

    values: np.ndarray
    controls: np.ndarray
    sinks: np.ndarray
    rates: np.ndarray
    positions: np.ndarray
    residual: np.ndarray
    names: tuple[str, ...]
    families: tuple[str, ...]
    doses: tuple[float, ...]
    corpora: tuple[str, ...]
    mid_layers: tuple[int, ...]
    bits: int
    window: int
    keep_first: int
    seeds: tuple[int, ...]
    no_control: tuple[tuple[str, str], ...] = ()
    not_applicable: tuple[tuple[str, str], ...] = ()
    measures: tuple[str, ...] = MEASURES

    def of(self, measure: str) -> np.ndarray:
        """`[run prompt]`, one measure.

        Raises:
            InvalidInputError: no such measure.
        """
        if measure not in self.measures:
            raise InvalidInputError(
                "Unknown measure",
                expected=", ".join(self.measures),
                got=repr(measure),
                fix="choose one of these",
            )
        return self.values[..., self.measures.index(measure)]

    @property
    def sink_removed(self) -> np.ndarray:
        """`[run]`, `1 - sink score / sink score of the untouched model`, means over prompts."""
        return _removed(self.of("sink_score").mean(1), self.of("sink_score")[0].mean())

    @property
    def loss_added(self) -> np.ndarray:
        """`[run]`, mean over prompts of the loss minus the untouched model's, nats per token."""
        return (self.of("loss") - self.of("loss")[0]).mean(1)

    @property
    def control_sink_removed(self) -> np.ndarray:
        """`[run seed]`, what the random controls remove."""
        return _removed(self.controls[..., 0].mean(2), self.of("sink_score")[0].mean())

    @property
    def control_loss_added(self) -> np.ndarray:
        """`[run seed]`, what the random controls cost."""
        return (self.controls[..., 1] - self.of("loss")[0]).mean(2)

    @property
    def pareto(self) -> tuple[int, ...]:
        """The runs that no other beats: none removes as much for less, nor more for as little.

        In the order of what they remove; the untouched model is one of the runs.
        """
        removed, added = self.sink_removed, self.loss_added
        kept = [
            n
            for n in range(len(self.names))
            if not any(
                removed[m] >= removed[n]
                and added[m] <= added[n]
                and (removed[m] > removed[n] or added[m] < added[n])
                for m in range(len(self.names))
            )
        ]
        return tuple(sorted(kept, key=lambda n: (removed[n], n)))

    def intervals(self) -> dict[str, np.ndarray]:
        """95 % bootstrap intervals over prompts, `[run low/high]`, of paired differences.

        "sink_removed", "loss_added" and "quantisation_cost", and "sink_removed_over_control" and
        "loss_added_over_control" of the differences to the mean of the controls (NaN without).
        Prompts are drawn with replacement, the same for all runs, 2000 times from one seed. NaN
        for a single prompt.
        """
        rng = np.random.default_rng(0)
        n = self.values.shape[1]
        drawn = rng.integers(n, size=(RESAMPLES, n))
        sink, loss = self.of("sink_score"), self.of("loss")
        quantisation = self.of("quantised_loss") - loss
        controls = self.controls.mean(1)
        sink_means, loss_means = (v[:, drawn].mean(-1) for v in (sink, loss))
        control_sinks, control_losses = (controls[..., k][:, drawn].mean(-1) for k in (0, 1))
        samples = {
            "sink_removed": _removed(sink_means, sink_means[0]),
            "loss_added": loss_means - loss_means[0],
            "quantisation_cost": quantisation[:, drawn].mean(-1),
            "sink_removed_over_control": (control_sinks - sink_means) / sink_means[0],
            "loss_added_over_control": loss_means - control_losses,
        }
        if n == 1:  # drawing one prompt again and again tells nothing of others
            samples = {k: np.full_like(v, np.nan) for k, v in samples.items()}
        tails = [50 * (1 - LEVEL), 50 * (1 + LEVEL)]
        return {k: np.percentile(v, tails, axis=1).T for k, v in samples.items()}

    def to_dataframe(self) -> pd.DataFrame:
        """One row a run.

        Columns: mitigation, family, dose; sink_score (mid layers), sink_removed with low and
        high ends of its interval, sink_rate (all layers), at_first (share of prompts, mid layers
        and heads whose strongest position is 0); loss, loss_added with its interval, kl;
        quantised_loss and quantisation_cost (over the same run in floating point) with its
        interval; windowed
        and windowed_kept losses; entropy; peak, peak_ratio, kurtosis, outliers (means over prompts
        and mid layers); control_sink_removed and control_loss_added, means
        over seeds, with standard deviations; loss_added_over_control with its interval; pareto.
        """
        import pandas as pd

        return pd.DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        means = self.values.mean(1)
        intervals = self.intervals()
        mid = list(self.mid_layers)
        columns = {
            "mitigation": list(self.names),
            "family": list(self.families),
            "dose": list(self.doses),
            "sink_score": means[:, 0],
            "sink_removed": self.sink_removed,
            **_ends("sink_removed", intervals),
            "sink_rate": self.rates.mean((1, 2, 3)),
            "at_first": (self.positions[:, :, mid] == 0).mean((1, 2, 3)),
            "loss": means[:, 1],
            "loss_added": self.loss_added,
            **_ends("loss_added", intervals),
            "kl": means[:, 2],
            "quantised_loss": means[:, 4],
            "quantisation_cost": means[:, 4] - means[:, 1],
            **_ends("quantisation_cost", intervals),
            "windowed": means[:, 5],
            "windowed_kept": means[:, 6],
            "entropy": means[:, 3],
            **{name: self.residual[:, :, mid, k].mean((1, 2)) for k, name in enumerate(OUTLIERS)},
            "control_sink_removed": self.control_sink_removed.mean(1),
            "control_sink_removed_std": _spread(self.control_sink_removed),
            "control_loss_added": self.control_loss_added.mean(1),
            "control_loss_added_std": _spread(self.control_loss_added),
            "loss_added_over_control": self.loss_added - self.control_loss_added.mean(1),
            **_ends("loss_added_over_control", intervals),
            "pareto": [n in self.pareto for n in range(len(self.names))],
        }
        plain = {
            name: column.tolist() if isinstance(column, np.ndarray) else column
            for name, column in columns.items()
        }
        return [dict(zip(plain, cells, strict=True)) for cells in zip(*plain.values(), strict=True)]

    def overview(self) -> list[tuple[str, str]]:
        removed, added = self.sink_removed, self.loss_added
        return [
            (name, f"{percent(removed[n])} of the sink, {added[n]:+.4f} nats")
            for n, name in enumerate(self.names)
        ]

    def summary(self) -> dict[str, Any]:
        """The table, the settings, every prompt's values, and what did not apply."""
        return {
            "rows": self._rows(),
            "mid_layers": self.mid_layers,
            "bits": self.bits,
            "window": self.window,
            "keep_first": self.keep_first,
            "seeds": self.seeds,
            "per_prompt": {
                name: dict(zip(self.measures, self.values[n].T, strict=True))
                for n, name in enumerate(self.names)
            },
            "controls_per_seed": {
                name: {
                    "sink_removed": self.control_sink_removed[n],
                    "loss_added": self.control_loss_added[n],
                }
                for n, name in enumerate(self.names)
            },
            "no_control": dict(self.no_control),
            "not_applicable": dict(self.not_applicable),
        }


def mitigation_bench(
    model: Any,
    prompts: Any,
    mitigations: Mapping[str, Ablation] | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    bits: int = 8,
    window: int | None = None,
    keep_first: int = 4,
    batch_size: int | None = None,
    total: Total | None = None,
    progress: Progress | None = None,
) -> MitigationBench:
    """What mitigations do to the sink and to the model, beside equal-budget random controls.

    Measures and their formulas: `sink_score`, `next_token_loss`, `kl_to_untouched`,
    `attention_entropy`, `residual_statistics`, `quantised_loss`, `streaming_loss`; controls:
    `equal_budget_control`. Measures that the model does not allow are NaN, with the reason.

    Args:
        model: a hooked model or its view.
        prompts: a `TokenBatch`, or what `token_batch` takes.
        mitigations: name -> ablation; `default_mitigations` if None.
        seeds: one random control a seed and mitigation.
        bits: of the quantised loss.
        window: keys in view in the windowed losses; half the shortest prompt if None.
        keep_first: first keys that the second windowed loss keeps in view.
        batch_size: rows per forward pass; all at once if None.
        total: told at the start how many prompts will run over all passes.
        progress: told how many prompts are done.

    Raises:
        InvalidInputError: a name that is taken, or no ablation.
        NotApplicableError: none of the mitigations applies.
    """
    view = model_view(model)
    require_progress(progress, total)
    batch = prompts if isinstance(prompts, TokenBatch) else token_batch(view, prompts)
    seeds = _checked_seeds(seeds)
    shortest = int(batch.lengths.min())
    window = max(1, shortest // 2) if window is None else window
    require_bits(bits)
    require_window(window, keep_first)
    missing: dict[str, str] = {}
    if mitigations is None:
        mitigations, missing = _defaults(view, batch, batch_size)
    applied, refused = split_by_applicability(view, batch, mitigations)
    if UNTOUCHED in applied:
        raise InvalidInputError(
            f"{UNTOUCHED!r} is the bench's name for the model without a mitigation",
            expected="other names",
            got=", ".join(applied)[:120],
            fix="leave it out: it is always there",
        )
    runs: dict[str, Ablation | None] = {UNTOUCHED: None, **applied}
    controls, no_control = _controls(view, applied, seeds, shortest)
    extras: dict[str, Callable[[Ablation | None], Tensor]] = {
        "quantised_loss": lambda a: quantised_loss(view, batch, a, bits, batch_size=batch_size),
        "windowed": lambda a: streaming_loss(view, batch, window, 0, a, batch_size=batch_size),
        "windowed_kept": lambda a: streaming_loss(
            view, batch, window, keep_first, a, batch_size=batch_size
        ),
    }
    if total is not None:
        total(len(batch) * (1 + len(runs) * (1 + len(extras)) + len(controls)))
    with no_effect_is_fine():
        measured, control_values = _stream_all(view, batch, runs, controls, batch_size, progress)
        more, reasons = _extras(runs, extras, len(batch), progress)
    families = [_family(ablation) for ablation in runs.values()]
    received = np.stack([m["received"] for m in measured.values()])
    return MitigationBench(
        values=_values(measured, more, view.mid_or_all_layers),
        controls=_control_array(
            list(runs), seeds, len(batch), control_values, view.mid_or_all_layers
        ),
        sinks=np.stack([m["sinks"] for m in measured.values()]),
        rates=received[..., 0],
        positions=received[..., 1].astype(np.int64),
        residual=np.stack([m["residual"] for m in measured.values()]),
        names=tuple(runs),
        families=tuple(name for name, _ in families),
        doses=tuple(dose for _, dose in families),
        corpora=batch.corpora,
        mid_layers=tuple(view.mid_or_all_layers),
        bits=bits,
        window=window,
        keep_first=keep_first,
        seeds=seeds,
        no_control=tuple(no_control.items()),
        not_applicable=(*missing.items(), *refused, *reasons.items()),
    )


def default_mitigations(
    model: Any, batch: TokenBatch, *, batch_size: int | None = None
) -> dict[str, Ablation]:
    """The mitigations that the bench runs if none are named, as far as the model has the parts.

    Query bias, key columns (`TopK(3)` of EPE_0) and EPE_0 at four doses; off-by-one softmax and
    sink logits; attention calibration without and with position 0; the massive activations of
    EPE_0 after layer 0 to zero, to their mean, and clamped to the largest |x| of other positions;
    heads with a sink score over 0.5 off.

    Args:
        model: a hooked model or its view.
        batch: the prompts, whose means, peaks and sink scores some of them need.
        batch_size: rows per forward pass; all at once if None.
    """
    return _defaults(model_view(model), batch, batch_size)[0]


def _defaults(
    view: ModelView, batch: TokenBatch, batch_size: int | None
) -> tuple[dict[str, Ablation], dict[str, str]]:
    three = TopK(min(3, view.d_model))
    made: dict[str, Callable[[], Ablation]] = {}
    for dose in DOSES:
        made[f"Query bias x {dose:g}"] = partial(ScaleQueryBias, dose)
    for dose in DOSES:
        made[f"Key columns x {dose:g}"] = partial(ScaleKeyColumns, three, dose)
    for dose in DOSES:
        made[f"EPE_0 x {dose:g}"] = partial(ScaleEPE, dose)
    made["Off-by-one softmax"] = OffByOneSoftmax
    for logit in (-4.0, -2.0, 2.0):
        made[f"Sink logit {logit:g}"] = partial(SinkLogit, logit)
    made |= {
        "ACT": CalibrateAttention,
        "ACT with position 0": lambda: CalibrateAttention(spare_first=False),
        "Massive to 0": lambda: SetActivations(three),
        "Massive to mean": lambda: SetActivations.to_mean(
            view, batch, three, batch_size=batch_size
        ),
        "Massive clamped": lambda: ClampActivations(
            massive_limit(view, 0, batch, batch_size), coordinates=three
        ),
        "Heads over 0.5 off": lambda: SwitchOffHeads.above(view, batch, batch_size=batch_size),
    }
    built: dict[str, Ablation] = {}
    missing: dict[str, str] = {}
    for name, make in made.items():
        try:
            built[name] = make()
        except NotApplicableError as error:
            missing[name] = str(error)
    return built, missing


def _family(ablation: Ablation | None) -> tuple[str, float]:
    """What a run's dose is of, and the dose: the factor of scaled parts, the logit of sinks."""
    if isinstance(ablation, OffByOneSoftmax):
        ablation = SinkLogit(0.0, ablation.layers, ablation.heads)
    for name in ("factor", "logit"):
        dose = getattr(ablation, name, None)
        if dataclasses.is_dataclass(ablation) and isinstance(dose, (int, float)):
            others = [
                f"{f.name}={getattr(ablation, f.name)!r}"
                for f in dataclasses.fields(ablation)
                if f.name != name and getattr(ablation, f.name) != f.default
            ]
            kind = type(ablation).__name__
            return (f"{kind}({', '.join(others)})" if others else kind), float(dose)
    return "", float("nan")


# --- running ------------------------------------------------------------------------------


class _Measured:
    """The readers of one run."""

    def __init__(self, view: ModelView, held: HeldLogits, everything: bool) -> None:
        layers = range(view.n_layers)
        self._readers: dict[str, Any] = {
            "sinks": PatternReader(layers, metrics.sink_score),
            "loss": LossReader(view),
            "kl": DivergenceReader(held),
        }
        if everything:
            self._readers |= {
                "received": PatternReader(
                    layers, of_received(metrics.sink_rate, metrics.sink_position)
                ),
                "entropy": PatternReader(layers, entropy),
                "residual": residual_reader(layers),
            }

    @property
    def readers(self) -> list[Reader]:
        return list(self._readers.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Every reader's result."""
        return {name: _array(reader.result()) for name, reader in self._readers.items()}


def _stream_all(
    view: ModelView,
    batch: TokenBatch,
    runs: Mapping[str, Ablation | None],
    controls: Mapping[tuple[str, int], Ablation],
    batch_size: int | None,
    progress: Progress | None,
) -> tuple[dict[str, dict[str, np.ndarray]], dict[tuple[str, int], dict[str, np.ndarray]]]:
    held = HeldLogits()
    measured = {name: _Measured(view, held, True) for name in runs}
    of_controls = {key: _Measured(view, held, False) for key in controls}
    passes = [Pass(view, [held])]
    passes += [Pass(view, m.readers, runs[name]) for name, m in measured.items()]
    passes += [Pass(view, m.readers, controls[key]) for key, m in of_controls.items()]
    run_passes(view, batch, passes, batch_size=batch_size, progress=progress)
    return (
        {name: m.arrays() for name, m in measured.items()},
        {key: m.arrays() for key, m in of_controls.items()},
    )


def _controls(
    view: ModelView, applied: Mapping[str, Ablation], seeds: tuple[int, ...], shortest: int
) -> tuple[dict[tuple[str, int], Ablation], dict[str, str]]:
    made: dict[tuple[str, int], Ablation] = {}
    reasons: dict[str, str] = {}
    for name, ablation in applied.items():
        try:
            for seed in seeds:
                made[name, seed] = equal_budget_control(view, ablation, seed, n_positions=shortest)
        except NotApplicableError as error:
            reasons[name] = str(error)
    return made, reasons


def _extras(
    runs: Mapping[str, Ablation | None],
    extras: Mapping[str, Callable[[Ablation | None], Tensor]],
    n_prompts: int,
    progress: Progress | None,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """`[run prompt]` of each further measure; NaN and the reason where one does not apply."""
    values = {name: np.full((len(runs), n_prompts), np.nan) for name in extras}
    reasons: dict[str, str] = {}
    for measure, run in extras.items():
        for n, ablation in enumerate(runs.values()):
            if measure not in reasons:
                try:
                    values[measure][n] = _array(run(ablation))
                except NotApplicableError as error:
                    reasons[measure] = str(error)
            if progress is not None:
                progress(n_prompts)
    return values, reasons


def _values(
    measured: Mapping[str, dict[str, np.ndarray]],
    extras: Mapping[str, np.ndarray],
    mid_layers: Sequence[int],
) -> np.ndarray:
    mid = list(mid_layers)
    of_runs = list(measured.values())
    by_name = {
        "sink_score": np.stack([m["sinks"][:, mid].mean((1, 2)) for m in of_runs]),
        "loss": np.stack([m["loss"] for m in of_runs]),
        "kl": np.stack([m["kl"] for m in of_runs]),
        "entropy": np.stack([m["entropy"].mean((1, 2)) for m in of_runs]),
        **extras,
    }
    return np.stack([by_name[name] for name in MEASURES], axis=-1)


def _control_array(
    names: list[str],
    seeds: tuple[int, ...],
    n_prompts: int,
    values: Mapping[tuple[str, int], dict[str, np.ndarray]],
    mid_layers: Sequence[int],
) -> np.ndarray:
    out = np.full((len(names), len(seeds), n_prompts, len(CONTROLLED)), np.nan)
    for (name, seed), m in values.items():
        columns = (m["sinks"][:, list(mid_layers)].mean((1, 2)), m["loss"], m["kl"])
        out[names.index(name), seeds.index(seed)] = np.stack(columns, -1)
    return out


def _checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    whole = isinstance(seeds, Sequence) and all(type(seed) is int for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise InvalidInputError(
            "Controls are drawn by seeds, each once",
            expected="at least one whole number",
            got=repr(seeds)[:80],
            fix="pass seeds=(0, 1, 2)",
        )
    return tuple(seeds)


def _array(values: Tensor) -> np.ndarray:
    values = values.detach().cpu()
    return (values.double() if values.is_floating_point() else values.to(torch.int64)).numpy()


def _removed(scores: np.ndarray, untouched: np.ndarray | np.floating) -> np.ndarray:
    return 1 - scores / np.where(untouched > 0, untouched, np.nan)


def _spread(values: np.ndarray) -> np.ndarray:
    return values.std(1, ddof=1) if values.shape[1] > 1 else np.full(len(values), np.nan)


def _ends(name: str, intervals: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}_low": intervals[name][:, 0], f"{name}_high": intervals[name][:, 1]}
