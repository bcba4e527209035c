"""What the documentation shows runs, what it says is checked, and what it links to is there.

In a page, every ```python block and every hidden `<!--check ... -->` block runs, in order, in one
namespace. A block that can't run here is fenced as ```py and says so in its first line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import sinkscope as ss
from sinkscope.plots import READING

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
RUNS = re.compile(r"^```python\n(.*?)^```$|^<!--check\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$|^<!--.*?^-->$", re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def prose_of(page: str) -> str:
    return FENCED.sub("", text_of(page))


def anchors_of(page: str) -> set[str]:
    """The anchors that mkdocs gives to a page's own headings."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


def pages_of(nav: list[object]) -> list[str]:
    found: list[str] = []
    for entry in nav:
        (value,) = entry.values() if isinstance(entry, dict) else (entry,)
        found += pages_of(value) if isinstance(value, list) else [str(value)]
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if RUNS.search(text_of(page))])
def test_page_runs(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace: dict[str, object] = {"__name__": "__main__"}
    text = text_of(page)
    for match in RUNS.finditer(text):
        line = text[: match.start()].count("\n") + 1
        block = "\n" * line + (match[1] or match[2])
        exec(compile(block, f"docs/{page}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_of_known_kinds_and_what_cannot_run_says_so(page: str) -> None:
    fences = re.findall(r"^```(\S*)\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)
    assert {language for language, _ in fences} <= {"python", "py", "bash", "text"}
    for language, block in fences:
        if language == "py":
            assert block.startswith("# Not run here: "), block
            compile(block, page, "exec")
    assert text_of(page).count("<!--") == len(
        re.findall(r"^<!--check\n.*?^-->$", text_of(page), re.DOTALL | re.MULTILINE)
    )


def test_nav_lists_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert sorted(pages_of(config["nav"])) == PAGES
    assert config["theme"]["font"] is False


@pytest.mark.parametrize("page", PAGES)
def test_internal_links_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (DOCS / page).parent / path if path else DOCS / page
        assert linked.is_file(), f"{page} links to {target}"
        if anchor:
            other = linked.resolve().relative_to(DOCS).as_posix()
            assert anchor in anchors_of(other), f"{page} links to {target}"


def test_every_public_name_is_in_the_reference() -> None:
    reference = "\n".join(text_of(page) for page in PAGES if page.startswith("reference/"))
    words = set(re.findall(r"\w+", reference))
    assert set(ss.__all__) <= words
    for name in (*ss.ablations.__all__, *ss.experiments.EXPERIMENTS, *READING):
        assert name in words


def test_reference_entries_exist() -> None:
    import importlib

    for page in PAGES:
        for path in re.findall(r"^::: (\S+)$", text_of(page), flags=re.MULTILINE):
            module, _, name = path.rpartition(".")
            if path.count(".") == 1:
                importlib.import_module(path)
            else:
                assert hasattr(importlib.import_module(module), name), path
        listed = re.search(r"^::: (\S+)\n    options:(?:\n      .*)*", text_of(page), re.MULTILINE)
        for member in re.findall(r"^        - (\w+)$", listed[0] if listed else "", re.MULTILINE):
            assert hasattr(importlib.import_module(listed[1]), member), member


def test_figures_are_read_as_the_library_says() -> None:
    prose = " ".join(text_of("figures.md").split())
    for name, reading in READING.items():
        assert f"## {name}" in text_of("figures.md")
        assert reading in prose, name


def test_every_error_is_explained() -> None:
    from sinkscope import errors

    raised = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, (errors.SinkscopeError, UserWarning))
    ]
    page = text_of("reference/errors.md")
    assert len(raised) > 5
    assert all(f"- {name}\n" in page for name in raised)
