"""The documentation site: it builds without a warning, its links lead somewhere, its maths is set.

The build checks the links itself (docs/site/hooks.py), as `make docs` does.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("material", reason="needs mkdocs-material")

ROOT = Path(__file__).parents[2]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


maths = module("maths")


def equations() -> list[str]:
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs/algorithm.md").read_text(), flags=re.M | re.S)
    return re.findall(r"(?<=\n\n)(?: {4}.*\n)+", text)


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.site
def test_it_builds_and_leaves_no_script_unset(site: Path) -> None:
    for name in ("algorithm", "using", "api/optimizers", "api/paper"):
        html = (site / f"{name}.html").read_text(encoding="utf-8")
        shown = re.sub(r"<(pre|code|script|nav|title)\b.*?</\1>", "", html, flags=re.S)
        assert re.findall(r".{20}[_^]\{.{20}", shown) == []
        assert "<sub>" in shown


@pytest.mark.site
def test_broken_links_stop_the_build(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "docs", copy / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "src").symlink_to(ROOT / "src")
    for name in ("mkdocs.yml", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, copy)
    wrong = {
        "README.md": ["docs/nothing.md", "docs/auto.md#nowhere", "nothing.png"],
        "CHANGELOG.md": ["docs/nothing_here.md", "docs/memory.md#not-here"],
        "docs/auto.md": ["../src/nothing.py", "memory.md#nowhere", "results/nothing.md"],
    }
    for name, addresses in wrong.items():
        with (copy / name).open("a", encoding="utf-8") as file:
            file.writelines(f"\n[link]({address})\n" for address in addresses)
    text = (copy / "pyproject.toml").read_text(encoding="utf-8")
    address = '[project.urls]\nRepository = "https://example.com/us/cubegrad"'
    (copy / "pyproject.toml").write_text(text.replace("[project.urls]", address), encoding="utf-8")

    done = build(copy, tmp_path / "site")
    assert done.returncode != 0
    for expected in [
        "README.md links to docs/nothing.md, which is not in the repository",
        "README.md: <a> auto.html#nowhere: no such heading",
        "README.md links to nothing.png, which",
        "CHANGELOG.md links to docs/nothing_here.md, which",
        "does not contain an anchor '#not-here'",
        "docs/auto.md links to ../src/nothing.py, which",
        "'memory.md#nowhere'",
        "docs/auto.md links to results/nothing.md, which",
    ]:
        assert expected in done.stderr
    html = (tmp_path / "site" / "algorithm.html").read_text(encoding="utf-8")
    assert '"https://example.com/us/cubegrad/blob/main/src/cubegrad/rule.py"' in html


def test_no_letter_of_an_equation_is_lost():
    assert len(equations()) >= 10
    for block in equations():
        markup = maths.displayed(block).replace("<mn>3</mn></mroot>", "</mroot>")
        shown = "".join(ElementTree.fromstring(markup).itertext())
        shown = shown.replace("′", "'")
        source = block.translate(str.maketrans("²³-", "23−"))
        assert re.findall(r"\w|[=+−≤,']", shown) == re.findall(r"[^\W_]|[=+−≤,']", source)


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("x_{k+1} and k^{3/2}", "x<sub>k+1</sub> and k<sup>3/2</sup>"),
        ("f(x_*) and x_*", "f(x<sub>*</sub>) and x<sub>*</sub>"),
        ("test_auto_robust.py, grad_sum", "test_auto_robust.py, grad_sum"),
        ("`x_0` and a_long_name", "<code>x_0</code> and a_long_name"),
        ("A C of k\n\n    x = y", "A C of <i>k</i>"),
        ("s.e. of D-Adaptation's g²\n\n    x = y", "s.e. of D-Adaptation's <i>g</i>²"),
    ],
)
def test_maths_in_the_text(text, html):
    markdown = pytest.importorskip("markdown")
    shown = markdown.markdown(text, extensions=[maths.Maths()])
    assert shown.split("\n")[0] == f"<p>{html}</p>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


@pytest.mark.browser
def test_it_works_from_the_disk_without_a_network(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in ("index", "algorithm", "memory", "performance", "results/peers/index", "api/paper"):
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_selector(".md-typeset h1")
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, f"{name} is wider than a phone by {wider} pixels"
    assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    page.click("label[for=__search]")
    page.type(".md-search__input", "stochastic rounding")
    page.wait_for_selector(".md-search-result__item a")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
