"""The report says what the run says, escapes what it is given, and draws in a browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
from collections.abc import Iterator
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest

import sinkscope as ss
from sinkscope import report
from sinkscope.errors import InvalidInputError
from sinkscope.plots import READING
from sinkscope.reproduction import Reproduction
from sinkscope.verdict import verdict

HOSTILE = "<script>document.title = 'taken';</script><img src=x onerror=alert(1)> & </script>"
N_PROMPTS = 6
REPORTED = set(READING) - {"mitigation_tradeoff", "dose_response", "head_sweep_map", "survey_map"}
"""The figures of a reproduction; the others are those of benches and surveys."""


@pytest.fixture(scope="module")
def run() -> Reproduction:
    """A small run on the demo model; its first prompt and its model's name are hostile."""
    model = ss.load_model("demo")
    texts = [HOSTILE * 2, *ss.load_prompts(model, "demo").texts[: N_PROMPTS - 1]]
    batch = ss.token_batch(model, texts, length=24)
    result = ss.reproduce(model, batch, prompts_source=HOSTILE)
    return dataclasses.replace(result, provenance={**result.provenance, "model": HOSTILE})


@pytest.fixture(scope="module")
def page(run: Reproduction) -> str:
    return report.report_html(run)


def outside_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_it_holds_the_verdict_the_table_and_every_figure(run: Reproduction, page: str) -> None:
    text = html.unescape(outside_scripts(page))
    words = verdict(run.table1)
    for sentence in (words.headline, *words.sentences):
        assert sentence in text
    for row in run.table1.to_dataframe().itertuples():
        assert f"<td>{row.sink_score:.4f}</td>" in page
    figures = report.figures(run)
    assert set(figures) == REPORTED
    for name in figures:
        assert READING[name] in text
        assert f'id="figure-{name}"' in page
    assert f"{run.score_terms.max_error:.2e}" in text
    assert run.provenance["weights_sha256"] in text


def test_figure_data_come_back_as_they_were(run: Reproduction, page: str) -> None:
    data = re.search(r'id="data-table1_bars">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    figure = report.figures(run)["table1_bars"]
    assert json.loads(data[1]) == json.loads(figure.to_json())


def test_untrusted_text_stays_text(page: str) -> None:
    assert "<script>document.title" not in page
    assert "<img src=x" not in page
    assert html.escape(HOSTILE, quote=True) in page


def test_it_repeats_with_a_command_that_a_shell_takes_as_words(
    run: Reproduction, page: str
) -> None:
    import shlex

    command = html.unescape(re.search(r"<pre>(.*?)</pre>", page, re.DOTALL)[1])  # type: ignore[index]
    words = shlex.split(command)
    assert words[:3] == ["sinkscope", "reproduce", "--model"]
    assert words[words.index("--prompts") + 1] == run.provenance["prompts"]


def test_size_and_source_of_plotly(run: Reproduction, page: str) -> None:
    assert len(page) < 12e6
    assert "<script src=" not in page
    small = report.report_html(run, plotlyjs="cdn")
    assert len(small) < len(page) - 3e6
    assert '<script src="https://cdn.plot.ly/plotly-' in small
    with pytest.raises(InvalidInputError, match="'inline' or 'cdn'"):
        unwrap(report.report_html)(run, "elsewhere")  # past the tests' own check of types


def test_figures_as_pages_share_one_plotly(run: Reproduction, tmp_path: Path) -> None:
    report.write_figures(report.figures(run), tmp_path)
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert pages == REPORTED
    assert (tmp_path / "plotly.min.js").stat().st_size > 1e6
    for path in tmp_path.glob("*.html"):
        assert path.stat().st_size < 2e6


def test_results_that_a_model_lacks_are_left_out_with_the_reason(run: Reproduction) -> None:
    without = dataclasses.replace(
        run, delta=None, score_terms=None, not_applicable={"delta": "no <b>query bias"}
    )
    assert "delta_ribbon" not in report.figures(without)
    page = report.report_html(without)
    assert "no &lt;b&gt;query bias" in page
    assert "scores were not decomposed" in page


# --- in a browser -------------------------------------------------------------------------

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --window-size=1100,900 "
    "--disable-background-networking --disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium with its driver on this machine")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options, selenium.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def wait_until(browser: Any, condition: str, seconds: int = 60) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, seconds).until(lambda b: b.execute_script(f"return {condition}"))


def test_it_draws_in_a_browser(browser: Any, page: str, tmp_path: Path) -> None:
    """Lazily, every figure, without errors; and a prompt's script does not run."""
    path = tmp_path / "report.html"
    path.write_text(page, "utf-8")
    browser.get(path.as_uri())
    drawn = "document.querySelectorAll('.figure .main-svg').length"
    wait_until(browser, "document.readyState == 'complete'")
    names = [e.get_attribute("data-name") for e in browser.find_elements("css selector", ".figure")]
    assert set(names) == REPORTED
    lazily = browser.execute_script(
        "return document.querySelectorAll('.figure[data-drawn]').length"
    )
    assert lazily < len(names)
    for name in names:
        browser.execute_script(f"document.getElementById('figure-{name}').scrollIntoView()")
        wait_until(browser, f"document.querySelector('#figure-{name} .main-svg') !== null")
    assert browser.execute_script(f"return {drawn}") >= len(names)
    assert browser.title.startswith("Attention sinks in <script>")
    messages = [m for m in browser.get_log("browser") if m["level"] in ("SEVERE", "WARNING")]
    assert messages == []


def test_the_layer_and_head_menus_change_the_maps(browser: Any, page: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page, "utf-8")
    browser.get(path.as_uri())
    figure = "document.getElementById('figure-attention_maps')"
    browser.execute_script(f"{figure}.scrollIntoView()")
    wait_until(browser, f"{figure}.querySelector('.main-svg') !== null")
    shown = (
        f"JSON.stringify({figure}._fullData.filter(t => t.visible === true && t.opacity > 0)"
        ".map(t => Array.from(t.z, row => Array.from(row))))"
    )
    for menu in range(2):
        before = browser.execute_script(f"return {shown}")
        header = browser.find_elements("css selector", "#figure-attention_maps .updatemenu-header")[
            menu
        ]
        click(browser, header)
        buttons = browser.find_elements(
            "css selector", "#figure-attention_maps .updatemenu-dropdown-button"
        )
        active = browser.execute_script(f"return {figure}._fullLayout.updatemenus[{menu}].active")
        click(browser, buttons[0 if active else 1])
        wait_until(browser, f"{shown} !== arguments[0]".replace("arguments[0]", json.dumps(before)))


def click(browser: Any, element: Any) -> None:
    from selenium.webdriver import ActionChains

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    ActionChains(browser).move_to_element(element).click().perform()
