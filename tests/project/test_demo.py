"""`make demo`: its methods can be compared, and its environment has the packages that they need."""

import re
from pathlib import Path

from cubegrad.study import catalogue, methods

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def entries():
    (names,) = re.findall(r"^DEMO_METHODS := (.+)$", MAKEFILE, re.MULTILINE)
    preset = catalogue.find("digits").presets["cpu"]
    return preset, {name: methods.entry(name, preset) for name in names.split(",")}


def test_the_demo_installs_what_its_methods_need():
    (installed,) = re.findall(r"^\t\.venv-demo/bin/pip (.+)$", MAKEFILE, re.MULTILINE)
    packages = {methods.METHODS[name].package for name in entries()[1]} - {""}
    assert packages == {"schedulefree"}
    assert packages <= set(installed.split())


def test_madgradw_is_searched_over_the_rates_of_adamw():
    preset, compared = entries()
    assert compared["madgradw"].lrs(preset) == compared["adamw"].lrs(preset)
    assert compared["madgradw"].schedule == compared["adamw"].schedule
    free = compared["madgradw-schedule-free"], compared["schedulefree-adamw"]
    assert free[0].schedule == free[1].schedule


def test_the_study_page_shows_every_method_of_the_demo():
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    table = page.partition("`make demo` compares")[2].partition("So the learning rate")[0]
    shown = set(re.findall(r"^\| ([^|\n]+) \| [\d.]+ \|", table, re.MULTILINE))
    assert shown == {methods.METHODS[name].label for name in entries()[1]}
