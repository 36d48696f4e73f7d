"""experiments/: every kind of cell with a few steps, no run made twice, and a page that names missing runs."""

from __future__ import annotations

import fnmatch
import gzip
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import ttest_ind
from torch import nn
from torch.nn import functional as F

import epsilons
from epsilons.accounting import ACCOUNTANTS
from epsilons.errors import DataError, InputError, PlanError
from experiments import __main__ as commands
from experiments import figures, idx, reporting, running, training, visits
from experiments.comparing import Compared, Printed, expected, ledger, value, verdict
from experiments.missing import not_run, provenance
from experiments.protocol import protocols
from experiments.results import DRAWS_VERSION, finished, keep
from experiments.settings import HERE, RECORDS, Cell, Settings, Table, read_table
from experiments.strategies import most_steps, one_after_another
from pages import ROOT
from runs import DONE, TABLES, lines, run_cell, with_cells

SHARES = {"1": 0.5, "2": 0.3, "3": 0.2}
TINY = {"dataset": "digits", "model": "logistic", "steps": 6, "batch_size": 64, "clip_norm": 1.0, "lr": 0.5}

SCALE = Settings(**TINY, strategy="scale", shares=SHARES)
WATCHED = SCALE.model_copy(update={"evaluations": 3, "watch": 3})

CELLS = {"plain": {"strategy": "uniform", "shares": {"1": 1.0}}, "scale": {"strategy": "scale", "shares": SHARES}}


@pytest.fixture
def table() -> Table:
    """Two cells with two seeds each."""
    every = {name: Settings(**TINY | chosen, evaluations=2) for name, chosen in CELLS.items()}
    cells = [Cell(name=name, title=name, settings=settings, seeds=(0, 1)) for name, settings in every.items()]
    return Table(name="digits", title="Digits", note="Tiny.", cells=tuple(cells))


#: What a repeated or continued run must reproduce.
VALUES = ("accuracy", "per_class", "curve", "groups", "charged", "spent", "weights")


def values_of(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: line[key] for key in VALUES}


# -- every kind of cell --------------------------------------------------------------------------------------------

TRAININGS = {
    "uniform": {"strategy": "uniform", "shares": {"1": 1.0}},
    "sample": {"strategy": "sample", "shares": SHARES},
    "scale": {"strategy": "scale", "shares": SHARES, "momentum": 0.5},
    "paper's convention": {"strategy": "scale", "shares": SHARES, "convention": "paper"},
    "pld": {"strategy": "scale", "shares": SHARES, "accountant": "pld"},
    "mix": {"strategy": "mix", "shares": SHARES, "options": {"weight": 0.25}},
    "exclude": {"strategy": "exclude", "shares": SHARES, "options": {"threshold": 2.0}},
    "100 groups": {"strategy": "sample", "uniform": [1.0, 6.0, 100]},
    "54 %": {"strategy": "uniform", "shares": SHARES, "keep": [1.0]},
    "in turn": {"strategy": "one-after-another", "shares": SHARES, "options": {"noise_multiplier": 2.5}},
}


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_training_cell_spends_what_its_strategy_targets_and_never_more(kind):
    settings = Settings(**TINY | TRAININGS[kind], evaluations=2)
    line = run_cell(settings, seed=1)
    assert line["charged"] == line["steps"] == line["updates_timed"]
    assert line["steps"] == 6 or kind == "in turn"
    most, least = ledger(line)
    assert most <= 1
    assert least >= (0.9 if kind == "in turn" else 0.99)  # a handful of whole steps do not use up a small budget
    assert sum(n for _, n in line["per_class"]) == 360
    assert sum(right for right, _ in line["per_class"]) == pytest.approx(360 * line["accuracy"])
    assert [row["step"] for row in line["curve"]] == [line["steps"] // 2 * i for i in range(1, 3)][: len(line["curve"])]
    assert json.loads(json.dumps(line)) == line
    assert Settings(**line["settings"]) == settings


def test_groups_are_scored_as_a_loop_over_records_scores_them():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(50, 4), torch.randint(3, (50,))
    group = torch.arange(50) % 3 % 2
    loss, accuracy = training.scores_by_group(model, (x, y), group)
    for g in (0, 1):
        rows = [i for i in range(50) if group[i] == g]
        losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).item() for i in rows]
        assert loss[g] == pytest.approx(sum(losses) / len(rows))
        assert accuracy[g] == sum(int(model(x[i]).argmax() == y[i]) for i in rows) / len(rows)


def test_a_cell_has_the_training_scores_of_each_group_at_equal_distances():
    line = run_cell(WATCHED)
    assert [row["step"] for row in line["groups"]] == [2, 4, 6]
    assert all(len(row["loss"]) == len(row["accuracy"]) == 3 for row in line["groups"])
    assert value(line, "group_loss@0.5") in {row["loss"][0] for row in line["groups"]}
    assert value(line, "group_accuracy@1") == 100 * line["groups"][-1]["accuracy"][0]


def test_the_setting_keep_keeps_the_records_of_one_level_with_their_budgets():
    settings = Settings(**TINY, strategy="uniform", shares=SHARES, keep=[1.0])
    data = epsilons.data.load("digits", "train")
    budgets = training.budgets_of(settings, len(data.targets), seed=3)
    part, part_budgets = training.kept(settings, data, budgets)
    rows = np.flatnonzero(budgets.epsilons[budgets.group] == 1.0)
    assert len(part_budgets) == len(rows) == budgets.counts[0]
    np.testing.assert_array_equal(part.inputs, data.inputs[rows])
    np.testing.assert_array_equal(part.targets, data.targets[rows])
    assert part_budgets.epsilons.tolist() == [1.0]


def test_a_hundred_groups_are_uniform_and_differ_between_seeds():
    settings = Settings(**TINY, strategy="scale", uniform=[1.0, 6.0, 100])
    one, two = (training.budgets_of(settings, 60_000, seed) for seed in (0, 1))
    assert len(one.epsilons) == 100
    assert 1 <= one.epsilons.min() < 1.5
    assert 5.5 < one.epsilons.max() <= 6
    assert one.counts.min() > 400  # 600 expected; 8 standard deviations
    assert not np.array_equal(one.epsilons, two.epsilons)


@pytest.mark.parametrize(("kind", "extra"), [("parameters", {}), ("consumption", {}), ("planning-time", {"groups": 4})])
def test_a_cell_without_training_holds_the_values_of_its_plan(kind, extra):
    settings = Settings(**TINY, kind=kind, strategy="scale", shares=SHARES, **extra)
    line = run_cell(settings)
    made = training.plan_of(settings, training.budgets_of(settings, RECORDS["digits"], 0))
    if kind == "planning-time":
        assert line["planning_seconds"] > 0
        assert 0 <= line["unused"] < 1e-4
        return
    assert line["plan"] == made.digest
    assert line["spent"] == made.epsilon_spent().tolist()
    if kind == "parameters":
        assert value(line, "noise_multiplier[1]") == made.noise_multiplier[1]
        assert value(line, "noise_scale") == pytest.approx(1 / float(made.counts / 1437 @ (1 / made.noise_multiplier)))
    else:
        assert line["spent_at"][-1] == line["spent"]
        assert (np.diff(line["spent_at"], axis=0) >= 0).all()


def test_steps_are_timed_for_three_methods_with_equal_expected_batches():
    settings = Settings(**TINY | {"steps": 60}, kind="step-time", strategy="uniform", shares=SHARES)
    line = run_cell(settings)
    assert line["ratio"]["uniform"] == 1
    for method in ("uniform", "sample", "scale"):
        assert line["seconds_per_step"][method] > 0
        assert line["records_per_step"][method] == pytest.approx(64, abs=7.5 * math.sqrt(64 / 20))  # of a median


def test_idx_files_become_parquet_files_with_their_images_and_labels(tmp_path, monkeypatch):
    coins, sizes = np.random.default_rng(0), {"train": 30, "t10k": 20}
    held = {stem: (coins.integers(0, 256, (n, 28, 28)), coins.integers(0, 10, n)) for stem, n in sizes.items()}
    for stem, (pictures, labels) in held.items():
        for kind, values in (("images-idx3", pictures), ("labels-idx1", labels)):
            head = bytes((0, 0, 8, values.ndim)) + b"".join(n.to_bytes(4, "big") for n in values.shape)
            (tmp_path / f"{stem}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))
    monkeypatch.setenv("EPSILONS_DATA", str(tmp_path / "out"))
    idx.convert(tmp_path, "fashion-mnist", tmp_path / "out")
    for split, stem in idx.STEMS.items():
        data = epsilons.data.load("fashion-mnist", split)
        assert (np.rint((data.inputs[:, 0] + 1) / 2 * 255) == held[stem][0]).all()
        assert (data.targets == held[stem][1]).all()
    short = gzip.decompress((tmp_path / "t10k-labels-idx1-ubyte.gz").read_bytes())[:-1]
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(short))
    with pytest.raises(DataError, match="not a complete IDX file"):
        idx.convert(tmp_path, "fashion-mnist", tmp_path / "again")


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_groups_in_turn_take_the_most_steps_that_their_budget_allows(name):
    budgets = epsilons.Budgets.from_shares({1.0: 0.5, 2.0: 0.3, 3.0: 0.2}, records=2_000)
    recipe = epsilons.Recipe(steps=1, batch_size=100, clip_norm=0.5)
    made, turned = (
        epsilons.plan(budgets, recipe, one_after_another, name, noise_multiplier=2.5, loosest_first=loosest_first)
        for loosest_first in (False, True)
    )
    for group, (phase, count) in enumerate(zip(made.phases, budgets.counts, strict=True)):
        assert (phase.sample_rate > 0).tolist() == [g == group for g in range(3)]
        one_more = epsilons.SampledGaussian(100 / int(count), 2.5, phase.steps + 1)
        assert ACCOUNTANTS[name]([one_more], 1e-5) > budgets.epsilons[group] >= made.epsilon_spent()[group]
    assert [phase.steps for phase in turned.phases] == [phase.steps for phase in reversed(made.phases)]
    assert [int(phase.sample_rate.argmax()) for phase in turned.phases] == [2, 1, 0]
    assert (turned.epsilon_spent() == made.epsilon_spent()).all()
    with pytest.raises(PlanError, match="single step"):
        epsilons.plan(budgets, recipe, one_after_another, name, noise_multiplier=0.1)


def test_most_steps_is_the_largest_number_within_a_budget():
    assert most_steps(lambda steps: steps / 10, 3.75) == 37


# -- nothing is run twice ------------------------------------------------------------------------------------------


def test_a_table_is_run_once_and_the_next_call_makes_only_missing_runs(table, tmp_path, monkeypatch, unfinished):
    folder = tmp_path / "results"
    assert running.run_tables([table], only="plain", seeds=1, jobs=1, threads=2, device="cpu", folder=folder) == []
    assert [line["machine"]["threads"] for line in finished(folder).values()] == [2]
    missing = [(cell.name, seed) for _, cell, seed in running.missing([table], done=finished(folder))]
    assert missing == [("scale", 0), ("plain", 1), ("scale", 1)]
    assert running.run_tables([table], jobs=1, device="cpu", folder=folder) == []
    assert len(finished(folder)) == 4
    assert not list(unfinished.iterdir())
    before = (folder / "digits.jsonl").read_bytes()
    monkeypatch.setattr(running, "run", lambda *_: pytest.fail("run again"))
    assert running.run_tables([table], device="cpu", folder=folder) == []
    assert (folder / "digits.jsonl").read_bytes() == before


def test_runs_of_another_version_of_the_draws_are_repeated_only_if_asked_for(table, tmp_path, monkeypatch):
    assert running.run_tables([table], only="plain", seeds=1, device="cpu", folder=tmp_path) == []
    (first,) = finished(tmp_path).values()
    assert first["draws_version"] == DRAWS_VERSION
    for earlier in (
        {**first, "draws_version": DRAWS_VERSION - 1},
        {k: first[k] for k in first if k != "draws_version"},
    ):
        keep({**earlier, "accuracy": 0.125}, tmp_path)
        assert running.run_tables([table], only="plain", seeds=1, device="cpu", folder=tmp_path) == []
        assert finished(tmp_path)[first["id"]]["accuracy"] == 0.125
        again = running.run_tables([table], only="plain", seeds=1, outdated=True, device="cpu", folder=tmp_path)
        assert again == []
        assert values_of(finished(tmp_path)[first["id"]]) == values_of(first)
    monkeypatch.setattr(running, "run", lambda *_: pytest.fail("run again"))
    assert running.run_tables([table], only="plain", seeds=1, outdated=True, device="cpu", folder=tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["loky", "dask", "ray"])
def test_processes_in_parallel_compute_what_one_process_computes(backend, table, tmp_path, monkeypatch):
    package = {"loky": "joblib", "dask": "distributed"}.get(backend, backend)
    pytest.importorskip(package, reason=f"{package} is not installed: experiments are not tested on its clusters")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    assert running.run_tables([table], jobs=2, backend=backend, device="cpu", folder=tmp_path) == []
    again = run_cell(table.by_name["scale"].settings, seed=1)
    assert values_of(finished(tmp_path)[again["id"]]) == values_of(again)


def test_with_again_a_finished_run_is_repeated_and_its_result_replaced(table, tmp_path, capsys):
    assert running.run_tables([table], seeds=1, device="cpu", folder=tmp_path) == []
    scale = table.by_name["scale"].settings.named(0)
    first = finished(tmp_path)[scale]
    stale = {**first, "accuracy": 0.125, "table": "elsewhere"}
    (tmp_path / "digits.jsonl").unlink()
    keep(stale, tmp_path)
    keep({**stale, "id": "of another run"}, tmp_path)
    capsys.readouterr()
    assert running.run_tables([table], only="scale", seeds=1, again=True, device="cpu", folder=tmp_path) == []
    assert "(before: 12.50 %)" in capsys.readouterr().err
    rows = [json.loads(row) for path in tmp_path.glob("*.jsonl") for row in path.read_text().splitlines()]
    assert sorted((row["table"], row["id"]) for row in rows) == [("digits", scale), ("elsewhere", "of another run")]
    assert finished(tmp_path)[scale]["accuracy"] == first["accuracy"] != 0.125
    assert not list(tmp_path.glob("*.new"))


def test_a_result_that_was_not_written_is_there_without_a_second_training(unfinished):
    first, again = run_cell(SCALE), run_cell(SCALE)
    assert (first["updates_timed"], again["updates_timed"]) == (6, 0)
    assert values_of(again) == values_of(first)
    training.forget(first)
    assert not list(unfinished.iterdir())
    assert run_cell(SCALE)["updates_timed"] == 6


def test_by_default_as_many_runs_start_as_there_are_cores_for(table, tmp_path, monkeypatch):
    seen: list[int] = []

    def stop(backend, n_jobs):
        seen.append(n_jobs)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "cpu_count", lambda: 8)
    monkeypatch.setattr(running, "parallel_config", stop)
    for threads in (1, 3, 16):
        with pytest.raises(KeyboardInterrupt):
            running.run_tables([table], jobs=-1, threads=threads, folder=tmp_path)
    assert seen == [8, 2, 1]


def test_runs_are_written_into_the_folder_that_out_names(tmp_path, monkeypatch):
    seen: list[Path] = []
    monkeypatch.setattr(commands, "run_tables", lambda *_, folder, **__: seen.append(folder) or [])
    commands.run([next(iter(TABLES))], out=tmp_path)
    assert seen == [tmp_path]


def test_each_line_of_the_queue_names_cells_that_exist():
    for name, only, *how in ([*words, "*"] if len(words) == 1 else words for words in commands.queued()):
        assert name in protocols() or any(fnmatch.fnmatch(cell.name, only) for cell in TABLES[name].cells), (name, only)
        assert how in ([], ["again"])


def test_the_queue_runs_its_lines_in_order(table, tmp_path, monkeypatch):
    (tmp_path / "queue.txt").write_text("# first\ntable_2 mnist-* again  # five seeds\n\nprotocol_digits\nmomentum\n")
    monkeypatch.setattr(commands.queued, "__defaults__", (tmp_path / "queue.txt",))
    seen: list[tuple[str, str, bool]] = []
    monkeypatch.setattr(
        commands, "run_tables", lambda t, only, outdated, **_: seen.append((t[0].name, only, outdated)) or []
    )
    monkeypatch.setattr(commands, "run_protocol", lambda p, **_: seen.append((p.name, "*", True)) or [])
    commands.queue(out=tmp_path)
    assert seen == [("table_2", "mnist-*", True), ("digits", "*", True), ("momentum", "*", False)]


def test_an_interrupted_run_continues_and_ends_as_if_uninterrupted(monkeypatch, unfinished):
    """Also if the last line of its scores is incomplete."""
    uninterrupted = run_cell(WATCHED)
    training.forget(uninterrupted)
    scores, calls = training.scores_by_group, []

    def fails_the_second_time(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return scores(*given)

    with monkeypatch.context() as patched:
        patched.setattr(training, "scores_by_group", fails_the_second_time)
        with pytest.raises(KeyboardInterrupt):
            training.train(WATCHED, seed=0, device="cpu")
    (watched,) = unfinished.glob("*.groups.jsonl")
    watched.write_text(watched.read_text() + '{"step": 4, "lo')
    continued = training.train(WATCHED, seed=0, device="cpu")
    assert continued["updates_timed"] < uninterrupted["updates_timed"] == 6
    assert values_of(continued) == values_of(uninterrupted)


def test_a_run_with_missing_updates_is_made_again_and_never_kept(monkeypatch):
    """A run that is resumed under another key does not make the updates that were charged before."""
    fit, runs = training.epsilons.fit, []

    def ends_early_once(*given, **options):
        run = fit(*given, **options)
        runs.append(run)
        last = {**run.metrics[-1], "step": 5}
        return replace(run, metrics=(*run.metrics[:-1], last)) if len(runs) == 1 else run

    monkeypatch.setattr(training.epsilons, "fit", ends_early_once)
    result = training.train(SCALE, seed=0, device="cpu")
    assert len(runs) == 2
    assert result["curve"][-1]["step"] == result["steps"] == result["updates_timed"] == 6


def test_best_momenta_are_compared_on_the_seeds_that_both_methods_have():
    table = TABLES["momentum"]
    plain, sample, scale = table.cells[:3]
    accuracies = [
        (plain, 0.5, [0.96, 0.94]),
        (plain, 0.0, [0.97, 0.95, 0.10]),
        (sample, 0.5, [0.99, 0.97, 0.80]),
        (sample, 0.0, [0.98, 0.96, 0.99]),
        (scale, 0.5, [0.98]),
    ]
    done = {
        cell.but(momentum=momentum).settings.named(seed): {"accuracy": accuracy}
        for cell, momentum, by_seed in accuracies
        for seed, accuracy in enumerate(by_seed)
    }
    best = reporting._best(table, done)
    assert "| MNIST, DP-SGD, ε = 1 | 0.0 | 96.00 |  | 2 |" in best
    assert "| MNIST, Sample, A | 0.5 | 98.00 | +2.00 (two seeds) | 2 |" in best
    assert "| MNIST, Scale, A |  | **not run** |  | 0 |" in best


def test_a_run_that_fails_is_reported_and_not_kept(table, tmp_path):
    mixed = with_cells(table, table.cells[0].but(model="none"), table.cells[1])
    failures = running.run_tables([mixed], seeds=1, device="cpu", folder=tmp_path / "results")
    assert len(failures) == 1
    assert "No model is called 'none'" in failures[0]
    assert [line["cell"] for line in finished(tmp_path / "results").values()] == ["scale"]


def test_an_incomplete_line_of_results_is_ignored_and_removed(tmp_path):
    keep({"id": "a", "table": "t"}, tmp_path)
    with (tmp_path / "t.jsonl").open("a") as file:
        file.write('{"id": "b", "tab')
    assert set(finished(tmp_path)) == {"a"}
    keep({"id": "c", "table": "t"}, tmp_path)
    assert set(finished(tmp_path)) == {"a", "c"}


def test_a_run_is_named_by_its_settings_and_by_nothing_else(table):
    settings = table.cells[1].settings
    assert settings.named(0) != settings.named(1)
    shares = {"1": 0.4, "2": 0.6}
    for change in ({"momentum": 0.5}, {"lr": 0.6}, {"accountant": "pld"}, {"shares": shares}, {"steps": 7}):
        assert settings.model_copy(update=change).named(0) != settings.named(0)
    spelled_out = Settings(**settings.model_dump())
    assert spelled_out.named(0) == settings.named(0)


def test_an_unknown_cell_backend_or_key_is_refused_with_the_known_ones(table, tmp_path):
    with pytest.raises(InputError, match="No cell is called 'scall'; there are: plain, scale"):
        running.run_tables([table], only="scall", folder=tmp_path)
    with pytest.raises(InputError, match="loky, dask, ray"):
        running.run_tables([table], backend="threads", folder=tmp_path)
    keys = {**TINY, "name": "plain", "strategy": "scale", "learning": 0.5}
    rows = [f"{key} = {json.dumps(chosen)}" for key, chosen in keys.items()]
    (tmp_path / "wrong.toml").write_text("\n".join(["title = 'Digits'", "[[run]]", *rows]))
    with pytest.raises(InputError, match=r"'plain' of wrong.toml: learning"):
        read_table(tmp_path / "wrong.toml")


# -- the paper's numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_what_is_expected_of_a_table_names_its_cells(name):
    table, theirs = TABLES[name], expected(name)
    assert {path.stem for path in (HERE / "expected").glob("*.json")} <= set(TABLES)
    assert set(theirs.cells) | set(theirs.not_printed) <= set(table.by_name)
    assert not set(theirs.cells) & set(theirs.not_printed)
    for pattern in (*theirs.measured_on, *theirs.costs):
        assert fnmatch.filter(table.by_name, pattern) or pattern == "cnn-*", pattern
    for claim in theirs.claims:
        others = {claim[key] for key in ("above", "minus") if key in claim}
        assert {claim["cell"], *others} <= set(table.by_name)
        assert len({"within", "above", "at_most", "between", "moves"} & set(claim)) == 1


def test_full_length_cells_have_the_steps_of_the_paper_s_code():
    steps = {cell.name: cell.settings.recipe(RECORDS[cell.settings.dataset]).steps for cell in TABLES["table_2"].cells}
    assert {steps[name] for name in steps if name.startswith("mnist")} == {9_440}
    assert (steps["cifar10-dpsgd"], steps["cifar10-sample-a"], steps["cifar10-scale-a"]) == (1_470, 2_940, 3_430)
    assert TABLES["conventions"].cells[0].settings.recipe(60_000).steps == 9_375
    assert {c.settings.recipe(50_000).steps for c in TABLES["table_untuned"].cells if "cifar" in c.name} == {1_470}


def test_the_paper_s_parameters_are_reproduced_but_for_inconsistent_entries():
    """The oracle is the printed table; every entry that does not come out is one that is named as inconsistent."""
    theirs, wrong, right = expected("parameters"), 0, 0
    for cell in TABLES["parameters"].cells:
        line = run_cell(cell.settings)
        for printed in theirs.cells[cell.name]:
            compared = Compared(printed, (value(line, printed.quantity),))
            assert compared.agrees != bool(printed.contradicts), (cell.name, printed, compared.mean)
            wrong, right = wrong + (not compared.agrees), right + compared.agrees
    assert (wrong, right) == (20, 64)


def test_p_and_interval_are_student_s_with_a_pooled_spread_and_p_needs_three_seeds():
    coins = np.random.default_rng(0)
    ours, theirs = coins.normal(97.7, 0.1, 5), coins.normal(97.8, 0.1, 10)
    printed = Printed("accuracy", float(theirs.mean()), sd=float(theirs.std(ddof=1)), trials=10)
    compared, oracle = Compared(printed, tuple(ours)), ttest_ind(ours, theirs)
    assert compared.p == pytest.approx(oracle.pvalue)
    low, high = oracle.confidence_interval()
    assert compared.half == pytest.approx((high - low) / 2)
    assert [Compared(printed, tuple(ours[:n])).p is None for n in (1, 2, 3)] == [True, True, False]
    assert Compared(printed, (97.7,)).half == pytest.approx(
        stats.t.ppf(0.975, 9) * printed.sd * math.sqrt(1 + 1 / 10)  # one seed has no spread: the paper's alone
    )
    assert Compared(Printed("accuracy", 97.6), tuple(ours)).half is None


def _lines(table: Table, scores: dict[str, list[float]]) -> dict[str, dict]:
    return {
        table.by_name[name].settings.named(seed): {"accuracy": score / 100}
        for name, values in scores.items()
        for seed, score in enumerate(values)
    }


def test_a_claim_holds_with_all_seeds_only_and_is_broken_by_one_pair():
    table, theirs = TABLES["table_2"], expected("table_2")
    within = next(c for c in theirs.claims if c["cell"] == "mnist-scale-a" and "within" in c)
    above = next(c for c in theirs.claims if c["cell"] == "mnist-scale-a" and "above" in c)
    good, bad = [97.7] * 5, [97.0] * 5

    def held(claim: Mapping[str, Any], scale: list[float], dpsgd: Sequence[float] = ()) -> tuple[bool | None, bool]:
        result = verdict(claim, table, theirs, _lines(table, {"mnist-scale-a": scale, "mnist-dpsgd": list(dpsgd)}))
        return result.held, result.so_far

    assert held(within, [])[0] is None
    assert held(within, good) == (True, True)
    assert held(within, good[:2]) == (None, True)
    assert held(within, bad[:2]) == (None, False)
    assert held(within, bad)[0] is False
    assert held(above, good)[0] is None
    assert held(above, good, bad)[0] is True
    assert held(above, good, [*bad[:4], 97.8])[0] is False
    assert held(above, good[:1], [98])[0] is False


# -- the pages -----------------------------------------------------------------------------------------------------


def test_every_cell_that_was_not_run_says_so_and_what_it_costs():
    every = reporting.pages(TABLES, {})
    sections = [section for page in every.values() for section in page.split("\n## ")]
    for table in TABLES.values():
        (section,) = [part for part in sections if f"\n`{table.name}` · paper" in part]
        assert "**not run**" in section
        command = f"`python -m experiments run {table.name}"
        listed = "\n".join(line for line in every["results-paper"].splitlines() if command in line)
        assert all(cell.title in listed for cell in table.cells)
        assert command in section.partition("**Not run yet**")[2]


@pytest.mark.parametrize("name", TABLES)
def test_the_commands_of_what_was_not_run_choose_what_is_missing_and_have_a_cost(name):
    chosen = []
    for _, count, hours, _, command in not_run(TABLES[name], expected(name), DONE):
        _, *words = shlex.split(command.strip("`").removeprefix("python -m experiments run "))
        only = words[words.index("--only") + 1] if "--only" in words else "*"
        chosen += (found := running.missing([TABLES[name]], only, done=DONE))
        assert len(found) == int(count)
        assert float(hours.replace(",", "")) > 0 or name == "lira_cifar10"
    assert len(chosen) == len(running.missing([TABLES[name]], done=DONE))


def test_a_section_shows_both_numbers_their_difference_and_the_seeds():
    table = TABLES["table_2"]
    page = reporting.pages({"table_2": table}, _lines(table, {"mnist-dpsgd": [96.7, 96.9], "cifar10-scale-a": [57.7]}))
    half = Compared(expected("table_2").cells["mnist-dpsgd"][0], (96.7, 96.9)).half
    row = f"| MNIST, DP-SGD, ε = 1 | 96.75 ± 0.15 | 96.80 (96.70, 96.90) | +0.05 ± {half:.2f} |  | 2 of 5 |"
    assert row in page["results-utility"]
    front = page["results"].replace("\u00a0", " ")
    assert "| MNIST, A | **ours** | **96.80 (96.70, 96.90)** | **not run: " in front
    assert "| CIFAR10, A | **ours** | **not run: 4.2 h** | **not run: " not in front
    assert "| **57.70** |" in front


@pytest.mark.parametrize("name", reporting.BESIDE)
def test_a_setting_is_compared_with_our_runs_of_table_2_seed_by_seed(name):
    table = TABLES[name]
    there = with_cells(table, *(cell.but(**reporting.BESIDE[name]) for cell in table.cells))
    cell = table.cells[1]
    assert there.by_name[cell.name].settings == TABLES["table_2"].by_name[cell.name].settings
    done = _lines(there, {cell.name: [97.0, 97.5]}) | _lines(table, {cell.name: [97.25]})
    assert f"| {cell.title} | 97.00 | 97.25 | +0.25 (one seed) | 1 |" in reporting._beside(table, done)


def test_a_table_without_a_page_or_expected_numbers_is_on_the_last_page():
    own = with_cells(TABLES["fashion_mnist"], *TABLES["fashion_mnist"].cells).model_copy(update={"name": "new_idea"})
    page = reporting.pages({"new_idea": own}, {own.cells[0].settings.named(0): {"accuracy": 0.5}})["results-beyond"]
    assert '<a id="new-idea"></a>' in page
    assert f"| {own.cells[0].title} | not in the paper | 50.00 |  | 1 of {len(own.cells[0].seeds)} |" in page


def test_where_runs_come_from_says_whether_they_repeat_today():
    table = TABLES["consumption"]
    line = {"code": "0.1.0+abc", "wall_seconds": 36.0, "machine": {"torch": "2.0", "python": "3.11"}}
    ids = [cell.settings.named(0) for cell in table.cells]
    old = provenance(table, {ids[0]: line, ids[1]: {**line, "code": "0.1.0+def"}})
    assert old.startswith("*2 runs · 0.02 hours · commits abc, def · draws 1 (today")
    assert "at its commit, not today · python 3.11, torch 2.0*" in old
    new = provenance(table, {ids[0]: {**line, "draws_version": DRAWS_VERSION}})
    assert f"commit abc · draws {DRAWS_VERSION} (today {DRAWS_VERSION}): repeats to the digit · " in new


def test_a_ledger_is_compared_with_the_target_of_its_strategy():
    line = {"charged": 5, "levels": [1.0, 2.0], "spent": [0.999, 0.999], "settings": {"strategy": "uniform"}}
    assert ledger(line) == (0.999, 0.999)
    assert ledger({**line, "settings": {"strategy": "scale"}})[1] == pytest.approx(0.4995)
    assert ledger({**line, "spent": [0.0, 1.99], "settings": {"strategy": "exclude", "options": {"threshold": 2}}}) == (
        pytest.approx(0.995), pytest.approx(0.995),
    )  # fmt: skip
    assert ledger({**line, "spent": [0.999, 2.01], "settings": {"strategy": "scale"}})[0] > 1


def test_the_pages_in_the_documentation_are_rendered_from_the_results():
    every = reporting.pages(TABLES, DONE)
    assert {path.stem for path in reporting.DOCS.glob("results*.md")} == set(every)
    for name, page in every.items():
        found = (reporting.DOCS / f"{name}.md").read_text(encoding="utf-8")
        assert found == page, f"{name}: python -m experiments report"


def test_every_number_of_the_pages_is_computed_again_by_other_code():
    command = [sys.executable, str(ROOT / "benchmarks" / "recompute_results.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) cells compared, 0 differ", done.stdout)[1]) > 2_000


def test_figures_are_drawn_from_runs(tmp_path):
    table = TABLES["consumption"]
    done = {c.settings.named(0): run_cell(c.settings) for c in table.cells}
    figures.draw({"consumption": table}, done, tmp_path)
    assert (tmp_path / "consumption.svg").read_text().lstrip().startswith("<?xml")
    figures.draw(TABLES, {}, tmp_path / "none")
    assert list((tmp_path / "none").iterdir()) == []


@pytest.mark.parametrize("name", ["figure_advantage", "convergence"])
def test_a_figure_has_the_cells_that_were_run_and_no_empty_row(name, tmp_path, monkeypatch):
    table = TABLES[name]
    scale = next(cell for cell in table.cells if "scale" in cell.name)
    one = scale.settings.named(0)
    drawn = []
    monkeypatch.setattr(figures.plt, "close", drawn.append)
    figures.draw({name: table}, {one: DONE[one]}, tmp_path)
    assert drawn[0].axes[0].get_legend_handles_labels()[1] == [f"{scale.title} (1 of {len(scale.seeds)} seeds)"]


def test_the_advantage_has_a_band_over_seeds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures.plt, "close", drawn.append)
    figures.draw({"figure_advantage": TABLES["figure_advantage"]}, DONE, tmp_path)
    ends = [[row["accuracy"] for row in run["curve"]][-1] for run in lines("figure_advantage", "mnist-dpsgd").values()]
    band = drawn[0].axes[0].collections[0].get_paths()[0].vertices
    last = band[band[:, 0] == band[:, 0].max(), 1]
    assert np.ptp(last) == pytest.approx(2 * 100 * np.std(ends, ddof=1))


def test_every_kept_run_belongs_to_a_cell_and_met_its_budgets():
    wanted = {c.settings.named(seed): c.settings for table in TABLES.values() for c in table.cells for seed in c.seeds}
    for each in protocols().values():
        wanted |= each.runs(DONE)
    for line in DONE.values():
        settings = wanted[line["id"]]
        assert settings.model_dump() | line["settings"] == settings.model_dump()  # whole: a default may change
        assert set(settings.model_dump(exclude_defaults=True)) <= set(line["settings"])  # later settings: the default
        found = ledger(line)
        assert found is None or (found[1] >= 0.99 and found[0] <= 1)
        assert re.fullmatch(r"[\d.]+\+[0-9a-f]{12}", line["code"])  # a commit, and not "-dirty"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sample", "scale"])
def test_a_gpu_computes_the_cell_that_a_cpu_computes(kind):
    settings = Settings(**TINY | TRAININGS[kind], evaluations=2)
    gpu, cpu = (run_cell(settings, device=device) for device in ("cuda", "cpu"))
    assert (gpu["plan"], gpu["spent"]) == (cpu["plan"], cpu["spent"])
    for there, here in zip(gpu["groups"], cpu["groups"], strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-3)


def test_the_page_of_persons_has_the_gain_of_the_results():
    """The gain of one budget per person over divided rows, for one row, under DP-SGD, at small epsilons."""
    page, results = (
        (reporting.DOCS / name).read_text(encoding="utf-8") for name in ("persons.md", "results-beyond.md")
    )
    gains = []
    for data in ("Adult", "Credit default"):
        table = results.partition(f"**{data}, ε = 0.1")[2].partition("\n\n**")[0]
        scores = {
            name: float(score) for name, score in re.findall(r"^\| ((?:person|rows), \w+ ?\w*) \| (\S+)", table, re.M)
        }
        gains.append(scores["person, one row"] - scores["rows, divided"])
    words = f"{min(gains):.1f} to {max(gains):.1f} points better for one row under DP-SGD at small ε"
    assert words in " ".join(page.split())


def test_rows_that_share_a_budget_spend_that_of_their_person():
    """By group privacy, k rows at (ε/k, δ/(k e^{(k-1)ε/k})) are (ε, δ) for all."""
    few = {"dataset": "adult", "strategy": "scale", "steps": 1, "batch_size": 1, "clip_norm": 1.0}
    settings = visits.VisitSettings(**few, shares={"2": 1.0}, budget_of="row, divided")
    budgets = visits.budgets_of(settings, np.array([0, 0, 0, 1]), 2, seed=0)
    pairs = list(zip(budgets.epsilons[budgets.group], budgets.delta[budgets.group], strict=True))
    for (epsilon, delta), k in zip(pairs, (3, 3, 3, 1), strict=True):
        assert k * epsilon == pytest.approx(2.0)
        assert k * math.exp((k - 1) * epsilon) * delta == pytest.approx(1e-5)


def test_persons_of_visits_have_three_rows_or_one():
    sizes = np.bincount(visits.persons_of_rows(30_000, np.random.default_rng(0)))
    assert set(sizes[:-1].tolist()) == {1, 3}
    assert np.mean(sizes == 1) == pytest.approx(0.3, abs=0.02)
