"""The page over all results: its tables are those of the committed records; how rows are made."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from cubegrad.study.records import Record, Settings, to_line

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
ABOUT = {"metric": "loss", "higher_is_better": False, "unit": "bits", "beside": []}


@pytest.fixture
def rows():
    return importlib.import_module("evidence_rows")


@pytest.fixture
def evidence():
    return importlib.import_module("evidence")


def run(method, lr, seed, loss, date="2026-01-01", **changes):
    settings = Settings("bookwiki", "gpu", 2, 16, method, "flat", lr, 0.0, seed, False, "cuda")
    curve = {"train_loss": [4.0, 3.0], "loss": [5.0, None] if loss is None else [loss + 1, loss]}
    machine = {"date": date}
    status = "diverged" if loss is None else "finished"
    return Record(replace(settings, **changes), status, curve, 36.0, ABOUT, machine)


def row_of(method, lr, loss):
    """A search of three rates with seed 0, and seeds 1 to 3 at the best."""
    step = 0.3 if method == "sgd" else 0.016
    search = [run(method, lr * factor, 0, loss + gap) for factor, gap in ((0.4, step), (2, step))]
    return [*search, *(run(method, lr, seed, loss + seed / 100) for seed in range(4))]


def own_folder():
    methods = {"madgrad": (0.1, 2.0), "adam": (0.01, 2.2), "sgd": (1.0, 3.0), "adagrad": (0.1, 4.0)}
    return [one for name, (lr, loss) in methods.items() for one in row_of(name, lr, loss)]


def by_label(found):
    (one,) = found
    return {row.label: row for row in one.rows}


def test_the_pages_have_the_tables_of_the_records(evidence, rows):
    parts = evidence.blocks(rows.load(RESULTS))
    for name, names in evidence.PAGES.items():
        page = (RESULTS / name).read_text(encoding="utf-8")
        assert evidence.fill(page, {one: parts.pop(one) for one in names}) == page
    assert not parts


def test_runs_of_an_older_estimate_are_no_results_of_lr_auto(rows, tmp_path):
    for name in ("auto", "peers"):
        (tmp_path / name).mkdir()
        records = [run("madgrad", 0.1, 1, 2.0), run("madgrad-auto", 1.0, 1, 2.1)]
        lines = "".join(map(to_line, records))
        (tmp_path / name / "records.jsonl").write_text(lines)
    methods = {
        name: [record.settings.method for record in records]
        for name, records in rows.load(tmp_path).items()
    }
    assert methods == {"auto": ["madgrad"], "peers": ["madgrad", "madgrad-auto"]}


def test_runs_from_other_weights_are_another_comparison(rows):
    other = [replace(one, machine={**one.machine, "start": "ab"}) for one in own_folder()]
    lower = [replace(one, curve={**one.curve, "loss": [0.0, 0.0]}) for one in other]
    found, left_out = rows.comparisons({"bookwiki": own_folder() + lower})
    assert by_label(found)["MADGRAD"].summary.final["loss"].mean in (0.0, pytest.approx(2.02))
    assert len(left_out) == 1


def test_runs_with_other_options_have_a_table_of_their_own(rows, evidence):
    """Of the same length, the comparison with more methods comes first."""
    options = '{"folds": 5, "side": 64}'
    others = [replace(r, settings=replace(r.settings, options=options)) for r in own_folder()]
    more = [*others, *(run("adamw", 0.01, seed, 2.1, options=options) for seed in (1, 2, 3))]
    folders = {"bookwiki": own_folder() + more}
    (one,), left_out = rows.comparisons(folders)
    assert (one.settings.options, len(one.others), left_out) == (options, 1, [])
    headings = [line for line in evidence.blocks(folders)["details"].splitlines() if "###" in line]
    assert headings == [
        "### novels, RoBERTa, 2 epochs",
        "### novels, RoBERTa, 2 epochs, without folds, without side",
    ]
    for changes, words in (
        ({"options": '{"side": 32}'}, ", side 32, without folds"),
        ({"options": '{"folds": 5, "side": null}'}, ", side null"),
        ({"options": '{"folds": 5, "side": 64, "new": null}'}, ", new null"),
        ({"options": options, "batch": 8}, ", batch 8"),
        ({"options": '{"folds": 5, "side": 64, "updates": 9}'}, " of 9 updates\n"),
    ):
        changed = [replace(r, settings=replace(r.settings, **changes)) for r in own_folder()]
        twice = [replace(one, machine={**one.machine, "start": "ab"}) for one in changed]
        (one,), left_out = rows.comparisons({"bookwiki": [*more, *changed, *twice]})
        assert (len(one.others), len(left_out)) == (1, 1)
        parts = evidence.blocks({"bookwiki": [*more, *changed]})
        assert f"2 epochs{words}" in parts["details"]


def test_a_row_is_the_mean_of_the_seeds_that_the_search_did_not_use(rows):
    found, left_out = rows.comparisons({"bookwiki": own_folder()})
    assert left_out == []
    assert [row.label for row in found[0].rows] == ["MADGRAD", "Adam", "SGD", "AdaGrad"]
    adam = by_label(found)["Adam"]
    assert (found[0].final(adam).mean, adam.summary.seeds) == (pytest.approx(2.22), (1, 2, 3))
    assert adam.gain.gains == pytest.approx({1: -0.2, 2: -0.2, 3: -0.2})


def test_runs_that_were_repeated_elsewhere_do_not_count_twice(rows):
    again = [run("madgrad", 0.1, seed, 1.0, decay=0) for seed in (1, 2, 3, 4, 5)]
    found, _ = rows.comparisons({"auto": again, "bookwiki": own_folder()})
    assert by_label(found)["MADGRAD"].summary.final["loss"].mean == pytest.approx(2.02)
    gap, pairs, unit = rows.repeats({"auto": again, "bookwiki": own_folder()})["bookwiki"]
    assert (gap, pairs, unit) == (pytest.approx(1.03), 3, "bits")


def test_a_copied_record_is_not_a_repetition(rows):
    assert rows.repeats({"auto": own_folder(), "bookwiki": own_folder()}) == {}


def test_of_other_folders_the_one_with_most_runs_counts_then_the_newest(rows):
    few = [run("adamw", 0.01, 1, 1.0)]
    old = [run("adamw", 0.01, seed, 2.0) for seed in (1, 2)]
    new = [run("adamw", 0.01, seed, 3.0, "2026-01-02") for seed in (1, 2)]
    folders = {"a": new, "b": old, "c": few, "bookwiki": own_folder()}
    assert by_label(rows.comparisons(folders)[0])["AdamW"].folder == "a"


def test_a_pair_is_taken_from_the_same_folder_if_it_can_be(rows):
    day = [run("madgrad", 0.1, seed, 2.5) for seed in (0, 1, 2)]
    peers = [*day, *(run("madgrad-auto", 1.0, seed, 2.4) for seed in (0, 1, 2))]
    found, _ = rows.comparisons({"bookwiki": own_folder(), "peers": peers})
    gain = by_label(found)["MADGRAD, lr auto"].gain
    assert gain.gains == pytest.approx({1: 0.1, 2: 0.1})  # not seed 0, which chose MADGRAD's rate


def test_codes_at_another_rate_than_the_best_are_left_out(rows):
    best = [run("madgrad-compact", 0.1, seed, 2.0) for seed in (1, 2)]
    found, left_out = rows.comparisons({"bookwiki": own_folder(), "compact": best})
    assert ("MADGRAD, compact" in by_label(found), left_out) == (True, [])
    other = [replace(one, settings=replace(one.settings, lr=0.01)) for one in best]
    found, left_out = rows.comparisons({"bookwiki": own_folder(), "compact": other})
    assert "MADGRAD, compact" not in by_label(found)
    assert "MADGRAD, compact: only at another rate" in left_out[0]


def test_the_longest_runs_count_if_those_of_sgd_and_adam_are_finished(rows, evidence):
    longer = [replace(r, settings=replace(r.settings, epochs=4)) for r in own_folder()]
    without_adagrad = [one for one in longer if one.settings.method != "adagrad"]
    without_adam = [one for one in without_adagrad if one.settings.method != "adam"]
    searched = [one for one in longer if one.settings.seed == 0]
    for some, first in ((longer, 4), (without_adagrad, 4), (without_adam, 2), (searched, 2)):
        (one,), left_out = rows.comparisons({"bookwiki": own_folder() + some})
        assert (one.settings.epochs, left_out) == (first, [])
        assert [other.settings.epochs for other in one.others] == [6 - first]
        parts = evidence.blocks({"bookwiki": own_folder() + some})
        assert f"{first} epochs" in parts["overview"]
        assert f"{6 - first} epochs" not in parts["overview"]
        order = [parts["details"].index(f"{epochs} epochs") for epochs in (first, 6 - first)]
        assert order == sorted(order)
        assert f"- {len(own_folder() + some)} runs, " in parts["standing"]


def test_what_cannot_be_compared_is_left_out_and_named(rows):
    alone = [run("madgrad", 0.1, 1, 2.0), run("madgrad", 0.1, 2, 2.0)]
    assert rows.comparisons({"x": alone})[1][0].endswith("no SGD, Adam or AdamW beside MADGRAD yet")
    cpu = [replace(one, settings=replace(one.settings, device="cpu")) for one in own_folder()]
    assert rows.comparisons({"x": cpu})[1][0].endswith("on a CPU")


def test_the_tables_say_what_was_found(evidence):
    fixed = [r for r in own_folder() if r.settings.lr != 0.4]  # SGD's best is now its lowest
    parts = evidence.blocks({"bookwiki": fixed})
    first = parts["overview"].splitlines()[2].replace("\N{NO-BREAK SPACE}", " ")
    assert "| **2.020**<br>± 0.012 | 3.020 ▼ †<br>± 0.012 | 2.220 ▼<br>± 0.012 |" in first
    adam = next(line for line in parts["details"].splitlines() if line.startswith("| Adam "))
    assert "| 0.01 | 0 | 3 | 3 runs | 2 | 0.060 | 36 s |" in adam
    sgd = next(line for line in parts["details"].splitlines() if line.startswith("| SGD"))
    assert "2 runs, lr at the edge | never |" in sgd
    assert "MADGRAD against SGD, 1 problem: better on 1 (novels)" in parts["standing"]
    wide = [line for line in parts["robustness"].splitlines() if "| MADGRAD |" in line]
    # One step of 2.5 below and of 2 above; both are 0.8 % behind.
    assert "| −0.4 to +0.3 | MADGRAD | 3 | 0.7 | 50 % | 100 % |" in wide[0]
    assert "| SGD | 2 | 0.3 | edge | edge | edge | edge | not run | −10 % |" in parts["robustness"]


def test_a_result_of_the_seed_that_chose_it_is_marked_and_not_the_best(evidence, rows):
    search = [run("adamw", lr, 0, loss) for lr, loss in ((0.1, 1.1), (0.2, 1.0), (0.5, 1.1))]
    folders = {"bookwiki": own_folder() + search}
    (one,), _ = rows.comparisons(folders)
    assert [row.label for row in one.rows if row.chosen_by_its_seeds] == ["AdamW"]
    parts = evidence.blocks(folders)
    first = parts["overview"].splitlines()[2].replace("\N{NO-BREAK SPACE}", " ")
    assert "| **2.020**<br>± 0.012 |" in first
    assert "| 1 ‡ |" in first
    adamw = next(line for line in parts["details"].splitlines() if line.startswith("| AdamW "))
    assert "| – | 0.2 | 0 | 1 | 3 runs, by the same seeds |" in adamw
    places = importlib.import_module("plot_evidence").places
    assert not any(place.whole for place in places([one]))  # no place in the mean rank
    seeds = [run("adamw", 0.2, seed, 1.0 + seed / 100) for seed in (1, 2)]
    whole = rows.comparisons({"bookwiki": own_folder() + search + seeds})[0]
    assert all(place.whole for place in places(whole))


def test_a_method_with_one_rate_at_its_best_decay_leaves_the_span_of_the_others(evidence):
    """Its search has not come to the neighbours there yet."""
    search = [run("adamw", 0.01, 0, 1.2), run("adamw", 0.02, 0, 1.1)]
    search += [run("adamw", 0.02, 0, 1.0, decay=1e-2)]
    lines = evidence.blocks({"bookwiki": own_folder() + search})["robustness"].splitlines()
    (adamw,) = [line for line in lines if "| AdamW |" in line]
    assert adamw.endswith("| AdamW | 1 | 0.0 |" + 4 * " one rate |" + 2 * " not run |")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert "| −0.4 to +0.3 | MADGRAD | 3 | 0.7 | 50 % | 100 % |" in "\n".join(lines)


def test_what_decay_gains_is_told_where_both_were_tried(evidence):
    with_decay = [
        run("adam", 0.01, 0, 2.1, decay=1e-5),
        run("adam", 0.02, 0, 2.15, decay=1e-5),
        run("sgd", 1.0, 0, None, decay=1e-5),
    ]
    lines = evidence.blocks({"bookwiki": own_folder() + with_decay})["decay"].splitlines()
    assert lines[2:] == [
        "| novels, RoBERTa | Adam | 2.2 | 0.01 | 2.1 | 0.01 | 1e-05 | +0.100 |",
    ]


def test_a_page_without_its_marks_is_refused(evidence):
    with pytest.raises(SystemExit, match="<!-- overview --> and <!-- end of overview --> once"):
        evidence.fill("# Results", {"overview": "x"})


@pytest.mark.plots
def test_one_command_writes_the_pages_and_the_figure(evidence, tmp_path):
    folder = tmp_path / "bookwiki"
    folder.mkdir()
    records = own_folder() + row_of("adamw", 0.01, 2.1)
    (folder / "records.jsonl").write_text("".join(map(to_line, records)))
    parts = evidence.blocks({"bookwiki": records})
    for name, names in evidence.PAGES.items():
        marks = "\n".join(f"<!-- {one} -->\nold\n<!-- end of {one} -->" for one in names)
        (tmp_path / name).write_text(f"# Results\n{marks}\n")
    evidence.main([str(tmp_path)])
    for name, names in evidence.PAGES.items():
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert "\nold\n" not in page
        assert all(parts[one] in page for one in names)
    assert (tmp_path / "evidence.png").stat().st_size > 20_000
