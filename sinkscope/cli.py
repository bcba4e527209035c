"""The `sinkscope` command."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from sinkscope import __version__
from sinkscope.display import percent
from sinkscope.errors import InvalidInputError, SinkscopeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sinkscope.circuits import Survey
    from sinkscope.prompts import TokenBatch
    from sinkscope.reproduction import Reproduction

DTYPES = ("float32", "float64", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code: 0, or 1 where sinkscope says why it can't."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except SinkscopeError as error:
        print(_visible(" ".join(f"sinkscope: {error}".split())), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sinkscope: interrupted; what was written stays", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as when piped into head; nothing is left to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sinkscope",
        description="Find, explain and test attention sinks in hooked transformer models.",
    )
    parser.add_argument("--version", action="version", version=f"sinkscope {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    reproduce = commands.add_parser(
        "reproduce",
        help="all of the paper's experiments on one model",
        description="All of the paper's experiments on one model: prints Table 1, and writes "
        "results.json, table1.csv, the arrays behind them, the figures and report.html.",
    )
    _add_model_option(reproduce)
    _add_run_options(reproduce, "sinkscope-out")
    reproduce.add_argument(
        "--survey", action="store_true", help="add what `sinkscope survey` says to report.html"
    )
    reproduce.set_defaults(run=_reproduce)

    survey = commands.add_parser(
        "survey",
        help="which circuit models use for their sinks",
        description="One row a model: its parts, where its sink is, what carries it, and a verdict "
        "in words. Prints a summary, and writes survey.json, survey.csv and survey.html.",
    )
    survey.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="'demo', a name on the Hugging Face hub, or a local directory",
    )
    survey.add_argument(
        "--bos",
        choices=("none", "prepend"),
        default="none",
        help="put the tokenizer's BOS in front of every prompt (default: none)",
    )
    _add_run_options(survey, "survey-out")
    survey.set_defaults(run=_survey)

    mitigate = commands.add_parser(
        "mitigate",
        help="what mitigations do to the sink, and what they cost the model",
        description="Mitigations beside equal-budget random controls: prints one table and a "
        "verdict, and writes mitigation.json, mitigation.csv, mitigation.html and the arrays.",
    )
    _add_model_option(mitigate)
    _add_run_options(mitigate, "mitigation-out")
    mitigate.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="random controls each (default: 3)"
    )
    mitigate.add_argument(
        "--bits", type=int, default=8, help="of the simulated quantisation (default: 8)"
    )
    mitigate.add_argument(
        "--window", type=int, help="keys in view in the windowed losses (default: half a prompt)"
    )
    mitigate.add_argument(
        "--keep-first",
        type=int,
        default=4,
        metavar="K",
        help="first keys that the second windowed loss keeps (default: 4)",
    )
    mitigate.set_defaults(run=_mitigate)

    epe = commands.add_parser(
        "epe",
        help="the effective positional encoding of a model at a glance",
        description="Massive coordinates of EPE_0 and how they line up with the query bias.",
    )
    _add_model_options(epe)
    epe.add_argument("--through-ln", action="store_true", help="put LN2 before the first MLP")
    epe.set_defaults(run=_epe)

    decompose = commands.add_parser(
        "decompose",
        help="the score terms of one query of a text",
        description="Splits the scores of one query into content, query bias, key bias and "
        "bias-bias terms (those that the model has), and checks that they add up.",
    )
    _add_model_options(decompose)
    decompose.add_argument("text", help="the text to look at")
    decompose.add_argument("--layer", type=int, help="0-based (default: the middle one)")
    decompose.add_argument("--head", type=int, help="0-based (default: the one with most sink)")
    decompose.add_argument("--query", type=int, help="position (default: the last)")
    decompose.set_defaults(run=_decompose)
    return parser


def _add_run_options(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument(
        "--prompts",
        default="demo",
        metavar="FILE|paper|demo",
        help="a .txt, .csv or .jsonl file; 'paper' for SST-2, GSM8K and HumanEval (needs the "
        "hub); 'demo' for the prompts shipped with sinkscope (default), or 'demo-...' for those "
        "of a variant of the demo model",
    )
    parser.add_argument(
        "--length", type=int, default=40, help="tokens per prompt (default: 40, the paper's)"
    )
    parser.add_argument(
        "--out", default=out, metavar="DIR", help="where to write (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="prompts per pass (default: 64)"
    )
    parser.add_argument(
        "--plotlyjs",
        choices=("inline", "cdn"),
        default="inline",
        help="pages with plotly.js in them, or small ones that link it (default: inline)",
    )
    _add_device_options(parser)


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--device", metavar="D", help="default: cpu")
    place.add_argument(
        "--device-map",
        metavar="MAP",
        help="spread a model over devices instead, as transformers does: 'auto' for all GPUs, "
        "'balanced', 'balanced_low_0' or 'sequential'",
    )
    parser.add_argument(
        "--dtype", default="float32", choices=DTYPES, metavar="T", help=", ".join(DTYPES)
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="take weights that are only there as a pickle, which can run its author's code",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that the model brings along",
    )


def _add_model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="demo",
        metavar="demo|NAME|DIR",
        help="'demo' or one of its variants ('demo-grown'), a name on the Hugging Face hub, or a "
        "local directory (default: demo)",
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    _add_model_option(parser)
    _add_device_options(parser)


# --- commands -----------------------------------------------------------------------------


def _reproduce(arguments: argparse.Namespace) -> None:
    from sinkscope.circuits import survey
    from sinkscope.model import model_view
    from sinkscope.partial import processes
    from sinkscope.prompts import load_prompts, token_batch
    from sinkscope.report import write_all
    from sinkscope.reproduction import discard_partial, reproduce
    from sinkscope.results import claimed

    out = _writable_out(arguments)
    group = processes(arguments.device_map or arguments.device or "cpu")
    with claimed(out) if group.is_main else nullcontext():
        view = model_view(_load(arguments))
        prompts = load_prompts(view, arguments.prompts).folded()
        batch = token_batch(view, prompts, length=arguments.length)
        title = f"{view.name}: {len(batch)} prompts"
        with _progress(title, shown=group.is_main) as (total, progress):
            result = reproduce(
                view,
                batch,
                prompts_source=prompts.source,
                out=out,
                batch_size=arguments.batch_size,
                total=total,
                progress=progress,
                group=group,
                keep_partial=True,
            )
        found = None
        if arguments.survey and group.is_main:
            with _progress(f"{view.name}: survey", shown=True) as (total, progress):
                found = survey(
                    view, batch, batch_size=arguments.batch_size, total=total, progress=progress
                )
        if group.is_main:
            _print_table1(result, batch)
            if found is not None:
                _print_survey(found)
            write_all(result, out, arguments.plotlyjs, found)
        discard_partial(out, group)
    if not group.is_main:
        return
    _say(f"Written to {out}: report.html, results.json, table1.csv, figures/, arrays/")


def _mitigate(arguments: argparse.Namespace) -> None:
    from sinkscope.bench import mitigation_bench
    from sinkscope.costs import require_bits, require_window
    from sinkscope.model import model_view
    from sinkscope.prompts import load_prompts, token_batch
    from sinkscope.report import MITIGATION_FORMATS, mitigation_rows, write_mitigation
    from sinkscope.reproduction import provenance
    from sinkscope.results import claimed, dump_json, write_text
    from sinkscope.verdict import mitigation_verdict

    if arguments.seeds < 1:
        raise InvalidInputError(
            "Too few controls", expected="--seeds of 1 or more", got=f"--seeds {arguments.seeds}"
        )
    require_bits(arguments.bits)
    require_window(1 if arguments.window is None else arguments.window, arguments.keep_first)
    out = _writable_out(arguments)
    with claimed(out):
        view = model_view(_load(arguments))
        prompts = load_prompts(view, arguments.prompts).folded()
        batch = token_batch(view, prompts, length=arguments.length)
        with _progress(f"{view.name}: {len(batch)} prompts", shown=True) as (total, progress):
            bench = mitigation_bench(
                view,
                batch,
                seeds=range(arguments.seeds),
                bits=arguments.bits,
                window=arguments.window,
                keep_first=arguments.keep_first,
                batch_size=arguments.batch_size,
                total=total,
                progress=progress,
            )
        ran = provenance(view, batch, prompts.source, arguments.batch_size)
        bench.save(out / "arrays")
        write_text(out / "mitigation.csv", bench.to_dataframe().to_csv(index=False))
        content = {"provenance": ran, "mitigation_bench": bench.summary()}
        write_text(out / "mitigation.json", dump_json(content))
        write_mitigation(bench, ran, out / "mitigation.html", arguments.plotlyjs)
        _print_table(
            [name.replace("_", " ") for name in MITIGATION_FORMATS], mitigation_rows(bench)
        )
        words = mitigation_verdict(bench)
        for sentence in (words.headline, *words.sentences):
            _say(sentence)
        for name, reason in (*bench.not_applicable, *bench.no_control):
            _say(f"{name}: {reason}")
        _say(f"Written to {out}: mitigation.html, mitigation.json, mitigation.csv, arrays/")


def _writable_out(arguments: argparse.Namespace) -> Path:
    """The directory to write to, with the sizes of the run checked as well."""
    from pathlib import Path

    from sinkscope.results import require_writable

    if arguments.length < 2 or arguments.batch_size < 1:
        raise InvalidInputError(
            "Unusable sizes",
            expected="--length of 2 or more and --batch-size of 1 or more",
            got=f"--length {arguments.length} --batch-size {arguments.batch_size}",
        )
    if not arguments.out.strip():
        raise InvalidInputError("--out has no name", expected="a directory", fix="name one")
    out = Path(arguments.out)
    require_writable(out)
    return out


def _survey(arguments: argparse.Namespace) -> None:
    from sinkscope.circuits import Survey, survey
    from sinkscope.model import model_view
    from sinkscope.prompts import load_prompts
    from sinkscope.report import survey_html
    from sinkscope.results import claimed, dump_json, write_text

    out = _writable_out(arguments)
    with claimed(out):
        values: list[tuple[Any, ...]] = []
        for name in arguments.models:
            view = model_view(_load(arguments, name))
            prompts = load_prompts(view, arguments.prompts).folded()
            with _progress(f"{view.name}: {len(prompts)} prompts", shown=True) as (total, progress):
                found = survey(
                    view,
                    prompts,
                    length=arguments.length,
                    bos=arguments.bos,
                    batch_size=arguments.batch_size,
                    total=total,
                    progress=progress,
                )
            _print_survey(found)
            values += found.values
            # Written as it grows, so that a model that fails takes no other's row with it.
            result = Survey(tuple(values))
            write_text(out / "survey.json", dump_json(result.summary()))
            write_text(out / "survey.csv", result.to_dataframe().to_csv(index=False))
        write_text(out / "survey.html", survey_html(result, arguments.plotlyjs))
        _say(f"Written to {out}: survey.html, survey.json, survey.csv")


def _print_survey(found: Survey) -> None:
    for row in found.rows:
        _say(f"{row.model}: {row.verdict}")
        parts = [f"query bias {row.query_bias}", f"positions {row.positions}", row.normalization]
        parts += row.other_parts
        _say(f"parts: {', '.join(parts)}; {row.starts_with_bos} of {row.n_prompts} start with BOS")
        print(
            f"sink rate {row.sink_rate_3:.1%} (alpha > .3), {row.sink_rate_8:.1%} (> .8); "
            f"commonest sink position {row.sink_position} ({row.sink_position_share:.1%})"
        )
        jump = "" if row.jump_layer is None else f", jumps in layer {row.jump_layer}"
        print(f"residual peak {row.peak:.1f}{jump}; value drain {row.value_drain:.2f}")
        shares = [["share of the sink's lead", name, percent(v)] for name, v in row.score_shares]
        left = [["left of the sink under", name, percent(v)] for name, v in row.ablations]
        _print_table(["what", "of", "value"], [*shares, *left])
        for name, reason in row.not_applicable:
            _say(f"{name}: {reason}")


def _epe(arguments: argparse.Namespace) -> None:
    import torch

    from sinkscope.epe import coordinate_alignment, extract_epe
    from sinkscope.massive import MeanStd, TopK, find_massive_coordinates
    from sinkscope.model import model_view

    view = model_view(_load(arguments))
    epe = extract_epe(view, through_ln=arguments.through_ln)
    form = "p + MLP_0(LN2_0(p))" if epe.through_ln else "p + MLP_0(p)"
    _say(f"{view.name}: EPE = {form}, {view.n_ctx} positions of {view.d_model}")
    norms = epe.vectors.norm(dim=-1)
    print(f"|EPE_0| = {float(norms[0]):.3f}, median of the others {float(norms[1:].median()):.3f}")
    massive = find_massive_coordinates(epe.vectors[0], MeanStd(3.0))
    top = find_massive_coordinates(epe.vectors[0], TopK(min(3, view.d_model)))
    print(f"massive by {massive.rule}, |v| > {massive.threshold:.3f}: {len(massive)} coordinates")
    gamma = coordinate_alignment(view).abs() if view.parts.query_bias else None
    rows = []
    for index, value in zip(top.indices.tolist(), top.values.tolist(), strict=True):
        row = [str(index), f"{value:+.3f}", "yes" if index in massive.coordinates else "no"]
        rows.append([*row, "-" if gamma is None else f"{float(gamma[..., index].mean()):.3f}"])
    _print_table(["coordinate", "EPE_0", "massive", "mean |gamma|"], rows)
    if gamma is not None:
        others = torch.ones(view.d_model, dtype=torch.bool)
        others[list(massive.coordinates)] = False
        print(f"mean |gamma| of all other coordinates: {float(gamma[..., others].mean()):.3f}")


def _decompose(arguments: argparse.Namespace) -> None:
    from sinkscope.attention import ScoreRule
    from sinkscope.measures import sink_score
    from sinkscope.model import model_view
    from sinkscope.prompts import token_batch
    from sinkscope.scores import decompose_scores

    view = model_view(_load(arguments))
    batch = token_batch(view, [arguments.text])
    n = batch.ids.shape[1]
    layer = view.n_layers // 2 if arguments.layer is None else arguments.layer
    head = arguments.head
    if head is None:
        head = int(sink_score(view, batch, layers=layer)[0, 0].argmax())
    view.heads(head)
    query = n - 1 if arguments.query is None else arguments.query
    if not 0 <= query < n:
        raise InvalidInputError("No such query", expected=f"0 to {n - 1}", got=query)
    terms = decompose_scores(view, batch, layers=layer)
    _say(f"{view.name}, layer {layer}, head {head}, query {query}; scores before the softmax")
    kept = [term[0, 0, head, query] for term in (*terms.terms.values(), terms.total)]
    rule = ScoreRule(1.0, sink_logits=None if terms.sink_logits is None else terms.sink_logits[0])
    row = terms.total[:, 0, :, query : query + 1]
    pattern = rule.pattern(row, terms.visible[:, :, query : query + 1].to(row.device))[0, head, 0]
    rows = [
        [str(key), repr(view.tokenizer.decode([int(batch.ids[0, key])]))]
        + [f"{float(term[key]):+.3f}" for term in kept]
        + [f"{float(pattern[key]):.3f}"]
        for key in range(query + 1)
        if bool(terms.visible[0, 0, query, key])
    ]
    names = [name.replace("_", " ").replace("bias bias", "bias-bias") for name in terms.terms]
    _print_table(["key", "token", *names, "sum", "attention"], rows)
    print(
        f"identities: score {terms.max_error:.1e}, pattern {terms.pattern_error:.1e} "
        f"(tolerance {terms.tolerance:.1e}); query bias is {terms.bias_kind}"
    )


# --- shared -------------------------------------------------------------------------------


def _load(arguments: argparse.Namespace, name: str | None = None) -> Any:
    from transformers.utils import logging

    from sinkscope.loading import load_model

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one for every tensor
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn of their own plans while loading
            model = arguments.model if name is None else name
            return load_model(
                model,
                device=arguments.device,
                device_map=arguments.device_map,
                dtype=arguments.dtype,
                allow_pickle=arguments.allow_pickle,
                trust_remote_code=arguments.trust_remote_code,
            )
    finally:
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _progress(
    title: str, shown: bool
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(_visible(title), total=None)
        yield (
            lambda n: bar.update(task, total=n),
            lambda n: bar.update(task, advance=n),
        )


def _print_table1(result: Reproduction, batch: TokenBatch) -> None:
    rows = []
    for row in result.table1.to_dataframe().to_dict("records"):
        cells = [
            row["corpus"],
            row["condition"],
            str(row["n"]),
            f"{row['sink_score']:.4f}",
            f"{row['stderr']:.4f}",
            percent(row["relative"]),
            f"{row['all_layers']:.4f}",
        ]
        if result.table1.beside_published:
            cells += [f"{row['published']:.4f}", f"{row['difference']:+.4f}"]
        rows.append(cells)
    header = ["corpus", "condition", "n", "sink score", "stderr", "relative", "all layers"]
    if result.table1.beside_published:
        header += ["published", "difference"]
    layers = result.table1.mid_layers
    print(f"Table 1: attention to position 0, layers {layers[0]} to {layers[-1]}")
    _print_table(header, rows)
    for name, reason in result.table1.not_applicable:
        _say(f"{name}: {reason}")
    terms = result.score_terms
    if terms is not None:
        print(
            f"Identities of the score decomposition hold to {terms.max_error:.1e} (scores) and "
            f"{terms.pattern_error:.1e} (patterns), tolerance {terms.tolerance:.1e}"
        )


def _say(text: str) -> None:
    print(_visible(text))


def _visible(text: str) -> str:
    """Text with what would steer a terminal or break a line escaped, as in a Python string."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _is_number(cell: str) -> bool:
    try:
        float(cell.removesuffix("%"))
    except ValueError:
        return cell == "-"
    return True


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table: columns padded to their widest cell, numbers to the right."""
    table = [[_visible(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[n]) for row in table) for n in range(len(header))]
    left = [n for n in range(len(header)) if not all(_is_number(row[n]) for row in rows)]
    for row in table:
        cells = [
            cell.ljust(width) if n in left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    raise SystemExit(main())
