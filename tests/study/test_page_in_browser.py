"""The report's page in a real browser: Debian's Chromium or another, where there is one."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_records import CIFAR10_RECORDS, MACHINE, cifar10_record

from cubegrad.study import page, report
from cubegrad.study.records import Record, Settings

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
NASTY = "<img src=x onerror=alert(1)></script><script>alert(1)</script>\"'&"
LONG = [
    cifar10_record(method, lr, seed, 90 + lr + seed, schedule)
    for method in ("madgrad-auto-compact", "schedulefree-adamw", "unweighted-denominator", "adam")
    for schedule in ("flat", "tenthing:60%-85%")
    for lr, seed in ((0.1, 0), (0.25, 0), (0.25, 1), (0.25, 2))
]


def html_of(records: list[Record], commands: list[str] | None = None) -> str:
    """The page without the plots, which take longer than the page."""
    grouped = report.experiments(records)
    sections = [
        page.section(one, report.table(one, edges=False), f"e{i}") for i, one in enumerate(grouped)
    ]
    return page.page([one.name for one in grouped], sections, commands or [])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


class Tab:
    """A page opened from a file, with everything that went wrong in it."""

    def __init__(self, browser: Any, path: Path, html: str, width: int, **options: Any) -> None:
        path.write_text(html, encoding="utf-8", errors="backslashreplace")
        self.page = browser.new_page(viewport={"width": width, "height": 800}, **options)
        self.faults: list[str] = []
        self.loaded: list[str] = []
        self.page.on("console", lambda message: self.faults.append(message.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: self.faults.append(dialog.message))
        self.page.on("request", lambda request: self.loaded.append(request.url))
        self.page.goto(path.as_uri())

    def overflow(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def curves(self, chart: int) -> list[str]:
        return list(self.page.locator(".plot").nth(chart).locator(".curve").evaluate_all(
            "curves => curves.map((curve) => curve.dataset.id)"
        ))  # fmt: skip


Opened = Callable[..., Tab]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    tabs: list[Tab] = []

    def open_tab(html: str, width: int, **options: Any) -> Tab:
        tabs.append(Tab(browser, tmp_path / "a.html", html, width, **options))
        return tabs[-1]

    yield open_tab
    for tab in tabs:
        tab.page.close()


@pytest.mark.parametrize("width", [320, 390, 1100, 1280])
@pytest.mark.parametrize("records", [CIFAR10_RECORDS, [*CIFAR10_RECORDS, *LONG]])
def test_it_loads_from_a_file_and_nothing_is_cut(
    records: list[Record], width: int, opened: Opened
) -> None:
    command = f"cubegrad compare cifar10 --out {'a/very/long/name' * 20}"
    tab = opened(html_of(records, [command]), width)
    for fold in tab.page.locator("summary").all():
        fold.click()
    assert tab.overflow() == 0
    assert tab.page.locator("pre").inner_text() == command
    for cell in tab.page.locator("tbody td:visible, pre").all():  # a card has no cells of "–"
        box = cell.bounding_box()
        assert box is not None
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
    assert tab.loaded == [tab.page.url]
    assert tab.faults == []


def test_dark_mode_is_dark(opened: Opened) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    html = html_of(CIFAR10_RECORDS)
    light = opened(html, 390, color_scheme="light")
    dark = opened(html, 390, color_scheme="dark")
    assert light.page.evaluate(ground) == "rgb(255, 255, 255)"
    assert dark.page.evaluate(ground) == "rgb(20, 24, 29)"


def test_a_button_switches_a_method_in_every_chart_and_the_axis_follows(opened: Opened) -> None:
    tab = opened(html_of(CIFAR10_RECORDS), 1280)
    both, ticks = ["madgrad@flat", "sgd@flat"], tab.page.locator(".plot").first.locator("text")
    assert [tab.curves(chart) for chart in range(3)] == [both, both, both]
    before = ticks.all_text_contents()
    sgd = tab.page.get_by_role("button", name="SGD")
    sgd.click()
    assert sgd.get_attribute("aria-pressed") == "false"
    assert [tab.curves(chart) for chart in range(3)] == [["madgrad@flat"]] * 3
    assert ticks.all_text_contents() != before
    tab.page.get_by_role("button", name="MADGRAD").click()  # nothing is left to draw
    assert [tab.curves(chart) for chart in range(3)] == [[], [], []]
    tab.page.get_by_role("button", name="show all").click()
    assert [tab.curves(chart) for chart in range(3)] == [both, both, both]
    assert ticks.all_text_contents() == before
    assert tab.faults == []


def test_hovering_and_arrow_keys_show_values(opened: Opened) -> None:
    tab = opened(html_of(CIFAR10_RECORDS), 390)
    plot = tab.page.locator(".plot").first
    tip = plot.locator(".tip")
    assert not tip.is_visible()
    chart = plot.locator("> svg")
    box = chart.bounding_box()
    assert box is not None
    chart.hover(position={"x": box["width"] - 15, "y": 100})
    assert tip.inner_text().split("\n") == ["epoch 3", "MADGRAD", "93.50", "SGD", "91.0 ± 2.0"]
    inside = tip.bounding_box()
    assert inside is not None
    assert inside["x"] >= 0
    assert inside["x"] + inside["width"] <= 390
    tab.page.locator("h1").hover()
    assert not tip.is_visible()
    chart.focus()
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("epoch 2")
    tab.page.keyboard.press("Escape")
    assert not tip.is_visible()
    search = tab.page.locator(".plot").nth(2)
    search.locator("> svg").focus()
    tab.page.keyboard.press("ArrowRight")
    assert search.locator(".tip").inner_text().split("\n") == [
        "learning rate 0.5",
        "SGD",
        "diverged",
    ]
    assert tab.faults == []


def test_a_print_has_the_folds_open_and_fits(opened: Opened) -> None:
    tab = opened(html_of(CIFAR10_RECORDS, ["cubegrad x"]), 718)
    tab.page.emulate_media(media="print")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.page.locator("details[open]").count() == 2
    assert tab.overflow() == 0
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.page.locator("details[open]").count() == 0


def test_texts_of_a_record_do_not_run(opened: Opened) -> None:
    odd = []
    for one in CIFAR10_RECORDS:
        curve = {NASTY if name == "accuracy" else name: v for name, v in one.curve.items()}
        about = {**one.about, "description": NASTY, "metric": NASTY, "unit": NASTY}
        settings = replace(one.settings, schedule=NASTY)
        odd.append(replace(one, settings=settings, about=about, curve=curve))
    tab = opened(html_of(odd, [NASTY]), 390)
    assert tab.page.locator("img").count() == 0
    assert tab.page.locator("figcaption").first.inner_text() == f"test {NASTY}, {NASTY}"
    assert tab.overflow() == 0
    assert tab.faults == []


@pytest.mark.parametrize(
    "values",
    [[1e308, 1e300, 1e308], [5e-324] * 3, [-1.0, 0.0, -3.0], [0.0] * 3, [1e-9, 1e9, 1.0], [2.5]],
)
def test_any_numbers_can_be_drawn(values: list[float], opened: Opened) -> None:
    curve: dict[str, list[float | None]] = {"train_loss": [*values], "loss": [*values]}
    records = [
        Record(Settings("odd", "cpu", 3, 8, "sgd", "flat", lr, 0.0, seed), "finished", curve, 1.0,
               {}, MACHINE)
        for lr, seed in ((1e-3, 0), (1e-2, 0), (1e-3, 1))
    ]  # fmt: skip
    tab = opened(html_of(records), 1280)
    drawn = "[...document.querySelectorAll('.plot *')].map((e) => e.outerHTML).join()"
    assert "NaN" not in tab.page.evaluate(drawn)
    assert "Infinity" not in tab.page.evaluate(drawn)
    assert tab.faults == []
