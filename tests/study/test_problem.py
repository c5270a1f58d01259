"""Problems and presets: what their names and numbers may be."""

from dataclasses import replace
from typing import Any

import pytest
import toy_problem

from cubegrad.study import Preset, StudyError


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"name": "/tmp/evil"}, "the name '/tmp/evil' of a problem must be 1 to 100 characters"),
        ({"name": "../evil"}, "the name '../evil' of a problem"),
        ({"name": "a/b"}, "the name 'a/b' of a problem"),
        ({"name": ""}, "the name '' of a problem"),
        ({"name": "x" * 101}, "of a problem must be"),
        ({"name": 3}, "the name 3 of a problem"),
        ({"presets": {"../cpu": Preset(1, 8)}}, "the name '../cpu' of a preset"),
        ({"metric": "a\nb"}, "problem 'toy' has the metric or unit 'a\\\\nb'; use plain text"),
        ({"unit": "\x1b"}, "has the metric or unit"),
        ({"beside": (3,)}, "has the metric or unit 3; use plain text"),
        ({"paper": None}, "has the metric or unit None; use plain text"),
        ({"description": None}, "has description=None and higher_is_better=False; use a str and"),
        ({"higher_is_better": 1}, "and higher_is_better=1; use a str and a bool"),
    ],
)
def test_a_problem_that_no_record_can_name_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(StudyError, match=what):
        replace(toy_problem.problem(), **changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"epochs": 0}, "epochs=0 of a Preset must be an int >= 1; use 1"),
        ({"batch": 8.0}, r"batch=8\.0 of a Preset must be an int"),
        ({"seeds": -1}, "seeds=-1 of a Preset must be an int"),
        ({"threads": "2"}, "threads='2' of a Preset must be an int"),
        ({"decays": ()}, r"decays=\(\), .* and lrs={} of a Preset must be finite floats >= 0, and"),
        ({"decays": (-1.0,)}, "of a Preset must be finite floats >= 0"),
        ({"decays": (float("nan"),)}, "of a Preset must be finite floats >= 0"),
        ({"lrs": {"sgd": (0.1, float("inf"))}}, "of a Preset must be finite floats >= 0"),
        ({"lrs": {"sgd": ("0.1", 1.0)}}, "of a Preset must be finite floats >= 0"),
    ],
)
def test_a_preset_that_no_run_can_use_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(StudyError, match=what):
        replace(Preset(1, 8), **changes)


@pytest.mark.parametrize("name", ["résumé", "my net (v2)", "net1.5", "a-b_c+d=e", "網"])
def test_a_name_that_a_file_can_have_is_accepted(name: str) -> None:
    assert replace(toy_problem.problem(), name=name).name == name
