"""Bad input ends in a SinkscopeError that says what was expected, what came, and what to do."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from models import hook, tiny_gpt2
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import sinkscope as ss
from sinkscope import errors
from sinkscope.errors import (
    EditError,
    IdentityError,
    InvalidInputError,
    NotApplicableError,
    ProcessedWeightsError,
    SinkscopeError,
)
from sinkscope.mitigations import ScaleQueryBias

PARTS = ("Expected: ", "Got: ", "To fix it: ")


@pytest.fixture(scope="module")
def model() -> Any:
    return hook(tiny_gpt2(d_vocab=257), "bridge", tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def batch(model: Any) -> ss.TokenBatch:
    return ss.token_batch(model, torch.arange(12).reshape(2, 6))


# --- the messages -------------------------------------------------------------------------


def test_a_message_has_one_pattern() -> None:
    error = SinkscopeError("It broke.", expected=3, got="four", fix="count again")
    assert str(error) == "It broke. Expected: 3. Got: four. To fix it: count again."
    assert str(SinkscopeError("It broke", got=0)) == "It broke. Got: 0."


def test_one_base_for_all() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    raised = [kind for kind in kinds if not issubclass(kind, Warning)]
    assert len(raised) > 5
    assert all(issubclass(kind, SinkscopeError) for kind in raised)
    assert issubclass(InvalidInputError, ValueError), "callers of a library expect ValueError"


OUTER = ("prompts", "loading", "results", "reproduction", "experiments/_engine")


@pytest.mark.parametrize("name", OUTER)
def test_every_error_says_expected_got_and_fix(name: str) -> None:
    tree = ast.parse((Path(ss.__file__).parent / f"{name}.py").read_text("utf-8"))
    kinds = {kind for kind in vars(errors) if kind.endswith("Error")}
    calls = [
        node.exc
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func) in kinds
    ]
    for call in calls:
        given = {keyword.arg for keyword in call.keywords}
        assert given >= {"expected", "got", "fix"}, f"line {call.lineno}"
    assert calls or name == "reproduction"


# --- bad values ---------------------------------------------------------------------------

Case = Callable[[Any, ss.TokenBatch], Any]

VALUES: dict[str, tuple[Case, str]] = {
    "no prompt": (lambda m, b: ss.token_batch(m, []), "no prompt"),
    "empty text": (lambda m, b: ss.token_batch(m, ["fine", ""]), "no token"),
    "empty row": (lambda m, b: ss.token_batch(m, [[1], []]), "none empty"),
    "empty tensor": (lambda m, b: ss.token_batch(m, torch.zeros(2, 0).long()), r"\[2, 0\]"),
    "three axes": (lambda m, b: ss.token_batch(m, torch.zeros(1, 2, 3).long()), r"\[1, 2, 3\]"),
    "float ids": (lambda m, b: ss.token_batch(m, torch.ones(1, 4)), "float32"),
    "boolean ids": (lambda m, b: ss.token_batch(m, torch.ones(1, 4).bool()), "bool"),
    "beyond n_ctx": (lambda m, b: ss.token_batch(m, ["x" * 17]), r"n_ctx=16.*Got: 17"),
    "length beyond n_ctx": (lambda m, b: ss.token_batch(m, ["x" * 99], length=17), "n_ctx=16"),
    "BOS beyond n_ctx": (lambda m, b: ss.token_batch(m, ["x" * 16], bos="prepend"), "Got: 17"),
    "too short": (lambda m, b: ss.token_batch(m, ["abcd", "ab"], length=4), "prompt 1 with 2"),
    "length of 0": (lambda m, b: ss.token_batch(m, ["ab"], length=0), "Got: 0"),
    "id too large": (lambda m, b: ss.token_batch(m, [[1, 257]]), "0 to 256. Got: 257"),
    "negative id": (lambda m, b: ss.token_batch(m, [[-1, 2]]), "Got: -1"),
    "mixed lengths": (lambda m, b: ss.token_batch(m, ["abc", "ab"]), "from 2 to 3"),
    "mask of another shape": (
        lambda m, b: ss.token_batch(m, b.ids, mask=torch.ones(2, 5)),
        r"shape \[2, 6\].*shape \[2, 5\]",
    ),
    "mask of other values": (
        lambda m, b: ss.token_batch(m, b.ids, mask=torch.full((2, 6), 2)),
        r"values \[2\]",
    ),
    "mask that hides a row": (
        lambda m, b: ss.token_batch(m, b.ids, mask=torch.tensor([[1] * 6, [0] * 6])),
        "Prompt 1 has no token",
    ),
    "mask and length": (
        lambda m, b: ss.token_batch(m, b.ids, mask=b.mask, length=3),
        "length=3",
    ),
    "mask with lists": (lambda m, b: ss.token_batch(m, [[1, 2]], mask=torch.ones(1, 2)), "list"),
    "corpora too few": (lambda m, b: ss.token_batch(m, b.ids, corpora=["a"]), "2 names"),
    "rows that are not there": (lambda m, b: b.select([5]), "0 to 1"),
    "batch size of 0": (lambda m, b: ss.sink_score(m, b, batch_size=0), "Got: 0"),
    "one token, score": (lambda m, b: ss.sink_score(m, ss.token_batch(m, "a")), "two tokens"),
    "one token, rate": (lambda m, b: ss.sink_rate(m, ss.token_batch(m, "a")), "two tokens"),
    "one token, position": (
        lambda m, b: ss.sink_position(m, ss.token_batch(m, "a")),
        "two tokens",
    ),
    "one token, all": (lambda m, b: ss.reproduce(m, ss.token_batch(m, "a")), "tokens"),
    "layer 3 of 3": (lambda m, b: ss.sink_score(m, b, layers=3), "layers from 0 to 2"),
    "layer -1": (lambda m, b: ss.patterns(m, b, layers=[0, -1]), r"Got: \[0, -1\]"),
    "no layer": (lambda m, b: ss.sink_rate(m, b, layers=[]), "at least one"),
    "layer twice": (lambda m, b: ss.decompose_scores(m, b, layers=[1, 1]), "at most once"),
    "head 3 of 3": (
        lambda m, b: ss.sink_score(m, b, ss.ablations.ZeroQueryBias(heads=3)),
        "heads from 0 to 2",
    ),
    "an ablation's layer": (
        lambda m, b: ss.sink_score(m, b, ss.ablations.SkipMLP(layers=9)),
        "layers from 0 to 2",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_bad_values(name: str, model: Any, batch: ss.TokenBatch) -> None:
    call, message = VALUES[name]
    with pytest.raises(InvalidInputError, match=message) as caught:
        call(model, batch)
    if name not in {"one token, all"}:
        assert all(part in str(caught.value) for part in PARTS), str(caught.value)


UNKNOWN: dict[str, tuple[Case, str]] = {
    "condition": (lambda m, b: ss.ablations.condition("No Bias"), "Zero Top-3 Wk.*'No Bias'"),
    "coordinate": (
        lambda m, b: ss.sink_score(m, b, ss.ablations.ZeroKeyColumns([12])),
        r"from 0 to 11.*\[12\]",
    ),
    "share of a coordinate": (lambda m, b: ss.shift_share(m, b, [0, -1]), "from 0 to 11"),
    "position": (
        lambda m, b: ss.sink_score(m, b, ss.ablations.ZeroToken(position=16)),
        "from 0 to 15",
    ),
    "fidelity": (lambda m, b: ss.epe_fidelity(m, b, through="attention"), "'attention'"),
    "convention": (lambda m, b: ss.source_agnostic_shift(m, b, "mine"), "'mine'"),
    "kind of bias": (lambda m, b: ss.query_bias(m, "folded"), "'folded'"),
    "positions": (lambda m, b: ss.epe_bias_alignment(m, n_positions=17), "from 1 to 16"),
    "threshold": (lambda m, b: ss.sink_rate(m, b, eps=1.5), "Got: 1.5"),
    "rule": (lambda m, b: ss.find_massive_coordinates(torch.ones(3), ss.TopK(4)), "1 to 3"),
    "vector": (lambda m, b: ss.find_massive_coordinates(torch.tensor([1.0, float("nan")])), "NaN"),
    "site": (lambda m, b: ss.Site("query"), "'query'"),
    "hook": (
        lambda m, b: ss.sink_score(
            m, b, ss.ablations.Ablation.from_hook("no.such", lambda tensor, hook: tensor)
        ),
        "no.such",
    ),
}


@pytest.mark.parametrize("lacking", ["cfg", "blocks", "hook_dict", "embed"])
def test_what_lacks_one_part_of_a_hooked_model_is_none(lacking: str) -> None:
    there = {"cfg", "blocks", "hook_dict", "embed"} - {lacking}
    with pytest.raises(InvalidInputError, match=r"not a hooked model.*Got: SimpleNamespace"):
        ss.model_view(SimpleNamespace(**dict.fromkeys(there, 1)))


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names_and_numbers(name: str, model: Any, batch: ss.TokenBatch) -> None:
    call, message = UNKNOWN[name]
    with pytest.raises(InvalidInputError, match=message) as caught:
        call(model, batch)
    assert all(part in str(caught.value) for part in PARTS), str(caught.value)


def test_a_prompt_without_the_position_that_is_asked_for(model: Any) -> None:
    batch = ss.token_batch(model, [[1, 2, 3]])
    with pytest.raises(SinkscopeError, match=r"no position 5.*Expected: .*Got: 3.*To fix it: "):
        ss.patterns(model, batch, ss.ablations.ZeroToken(position=5))


# --- models that lack a part --------------------------------------------------------------

SIZES = {
    "vocab_size": 50,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 16,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=3, **SIZES))


def neox() -> PreTrainedModel:
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


NEEDS_BIAS: dict[str, Case] = {
    "shift": ss.source_agnostic_shift,
    "terms": lambda m, b: ss.decompose_scores(m, b).query_bias,
    "gamma": lambda m, b: ss.coordinate_alignment(m),
    "bias": lambda m, b: ss.query_bias(m),
    "ablation": lambda m, b: ss.sink_score(m, b, ss.ablations.ZeroQueryBias()),
    "delta": ss.experiments.delta.run,
}
NEEDS_POSITIONS: dict[str, Case] = {
    "epe": lambda m, b: ss.extract_epe(m),
    "fidelity": ss.epe_fidelity,
    "replace": lambda m, b: ss.sink_score(m, b, ss.ablations.ReplacePosition()),
    "swap": lambda m, b: ss.sink_score(m, b, ss.ablations.SwapEPE()),
    "no positions": lambda m, b: ss.sink_score(m, b, ss.ablations.ZeroPositions()),
    "massive": ss.experiments.massive_activations.run,
}


@pytest.fixture(scope="module", params=[llama, neox])
def other(request: pytest.FixtureRequest) -> Any:
    return ss.load_model(request.param().double().eval())


def refused(call: Case, model: Any, part: str) -> None:
    batch = ss.token_batch(model, torch.arange(12).reshape(2, 6))
    with pytest.raises(NotApplicableError, match=f"Not applicable: .*{part}") as caught:
        call(model, batch)
    assert all(words in str(caught.value) for words in PARTS), str(caught.value)


@pytest.mark.parametrize("name", NEEDS_BIAS)
def test_no_query_bias_is_not_applicable(name: str) -> None:
    refused(NEEDS_BIAS[name], ss.load_model(llama().eval()), "query.bias")


@pytest.mark.parametrize("name", NEEDS_POSITIONS)
def test_no_learned_positions_is_not_applicable(name: str, other: Any) -> None:
    refused(NEEDS_POSITIONS[name], other, "position embeddings")


def test_what_needs_neither_runs(other: Any) -> None:
    batch = ss.token_batch(other, torch.arange(12).reshape(2, 6))
    assert ss.sink_score(other, batch).shape == (2, 2, 3)
    pattern = ss.patterns(other, batch)
    torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]))


# --- folded weights -----------------------------------------------------------------------

NEEDS_RAW: dict[str, Case] = {
    "epe": lambda m, b: ss.extract_epe(m),
    "gamma": lambda m, b: ss.coordinate_alignment(m),
    "bias": lambda m, b: ss.query_bias(m),
    "alignment": lambda m, b: ss.epe_bias_alignment(m, n_positions=4),
    "fidelity": ss.epe_fidelity,
    "shift": ss.source_agnostic_shift,
    "swap": lambda m, b: ss.sink_score(m, b, ss.ablations.SwapEPE()),
    "all": ss.reproduce,
}


@pytest.mark.parametrize("name", NEEDS_RAW)
def test_folded_weights_are_refused_with_a_way_out(name: str, kind: str) -> None:
    folded = hook(tiny_gpt2(), kind, fold_ln=True, center_writing_weights=True)
    batch = ss.token_batch(folded, torch.arange(12).reshape(2, 6))
    with pytest.raises(ProcessedWeightsError, match="folded") as caught:
        NEEDS_RAW[name](folded, batch)
    message = str(caught.value)
    assert all(part in message for part in PARTS)
    assert "load_model" in message


@pytest.mark.parametrize(("factor", "word"), [(0.0, "Zeroing"), (0.5, "Scaling")])
def test_what_is_done_to_the_bias_is_named(factor: float, word: str, kind: str) -> None:
    folded = hook(tiny_gpt2(), kind, fold_ln=True)
    batch = ss.token_batch(folded, torch.arange(12).reshape(2, 6))
    with pytest.raises(ProcessedWeightsError, match=f"{word} the query bias"):
        ss.sink_score(folded, batch, ScaleQueryBias(factor))


# --- wrong types, without the checks that the tests switch on ------------------------------

WRONG_TYPES = """
ss.load_model(3)
ss.load_model(None)
ss.load_model(["demo"])
ss.load_model("demo", dtype=3)
ss.load_model("demo", dtype=None)
ss.load_model("demo", device=2.5)
ss.load_model("demo", device=[])
ss.load_model("demo", tokenizer=3)
ss.model_view(3)
ss.model_view(None)
ss.model_view("demo")
ss.token_batch(3, ids)
ss.token_batch("demo", ids)
ss.token_batch(model, None)
ss.token_batch(model, 3)
ss.token_batch(model, {"a": 1})
ss.token_batch(model, ["text", 3])
ss.token_batch(model, [3, "text"])
ss.token_batch(model, [[1, 2], "text"])
ss.token_batch(model, [[1, "text"]])
ss.token_batch(model, [[1.5, 2.0]])
ss.token_batch(model, [True, False])
ss.token_batch(model, [None])
ss.token_batch(model, [[[1]]])
ss.token_batch(model, "no tokenizer")
ss.token_batch(model, ids, length="4")
ss.token_batch(model, ids, length=2.5)
ss.token_batch(model, ids, bos=True)
ss.token_batch(model, ids, padding=3)
ss.token_batch(model, ids, padding=None)
ss.token_batch(model, ids, mask=[[1] * 6] * 2)
ss.token_batch(model, ids, corpora="ab")
ss.token_batch(model, ids, corpora=3)
ss.token_batch(model, ids, corpora=[1, 2])
ss.load_prompts(model, None)
ss.load_prompts(model, 3)
ss.load_prompts(model, ["a text"])
batch.select("x")
batch.select(3)
batch.select([1.5])
ss.sink_score("demo", batch)
ss.sink_score(3, batch)
ss.sink_score(model, batch, layers="x")
ss.sink_score(model, batch, layers=1.5)
ss.sink_score(model, batch, layers=[None])
ss.sink_score(model, batch, layers=object())
ss.sink_score(model, batch, "No Query Bias")
ss.sink_score(model, batch, [ss.ablations.ZeroQueryBias()])
ss.sink_score(model, batch, batch_size="3")
ss.sink_score(model, batch, batch_size=2.5)
ss.sink_score(model, "text")
ss.sink_score(model, None)
ss.sink_score(model, ids)
ss.sink_score(model, batch, layers=[1.5])
ss.sink_score(model, batch, layers="1")
ss.sink_rate(model, batch, eps="a")
ss.decompose_scores(model, ids)
ss.epe_fidelity(model, batch, through=["mlp"])
ss.epe_bias_alignment(model, n_positions="4")
ss.epe_bias_alignment(model, n_positions=2.5)
ss.shift_share(model, batch, "x")
ss.shift_share(model, batch, None)
ss.find_massive_coordinates("x")
ss.find_massive_coordinates([1.0, 2.0])
ss.find_massive_coordinates(None)
ss.find_massive_coordinates(torch.ones(3), ss.TopK("2"))
ss.find_massive_coordinates(torch.ones(3), ss.TopK(1.5))
ss.find_massive_coordinates(torch.ones(3), ss.MeanStd("3"))
ss.find_massive_coordinates(torch.ones(3), ss.MedianRatio("100"))
ss.sink_score(model, batch, ss.ablations.ZeroKeyColumns("x"))
ss.sink_score(model, batch, ss.ablations.ZeroKeyColumns(None))
ss.sink_score(model, batch, ss.ablations.ZeroRandomKeyColumns(n="3"))
ss.sink_score(model, batch, ss.ablations.ZeroRandomKeyColumns(seed=[]))
ss.sink_score(model, batch, ss.ablations.ZeroQueryBias(positions="x"))
ss.sink_score(model, batch, ss.ablations.ZeroQueryBias(positions=[1.5]))
ss.sink_score(model, batch, ss.ablations.ZeroToken(None))
ss.sink_score(model, batch, ss.ablations.ReplacePosition("a", "b"))
ss.ablations.ZeroQueryBias().fwd_hooks(model, "x")
ss.Site("q", "x")
ss.Site([])
ss.ablations.condition(3)
ss.ablations.condition([])
ss.ablations.Ablation.from_hook("hook_embed", 3)
ss.ablations.Ablation.from_hook("hook_embed", lambda tensor: tensor)
ss.ablations.Ablation.from_hook("hook_embed", lambda tensor, point: tensor)
ss.ablations.Ablation.from_hook("hook_embed", torch.nn.Identity())
ss.ablations.Ablation.from_hook("hook_embed", torch.relu)
ss.sink_score(model, batch, ss.ablations.ZeroQueryBias(layers="x"))
ss.sink_score(model, batch, ss.ablations.ZeroQueryBias(heads="x"))
ss.find_massive_coordinates(torch.ones(3), 3)
ss.Site(3)
ss.experiments.table1.run(model, "x")
ss.experiments.table1.run(model, batch, {"x": 3})
ss.experiments.table1.run(model, batch, ["Baseline"])
ss.experiments.attention_maps.run(model, 3)
ss.experiments.attention_maps.run(model, batch, layers="x")
ss.experiments.delta.run(model, None)
ss.experiments.delta.run(model, ids)
ss.experiments.delta.run(model, batch, 3)
ss.experiments.epe_fidelity.run(model, 3)
ss.experiments.coordinate_alignment.run(model, batch, 3)
ss.experiments.epe_bias_alignment.run(model, "x")
ss.experiments.massive_activations.run(model, batch, 3)
ss.experiments.massive_activations.run(model, batch, [3])
ss.experiments.score_terms.run(model, "x")
ss.reproduce(3, batch)
ss.reproduce(model, "x")
ss.reproduce(model, None)
ss.reproduce(model, batch, out=3)
ss.reproduce(model, batch, batch_size="x")
ss.experiments.table1.Table1.load(3)
ss.experiments.table1.run(model, batch).save(3)
ss.sink_score(model, batch, mi.SetActivations(layer=[0, 1]))
mi.SetActivations.to_mean(model, batch, layer=[0, 1])
mi.SetActivations.to_mean(model, batch, position=None)
ss.sink_score(model, batch, mi.ClampActivations(1.0, layer=None))
ss.sink_score(model, batch, mi.SwitchOffHeads(None))
ss.sink_score(model, batch, mi.SwitchOffHeads(3))
ss.sink_score(model, batch, mi.SwitchOffHeads((("0", "0"),)))
ss.sink_score(model, batch, mi.ShuffledQueryBias(seed="a"))
ss.sink_score(model, batch, mi.ShuffledQueryBias(seed=2**80))
ss.sink_score(model, batch, mi.SinkLogit(10**400))
ss.sink_score(model, batch, mi.SinkLogit("a"))
ss.sink_score(model, batch, mi.SinkLogit(["a", "b", "c"]))
ss.sink_score(model, batch, mi.SetActivations(values={}))
ss.sink_score(model, batch, mi.CalibrateAttention(alpha=-3.0))
ss.equal_budget_control(model, 3, 0)
ss.equal_budget_control(model, None, 0)
ss.equal_budget_control(model, ss.ablations.ZeroToken(), 0, n_positions="x")
ss.equal_budget_control(model, ss.ablations.ZeroToken(), 0, n_positions=99)
ss.mitigation_bench(model, batch, {3: ss.ablations.ZeroQueryBias()})
ss.mitigation_bench(model, batch, seeds=[[0]])
ss.mitigation_bench(model, batch, {})
ss.head_sweep(model, batch, ss.ablations.ZeroQueryBias)
mitigation_verdict(3)
ss.plots.survey_map(ss.Survey(()))
ss.survey([], batch)
ss.survey(model, batch, progress=3)
ss.survey(model, batch, total=3)
ss.reproduce(model, batch, progress=3)
ss.reproduce(model, batch, progress=True)
ss.reproduce(model, batch, total="x")
ss.mitigation_bench(model, batch, progress=3)
ss.mitigation_bench(model, batch, total=True)
ss.head_sweep(model, batch, progress=False)
ss.experiments.table1.run(model, batch, progress=3)
ss.experiments.delta.run(model, batch, progress="x")
ss.experiments.epe_fidelity.run(model, batch, progress=3)
ss.experiments.score_terms.run(model, batch, progress=3)
ss.experiments.attention_maps.run(model, batch, progress=3)
"""

PROGRAM = """
import json, sys, warnings
import torch
import sinkscope as ss
from models import tiny_gpt2
from sinkscope import mitigations as mi
from sinkscope.verdict import mitigation_verdict

warnings.simplefilter("ignore")
torch.set_num_threads(1)
model = ss.load_model(tiny_gpt2())
ids = torch.arange(12).reshape(2, 6)
batch = ss.token_batch(model, ids)
outcome = {}
for line in json.load(sys.stdin):
    try:
        eval(line)
    except ss.SinkscopeError as error:
        outcome[line] = "" if "Expected: " in str(error) and "Got: " in str(error) else str(error)
    except BaseException as error:
        outcome[line] = repr(error)
    else:
        outcome[line] = "no error"
print(json.dumps(outcome))
"""


def test_wrong_types_end_in_our_own_errors() -> None:
    lines = WRONG_TYPES.strip().splitlines()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), str(Path(ss.__file__).parents[1])]
            ),
        },
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert list(outcome) == lines
    assert {line: result for line, result in outcome.items() if result} == {}


EDITS_THAT_DO_NOT_FIT = [
    lambda x, hook: 5,
    lambda x, hook: x[:1],
    lambda x, hook: x.half(),
]


@pytest.mark.parametrize("fn", EDITS_THAT_DO_NOT_FIT)
def test_a_hook_that_gives_back_what_does_not_fit(kind: str, fn: Any) -> None:
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, [[1, 2, 3], [4, 5, 6]])
    edit = ss.Ablation.from_hook(ss.Site("resid_post", 0), fn)
    with pytest.raises(EditError, match=r"resid_post of layer 0.*To fix it"):
        ss.patterns(model, batch, edit)


def test_a_rule_that_finds_nothing_and_a_rule_that_is_a_class(kind: str) -> None:
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, [[1, 2, 3]])
    with pytest.raises(EditError, match="finds no coordinate in EPE_0"):
        ss.sink_score(model, batch, ss.ablations.ZeroKeyColumns(ss.MeanStd(1e9)))
    with pytest.raises(InvalidInputError, match="This is not a rule"):
        unwrap(ss.find_massive_coordinates)(torch.ones(3), ss.TopK)
    with pytest.raises(InvalidInputError, match="k from 1 to 3"):
        ss.find_massive_coordinates(torch.ones(3), ss.TopK(True))


def test_a_batch_is_never_empty(kind: str) -> None:
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, [[1, 2, 3]])
    with pytest.raises(InvalidInputError, match="at least one prompt"):
        batch.select([])


@pytest.mark.parametrize("factor", [5.0, -1.0])
def test_attention_that_is_no_share_is_refused(kind: str, factor: float) -> None:
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, [[1, 2, 3]])
    edit = ss.Ablation.from_hook(ss.Site("pattern", 1), lambda p, hook: factor * p)
    with pytest.raises(IdentityError, match="In layer 1 the attention of a query is no share"):
        ss.sink_score(model, batch, edit, layers=[1])
