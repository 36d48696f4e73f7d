"""The result of a membership attack: statistics by definition, tables, sentences, JSON, and what none may show."""

from __future__ import annotations

import itertools
import json
import re
import stat
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, norm, ttest_ind

from epsilons import Budgets, Recipe, plan
from epsilons.auditing.membership import draw, outcomes, paired
from epsilons.auditing.membership.analysis import _widened, analyse, randomisation_test, record_gaps
from epsilons.auditing.membership.attacks import Signals
from epsilons.auditing.membership.outcomes import (
    FEWEST_ALARMS,
    RATES,
    certified,
    clopper_pearson,
    over_targets,
    roc,
    target_auc,
)
from epsilons.core.disclosure import PLAN_SUPPRESSED
from epsilons.errors import InputError
from epsilons.reporting import html
from epsilons.reporting.membership import BELOW, CHOSEN, LIMITS, OF_RUN, PLACEBO_HELPS, recognised

NOT_COVERED = (
    "These shadows were trained on the real records, seeded, 40 times: no guarantee covers them, their scores or this "
    "result. Nothing is charged to any budget or registry because nothing may be released; publishing these numbers "
    "publishes statistics of private data. Choosing a plan by them is tuning on private data."
)


def signals_of(member: np.ndarray) -> Signals:
    nothing = np.broadcast_to(np.float32(0), member.shape)
    return Signals(member, nothing, nothing, nothing, np.zeros((len(member), 0), dtype=np.float32))


def made_for(epsilons_of_records: np.ndarray, strategy: str = "sample", accountant: str = "rdp"):
    """(budgets, plan) with one epsilon per record."""
    budgets = Budgets(epsilons_of_records, delta=1e-5)
    return budgets, plan(budgets, Recipe(20, len(epsilons_of_records) / 10, 1.0), strategy, accountant)


def scores_of(member: np.ndarray, shift: np.ndarray, seed: int = 0) -> np.ndarray:
    """Normal scores; shift: (records,) what membership adds."""
    noise = np.random.default_rng([3, seed]).standard_normal(member.shape)
    return (noise + member * shift).astype(np.float32)


def analysed(budgets, made, shift=(0.1, 0.3), shadows=40, **options):
    """The result of two attacks, the second one without any signal."""
    member = np.random.default_rng(1).random((shadows, budgets.records)) < 0.5
    gains = np.linspace(*shift, len(budgets.groups))[budgets.group]
    scores = {"strong": scores_of(member, gains), "blind": scores_of(member, 0 * gains, 1)}
    return analyse(signals_of(member), scores, made, budgets.group, **{"dealt_at_random": True} | options)


@pytest.fixture(scope="module")
def two():
    return made_for(np.repeat([1.0, 4.0], 150))


@pytest.fixture(scope="module")
def result(two):
    return analysed(*two)


# -- values --------------------------------------------------------------------------------------------------------


def test_a_result_has_every_attack_on_every_group(result, two):
    assert result.names == ("strong", "blind")
    assert [(one.attack, one.group) for one in result.attacks] == [(name, g) for name in result.names for g in (0, 1)]
    assert [(row.label, row.epsilon, row.records) for row in result.groups] == [("1", 1.0, 150), ("4", 4.0, 150)]
    assert (result.plan, result.shadows, result.records) == (two[1].digest, 40, 300)
    assert result.of("strong", 1).auc.value == np.mean(result.target_auc["strong"][:, 1])
    assert result.of("strong", 0).auc.value < result.of("strong", 1).auc.value
    with pytest.raises(InputError, match="There are 2 rows"):
        result.of("strong", 2)


def test_the_interval_for_other_records_contains_that_for_these(result):
    for one in result.attacks:
        assert one.auc_of_others.low <= one.auc.low < one.auc.value < one.auc.high <= one.auc_of_others.high
    for one in result.differences:
        assert one.of_others.low <= one.auc.low < one.auc.value < one.auc.high <= one.of_others.high


def test_a_difference_is_paired_by_target_and_has_a_p_value(result):
    strong = result.difference("strong", 0, 1)
    by_target = result.target_auc["strong"][:, 1] - result.target_auc["strong"][:, 0]
    assert strong.auc.value == by_target.mean()
    assert strong.ordered == np.mean(by_target > 0) > 0.6
    assert 1e-4 <= strong.p_value < 1e-3
    assert result.difference("blind", 0, 1).p_value > 0.01


def test_a_result_repeats_to_the_bit_with_or_without_other_attacks(two, result):
    assert analysed(*two).to_dict(targets=True) == result.to_dict(targets=True)
    member = np.random.default_rng(1).random((40, 300)) < 0.5
    scores = {"strong": scores_of(member, np.linspace(0.1, 0.3, 2)[two[0].group])}
    alone = analyse(signals_of(member), scores, two[1], two[0].group, dealt_at_random=True)
    assert alone.attacks == tuple(one for one in alone.attacks if one.attack == "strong")
    assert alone.to_dict()["attacks"] == result.to_dict()["attacks"][:2]
    assert alone.differences == result.differences[:1]


# -- the certified curve -------------------------------------------------------------------------------------------


def test_scores_that_separate_perfectly_exceed_what_the_plan_certifies():
    budgets, made = made_for(np.repeat([0.1, 0.2], 100), accountant="pld")
    broken = analysed(budgets, made, shift=(50.0, 50.0), shadows=8)
    assert [one.exceeds_certified for one in broken.attacks] == [True, True, False, False]
    assert any("strong on 0.1, strong on 0.2: the ROC is above" in sentence for sentence in broken.sentences)
    assert BELOW not in broken.sentences


def test_an_attack_slightly_above_the_certified_curve_is_found_and_one_below_is_not():
    """One group in every step: the curve is that of N(0, 1) against N(µ, 1), so the shift decides."""
    budgets = Budgets(np.full(400, 2.0), delta=1e-5)
    made = plan(budgets, Recipe(1, 400, 1.0), "uniform", "pld")
    mu = 1 / float(made.noise_multiplier[0])
    below, above = (analysed(budgets, made, shift=(part * mu,) * 2, shadows=64) for part in (0.8, 1.3))
    assert not below.exceeds_certified
    assert [one.attack for one in above.exceeds_certified] == ["strong"]
    assert below.of("strong", 0).share_of_certified < 1 < above.of("strong", 0).share_of_certified


def test_the_share_of_the_certified_advantage_is_given_only_where_it_is_clear(two, result):
    assert 0.02 < result.of("strong", 1).share_of_certified < 0.6
    assert result.of("blind", 0).share_of_certified is None  # what is certified is within the interval of the attack
    assert result.table()[1][2][-1] == "unclear"
    assert analysed(*two, shadows=256).of("blind", 1).share_of_certified < 0.15


def test_a_plan_of_one_group_bounds_all_groups_of_a_placebo(two):
    budgets, _ = two
    one_budget = plan(Budgets(np.full(300, 1.0), delta=1e-5), Recipe(20, 30, 1.0), "uniform", "rdp")
    placebo = analysed(budgets, one_budget, shift=(0.1, 0.1), groups=budgets.groups)
    assert placebo.groups[0].certified_auc == placebo.groups[1].certified_auc
    assert [row.label for row in placebo.groups] == ["1", "4"]


# -- small and many groups -----------------------------------------------------------------------------------------


def records_shown(value) -> list[int]:
    """Every number of records anywhere in a JSON value."""
    if isinstance(value, dict):
        return [n for key, one in value.items() for n in ([one] if key == "records" else records_shown(one))]
    return [n for one in value for n in records_shown(one)] if isinstance(value, list) else []


def test_groups_of_fewer_than_20_records_are_in_no_output_on_their_own(tmp_path):
    budgets, made = made_for(np.repeat([0.5, 1.0, 3.0, 4.0], [7, 150, 12, 150]))
    few = analysed(budgets, made)
    assert few.suppressed
    assert len(few.groups) == 2
    assert min(records_shown(few.to_dict(targets=True))) >= 20
    assert {row.epsilon for row in few.groups} <= {None, 1.0, 4.0}
    assert np.shape(few.target_auc["strong"]) == (40, 2)
    assert PLAN_SUPPRESSED in few.sentences
    assert "certified" not in " ".join([*few.table()[0], *few.rate_table()[0]])
    assert "no attack" not in str(few).split("No attack's ROC")[0]
    picture = draw(few, tmp_path / "roc.svg").read_text(encoding="utf-8")
    assert "stroke-dasharray" not in picture


def test_a_merged_row_does_not_depend_on_what_its_few_records_chose():
    base = np.repeat([1.0, 2.0, 4.0], [60, 5, 60])
    other = np.repeat([1.0, 3.0, 4.0], [60, 5, 60])
    first, second = (analysed(*made_for(one), shadows=10, shift=(0.2, 0.2)) for one in (base, other))
    assert first.table() == second.table()


def test_many_groups_become_at_most_eight_rows_of_neighbours():
    budgets, made = made_for(np.repeat(np.linspace(1.0, 5.0, 30).round(2), 25))
    many = analysed(budgets, made, shadows=6)
    assert 4 <= len(many.groups) <= 8
    assert not many.suppressed
    assert sum(row.records for row in many.groups) == 750
    areas = [row.certified_auc for row in many.groups]
    assert areas == sorted(set(areas))
    pairs = [(one.strict, one.loose) for one in many.differences if one.attack == "strong"]
    last = len(many.groups) - 1
    assert pairs == [*((row, row + 1) for row in range(last)), (0, last)]


def test_with_an_epsilon_of_their_own_records_are_shown_in_rows_with_rounded_bounds():
    budgets, made = made_for(np.linspace(1.0, 5.0, 400).round(3))
    many = analysed(budgets, made, shadows=6)
    assert [(row.label, row.epsilon, row.records) for row in many.groups] == [("≤ 2", None, 100), ("≤ 5", None, 300)]


def test_fewer_than_20_records_are_refused():
    budgets, made = made_for(np.repeat([1.0, 4.0], [5, 14]))
    with pytest.raises(InputError, match="fewer than 20 records share, got 19"):
        analysed(budgets, made, shadows=4)


# -- texts ---------------------------------------------------------------------------------------------------------


def test_every_output_says_that_no_guarantee_covers_it_and_that_it_proves_nothing(result):
    for text in (str(result), " ".join(result.sentences), json.dumps(result.to_dict())):
        assert NOT_COVERED in text
        assert LIMITS in text
        assert OF_RUN in text
        assert "one run by this plan. What epsilon promises is the upper limit" in text
        assert "does not prove privacy" in text
        assert "does not notice missing noise" in text
    assert result.to_dict()["not_covered"] == NOT_COVERED


def test_the_page_of_an_attack_says_of_what_its_numbers_are_and_shows_no_backtick(result):
    page = html.attack_page(result)
    assert page.count("certified: at most, in this run</th>") == 1 + len(result.attacks[0].found)
    for words in ("promises is the upper limit", "p is of another statistic", "another game than the odds"):
        assert words in page.partition("What it means")[2]
    hidden = html.attack_page(replace(result, suppressed=True))
    assert ["the curve that no attack exceeds" in one for one in (page, hidden)] == [True, False]
    drawn = [bool(re.search('class="bound"[^>]* d="M', one)) for one in (page, hidden)]
    assert drawn == [True, False]
    assert "`" not in page


@pytest.mark.parametrize(
    ("measured", "exceeds", "by_chance"), [(0.61, False, True), (0.61, True, False), (0.5, False, False)]
)
def test_what_is_measured_above_the_certified_curve_by_chance_is_called_chance(result, measured, exceeds, by_chance):
    row, best = replace(result.groups[0], certified_auc=0.6), result.of("strong", 0)
    best = replace(best, auc_of_others=replace(best.auc_of_others, value=measured), exceeds_certified=exceeds)
    sentence = recognised(row, best, suppressed=False)
    assert "no attack is right more than 60.0 times" in sentence
    assert ("above that is chance" in sentence) is by_chance
    assert "chance" not in recognised(row, best, suppressed=True)


def test_rows_have_the_names_of_tiers_and_merged_rows_have_none(result):
    named = replace(result, groups=(*result.groups[:1], replace(result.groups[1], epsilon=None))).named({"strict": 1.0})
    assert [row.label for row in named.groups] == ["1 (strict)", "4"]
    assert named.sentences[0].startswith("epsilon 1 (strict): ")
    assert ">1 (strict)</td>" in html.attack_page(named)
    assert result.named(None) == result


def test_the_sentences_give_the_numbers_of_the_strongest_attack(result):
    strong = result.of("strong", 1)
    first, second, third, *_ = result.sentences
    assert first.startswith("epsilon 1: ")
    certified = np.ceil(1000 * result.groups[1].certified_auc) / 10
    assert f"is right {100 * strong.auc.value:.1f} times in 100 (strong, 95 %: " in second
    assert f"in this game, no attack is right more than {certified:g} times" in second
    assert f"one false alarm in 100 non-members recognises {100 * strong.found[0].found.value:.3g} of 100" in second
    assert third.startswith("strong: AUC of epsilon 4 minus AUC of epsilon 1 is +")
    assert BELOW in result.sentences
    assert CHOSEN not in result.sentences


def test_where_records_chose_their_groups_the_result_says_what_p_values_cannot(two):
    chosen = analysed(*two, shadows=6, dealt_at_random=False).sentences
    assert chosen[chosen.index(CHOSEN) + 1] == PLACEBO_HELPS


def test_tables_have_one_line_per_attack_and_group_and_per_difference(result):
    headers, rows = result.table()
    assert headers[:5] == ["attack", "epsilon", "records", "AUC", "95 %"]
    assert headers[-1] == "share"
    assert [row[:3] for row in rows] == [[name, e, "150"] for name in ("strong", "blind") for e in ("1", "4")]
    assert all(len(row) == len(headers) for row in rows)
    headers, rows = result.rate_table()
    assert headers == ["attack", "epsilon", "TPR at 1 %", "certified", "TPR at 0.1 %", "certified"]
    found = result.of("strong", 1).found[0]
    assert rows[1][2].startswith(f"{100 * found.found.value:.3g} [")
    shown = float(rows[1][3].removeprefix("≤ "))
    assert 100 * found.certified <= shown <= 100 * found.certified * 1.01  # a bound is rounded up
    assert all(len(row) == len(headers) for row in rows)
    headers, rows = result.difference_table()
    assert [row[:2] for row in rows] == [["strong", "4 − 1"], ["blind", "4 − 1"]]
    assert all(len(row) == len(headers) for row in rows)


def test_rates_without_ten_false_alarms_are_missing_in_table_and_json(two):
    few = analysed(*two, shadows=6)  # 450 non-members a group
    assert [at.found for at in few.of("strong", 0).found] == [None, None]
    headers, rows = few.rate_table()
    assert {row[headers.index("TPR at 1 %")] for row in rows} == {"too few false alarms"}
    found = few.to_dict()["attacks"][0]["found"]
    assert [(at["found"], at["false_alarms"]) for at in found] == [(None, None)] * 2
    assert "false alarm in" not in few.sentences[0]


def test_one_target_alone_has_no_interval_over_targets(two):
    alone = analysed(*two, shadows=1)
    assert alone.table()[1][0][4] == "none"
    assert alone.to_dict()["attacks"][0]["auc"]["low"] is None
    json.dumps(alone.to_dict(targets=True), allow_nan=False)


# -- placebo and paired arms ---------------------------------------------------------------------------------------


def test_the_placebo_is_shown_beside_each_difference(two):
    placebo = analysed(*two, shift=(0.2, 0.2))
    beside = analysed(*two, placebo=placebo)
    headers, rows = beside.difference_table()
    assert headers[-1] == "placebo"
    assert [row[-1] for row in rows] == [f"{one.auc.value:+.4f}" for one in placebo.differences]
    assert any("With one budget for all, the same groups differ by" in sentence for sentence in beside.sentences)
    assert beside.to_dict()["placebo"] == placebo.to_dict()
    for row in (0, 1):
        expected = paired(beside, placebo, "strong", row)
        assert beside.minus_placebo["strong"][row] == expected
        assert beside.to_dict()["minus_placebo"]["strong"][row] == vars(expected)
        assert any(f"epsilon {(1, 4)[row]}: {expected.value:+.4f} (" in sentence for sentence in beside.sentences)
    assert beside.minus_placebo["strong"][0].high < 0 < beside.minus_placebo["strong"][1].low


def test_a_placebo_of_other_groups_is_refused(two, result):
    with pytest.raises(InputError, match="The placebo needs the same 1 groups"):
        analysed(*made_for(np.full(300, 2.0), "uniform"), placebo=result)


def test_arms_with_the_same_coins_are_compared_target_by_target(two, result):
    weaker = analysed(*two, shift=(0.1, 0.2))
    difference = paired(result, weaker, "strong", 1)
    by_target = result.target_auc["strong"][:, 1] - weaker.target_auc["strong"][:, 1]
    assert difference.value == by_target.mean() > 0
    unpaired = np.hypot(
        *(np.ptp([one.of("strong", 1).auc.low, one.of("strong", 1).auc.high]) for one in (result, weaker))
    )
    assert difference.high - difference.low < unpaired / 2  # the same noise in both arms
    assert paired(result, weaker, "strong", 0).value == 0
    for attack, row in (("weak", 0), ("strong", 2)):
        with pytest.raises(InputError, match="has no row"):
            paired(result, weaker, attack, row)
    with pytest.raises(InputError, match="the same targets, got 40 and 6"):
        paired(result, analysed(*two, shadows=6), "strong", 0)


# -- JSON and secrecy ----------------------------------------------------------------------------------------------


def test_the_json_is_saved_for_its_owner_alone_and_holds_no_single_scores(result, tmp_path):
    path = result.save(tmp_path / "membership.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert "target_auc" not in saved

    def lengths(value) -> list[int]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [len(inner), *(n for one in inner for n in lengths(one))]

    assert max(lengths(saved)) < 300  # nothing has an entry per record
    assert len(result.to_dict(targets=True)["target_auc"]["strong"]) == 40


def test_a_repr_shows_no_arrays(result):
    text = repr(result)
    assert len(text) < 1000
    assert "array" not in text


# -- inputs --------------------------------------------------------------------------------------------------------


def test_inputs_that_do_not_fit_are_refused(two):
    budgets, made = two
    member = np.random.default_rng(1).random((4, 300)) < 0.5
    scores = np.zeros((4, 300), dtype=np.float32)
    holed = scores.copy()
    holed[2, 3] = np.nan
    three = made_for(np.repeat([1.0, 2.0, 4.0], 100))[1]
    for wrong, message in (
        ({"scores": {}}, "at least one attack"),
        ({"scores": {"a": scores[:, :9]}}, re.escape("(4, 300), got (4, 9)")),
        ({"scores": {"a": holed}}, "must be numbers"),
        ({"group": budgets.group + 1}, "indices from 1 to 2"),
        ({"group": budgets.group[:70]}, "got 70 indices"),
        ({"plan": three, "groups": budgets.groups}, "one row for each of 2 groups, got 3"),
    ):
        given = {"scores": {"a": scores}, "plan": made, "group": budgets.group, "dealt_at_random": True} | wrong
        with pytest.raises(InputError, match=message):
            analyse(signals_of(member), **given)


# -- the picture ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf"])
def test_the_picture_is_drawn_for_its_owner_alone(result, tmp_path, ending):
    path = draw(result, tmp_path / f"roc{ending}", "blind")
    assert path.stat().st_size > 5_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_picture_has_a_curve_and_a_dashed_bound_for_at_most_six_groups(tmp_path):
    budgets, made = made_for(np.repeat(np.arange(1.0, 8.0), 40))
    text = draw(analysed(budgets, made, shadows=12), tmp_path / "roc.svg").read_text(encoding="utf-8")
    assert text.count("stroke-dasharray") == 6 + 1  # and the line of the legend
    assert "<!-- ε = 1 -->" in text
    assert "<!-- ε = 7 -->" in text


def test_the_picture_refuses_other_endings_and_unknown_attacks(result, tmp_path):
    with pytest.raises(InputError, match=r"got 'roc\.gif'"):
        draw(result, tmp_path / "roc.gif")
    with pytest.raises(InputError, match="got 'rmia'"):
        draw(result, tmp_path / "roc.svg", "rmia")


# -- size ----------------------------------------------------------------------------------------------------------

LARGE = """
import resource, time
import numpy as np
import epsilons
from epsilons.auditing.membership.analysis import analyse
from epsilons.auditing.membership.attacks import Signals

shadows, records = 512, 50_000
rng = np.random.default_rng(0)
budgets = epsilons.Budgets.from_shares({10.0: 0.5, 20.0: 0.5}, records=records, delta=1e-5, seed=0)
plan = epsilons.plan(budgets, epsilons.Recipe(200, 5000, 1.0), "sample", "rdp")
member = rng.random((shadows, records), dtype=np.float32) < 0.5
signal = [rng.standard_normal((shadows, records), dtype=np.float32) for _ in range(3)]
signals = Signals(member, *signal, np.zeros((shadows, 0), dtype=np.float32))
scores = {"a": signal[0] + member * np.float32(0.3), "b": signal[1] + member * np.float32(0.2)}
start = time.process_time()
result = analyse(signals, scores, plan, budgets.group, dealt_at_random=True)
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_512_shadows_of_50_000_records_take_a_minute_and_one_and_a_half_gigabytes():
    """333 MB of signals and 205 MB of scores are in memory beside the statistics."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.split())
    assert seconds < 60
    assert peak < 1.5e9


# ==== Statistics of membership inference: against counting, closed forms, and simulations with known answers.


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng([7, *seed])


def coins(shadows: int, records: int, seed: int = 0) -> np.ndarray:
    return rng(seed).random((shadows, records)) < 0.5


def gaussian(member: np.ndarray, shift: float, seed: int = 1) -> np.ndarray:
    return (rng(seed).standard_normal(member.shape) + shift * member).astype(np.float32)


# -- AUC -----------------------------------------------------------------------------------------------------------


def auc_of_pairs(scores: np.ndarray, member: np.ndarray) -> float:
    """By definition: the share of pairs in which the member has the higher score, ties counting one half."""
    gaps = scores[member][:, None] - scores[~member][None]
    return float(np.mean((gaps > 0) + 0.5 * (gaps == 0)))


@pytest.mark.parametrize("values", [2, 5, 1000])
def test_auc_of_each_target_equals_counting_all_pairs(values):
    member, group = coins(6, 40), np.arange(40) % 2
    scores = rng(2).integers(0, values, (6, 40)).astype(np.float32)
    counted = [[auc_of_pairs(scores[k, group == g], member[k, group == g]) for g in (1, 0)] for k in range(6)]
    np.testing.assert_allclose(target_auc(scores, member, group, [1, 0]), counted, rtol=1e-12)


def test_auc_does_not_depend_on_how_many_targets_are_ranked_at_once(monkeypatch):
    member, group = coins(7, 30), np.zeros(30, dtype=np.int64)
    scores = gaussian(member, 1.0)
    at_once = target_auc(scores, member, group, [0])
    monkeypatch.setattr(outcomes, "_AT_ONCE", 61)
    np.testing.assert_array_equal(target_auc(scores, member, group, [0]), at_once)


def test_a_target_with_members_only_has_no_auc_and_is_left_out_of_the_mean():
    member, group = np.array([[True, True, True], [True, False, True]]), np.zeros(3, dtype=np.int64)
    auc = target_auc(np.float32([[1, 2, 3], [1, 2, 3]]), member, group, [0])[:, 0]
    assert np.isnan(auc[0])
    assert over_targets(auc).value == auc[1] == 0.5


def test_auc_and_rates_of_a_gaussian_shift_are_those_of_the_closed_form():
    member = coins(60, 1000)
    scores = gaussian(member, 0.8)
    auc = over_targets(target_auc(scores, member, np.zeros(1000, dtype=np.int64), [0])[:, 0])
    error = (auc.high - auc.value) / 2
    assert abs(auc.value - norm.cdf(0.8 / np.sqrt(2))) < 4 * error
    assert error < 0.003
    for rate in (0.1, 0.01, 0.001):
        found = roc(scores, member, rng(3)).at(rate)
        expected = norm.cdf(0.8 - norm.isf(rate))
        assert abs(found.value - expected) < 2 * (found.high - found.low)
        assert found.value == pytest.approx(expected, rel=0.15)


def test_without_any_signal_auc_and_roc_are_those_of_guessing():
    member = coins(64, 500)
    scores = gaussian(member, 0.0)
    auc = over_targets(target_auc(scores, member, np.zeros(500, dtype=np.int64), [0])[:, 0])
    assert abs(auc.value - 0.5) < 2 * (auc.high - auc.value)
    curve = roc(scores, member, rng(3))
    assert (curve.band <= curve.rate).all()
    assert ((curve.low <= curve.rate) & (curve.rate <= curve.high)).mean() > 0.8


# -- ROC -----------------------------------------------------------------------------------------------------------


def best_rate(scores: np.ndarray, member: np.ndarray, rate: float) -> tuple[float, int]:
    """By definition: over all thresholds, the largest true-positive rate with at most this false-positive rate."""
    outside, inside = scores[~member], scores[member]
    allowed = [t for t in np.unique(scores) if (outside > t).sum() <= rate * len(outside) + 1e-9]
    return max((float((inside > t).mean()), int((outside > t).sum())) for t in allowed)


@pytest.mark.parametrize("values", [4, 30, 100_000])
def test_true_positive_rates_equal_counting_at_every_threshold(values):
    member = coins(9, 60)
    scores = (rng(2).integers(0, values, member.shape) + values // 3 * member).astype(np.float32)
    curve = roc(scores, member, rng(3))
    counted = {rate: best_rate(scores, member, rate) for rate in RATES}
    shown = [rate for rate, (_, alarms) in counted.items() if alarms >= FEWEST_ALARMS]
    assert 0 < len(shown) < len(RATES)
    np.testing.assert_array_equal(curve.rate, shown)
    np.testing.assert_allclose(curve.found, [counted[rate][0] for rate in shown], rtol=1e-12)
    np.testing.assert_array_equal(curve.false_alarms, [counted[rate][1] for rate in shown])


def test_no_rate_is_given_with_fewer_than_ten_false_alarms():
    member = np.tile(np.arange(40) % 2 == 0, (50, 1))  # 1,000 non-members
    scores = gaussian(member, 1.0)
    assert roc(scores, member, rng(3)).at(0.01).value > 0.01
    assert roc(scores[:49], member[:49], rng(3)).at(0.01) is None  # 9 of 980
    tied = np.minimum(scores, np.sort(scores[~member])[-11])  # the 11 highest are equal, and 11 would be too many
    assert roc(tied, member, rng(3)).at(0.01) is None


def test_intervals_contain_the_value_and_are_never_narrower_than_clopper_pearson():
    member = coins(30, 80)
    curve = roc(gaussian(member, 0.7), member, rng(3))
    low, high = clopper_pearson(np.rint(curve.found * member.sum()), member.sum())
    assert (curve.low <= low).all()
    assert (curve.high >= high).all()
    assert (curve.band <= curve.found).all()


def test_one_target_alone_has_the_interval_of_clopper_and_pearson():
    member = coins(1, 2000)
    curve = roc(gaussian(member, 1.0), member, rng(3))
    low, high = clopper_pearson(np.rint(curve.found * member.sum()), member.sum())
    np.testing.assert_allclose([curve.low, curve.high], [low, high], rtol=1e-12)
    assert np.isnan(over_targets([0.6]).low)


def test_clopper_pearson_is_that_of_scipy():
    for hits, trials in ((0, 7), (3, 7), (7, 7), (40, 900)):
        reference = binomtest(hits, trials).proportion_ci(0.95, method="exact")
        np.testing.assert_allclose(clopper_pearson(hits, trials), (reference.low, reference.high), atol=1e-12)


# -- coverage ------------------------------------------------------------------------------------------------------

#: Shadows, records, and standard deviations of: shadows, records, gain by record, gain by shadow.
SIMULATED = [
    (48, 150, 0.1, 0.3, 0.4, 0.1),
    (48, 150, 0.0, 0.0, 0.0, 0.0),
    (16, 60, 0.2, 0.3, 0.5, 0.2),
    (64, 100, 0.0, 0.2, 1.0, 0.0),
]


def coverage(setting: tuple[float, ...], repetitions: int, shift: float = 0.4) -> dict[str, float]:
    """How often the nominal 95 % intervals contain the values of the distribution that made the scores."""
    shadows, records, of_shadow, of_record, gain, gain_of_shadow = setting
    scale_out = np.sqrt(1 + of_shadow**2 + of_record**2)
    scale_in = np.sqrt(scale_out**2 + gain**2 + gain_of_shadow**2)
    true_auc = norm.cdf(shift / np.sqrt(2 * (1 + of_record**2) + gain**2 + gain_of_shadow**2))
    true_found = norm.cdf((shift - norm.isf(RATES) * scale_out) / scale_in)
    held: dict[str, list[bool]] = {"auc": [], "found": [], "band": []}
    for repetition in range(repetitions):
        draw = rng(11, repetition)
        member = draw.random((int(shadows), int(records))) < 0.5
        effects = of_shadow * draw.standard_normal((len(member), 1)) + of_record * draw.standard_normal(int(records))
        gains = gain * draw.standard_normal(int(records)) + gain_of_shadow * draw.standard_normal((len(member), 1))
        scores = (effects + member * (shift + gains) + draw.standard_normal(member.shape)).astype(np.float32)
        curve = roc(scores, member, rng(3))
        over = over_targets(target_auc(scores, member, np.zeros(int(records), dtype=np.int64), [0])[:, 0])
        auc, found = _widened(over, curve.auc_variance, len(member)), curve.at(0.1)
        held["auc"].append(auc.low <= true_auc <= auc.high)
        held["found"].append(found.low <= true_found[np.isclose(RATES, 0.1)][0] <= found.high)
        held["band"].append(bool((curve.band <= true_found[np.isin(RATES, curve.rate)]).all()))
    return {name: float(np.mean(values)) for name, values in held.items()}


def test_intervals_cover_when_records_differ_in_exposure():
    """Without the variance due to records, the AUC is covered in about 40 of 100."""
    covered = coverage(SIMULATED[-1], 60)
    assert all(share > 0.85 for share in covered.values()), covered


@pytest.mark.slow
@pytest.mark.parametrize("setting", SIMULATED)
def test_nominal_95_percent_intervals_cover_in_90_to_99_percent(setting):
    covered = coverage(setting, 600)
    assert 0.9 <= covered["auc"] <= 0.99
    assert 0.9 <= covered["found"] <= 0.99
    assert covered["band"] >= 0.94  # one-sided and simultaneous: Bonferroni is on the safe side


# -- tests of whether groups differ --------------------------------------------------------------------------------


def test_the_randomisation_test_agrees_with_all_relabelings():
    values = np.array([0.3, 0.1, 0.5, 0.9, 1.4, 0.8, 0.2, 1.1])
    labels = np.array([False] * 5 + [True] * 3)

    def welch(chosen: tuple[int, ...]) -> float:
        inside = np.isin(np.arange(8), chosen)
        return abs(ttest_ind(values[inside], values[~inside], equal_var=False).statistic)

    every = [welch(chosen) for chosen in itertools.combinations(range(8), 3)]
    exact = np.mean(np.array(every) >= welch((5, 6, 7)) * (1 - 1e-9))
    p_value = randomisation_test(values[None], labels, rng(0), 20_000)[0]
    assert abs(p_value - exact) < 4 * np.sqrt(exact * (1 - exact) / 20_000)


def test_the_randomisation_test_rejects_true_hypotheses_as_rarely_as_it_says():
    p_values = [
        randomisation_test(rng(5, i).standard_exponential((1, 30)), np.arange(30) < 8, rng(i), 99) for i in range(400)
    ]
    for level in (0.05, 0.25):
        assert abs(np.mean(np.array(p_values) <= level) - level) < 4 * np.sqrt(level * (1 - level) / 400)


def test_the_smallest_p_value_is_one_in_as_many_as_relabelings_and_the_data():
    values = np.where(np.arange(200) < 100, 0.0, 3.0) + rng(1).standard_normal(200)
    both = np.stack([values, rng(2).standard_normal(200)])
    p_values = randomisation_test(both, np.arange(200) >= 100, rng(0), 999)
    assert p_values[0] == 1 / 1000
    assert p_values[1] > 0.01


def test_records_that_were_never_members_are_left_out_of_the_randomisation_test():
    member = coins(12, 60)
    member[:, 7] = False
    scores = gaussian(member, 1.0)
    gaps = record_gaps(scores, member)
    assert np.flatnonzero(np.isnan(gaps)).tolist() == [7]
    by_hand = [scores[member[:, i], i].mean() - scores[~member[:, i], i].mean() for i in range(7)]
    np.testing.assert_allclose(gaps[:7], by_hand, rtol=1e-5)
    kept, is_looser = np.arange(60) != 7, np.arange(60) >= 30
    without = randomisation_test(gaps[None, kept], is_looser[kept], rng(0), 99)
    np.testing.assert_array_equal(randomisation_test(gaps[None], is_looser, rng(0), 99), without)


def test_groups_too_small_to_compare_have_no_p_value():
    assert np.isnan(randomisation_test(np.ones((2, 5)), np.arange(5) > 3, rng(0), 9)).all()


def test_groups_that_differ_without_any_membership_signal_are_not_told_apart():
    """Members and non-members of one group have higher scores, and nothing depends on the coins."""
    member, group = coins(40, 400), np.arange(400) % 2
    scores = gaussian(member, 0.0) + np.float32(0.6) * group.astype(np.float32)
    assert ttest_ind(scores[0][group == 1], scores[0][group == 0]).pvalue < 1e-4
    assert randomisation_test(record_gaps(scores, member)[None], group == 1, rng(0), 999)[0] > 0.01


# -- the certified curve -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_budgets():
    budgets = Budgets.from_shares({1.0: 0.25, 2.0: 0.25, 4.0: 0.25, 8.0: 0.25}, records=400, delta=1e-5, seed=0)
    options = {"sample": {}, "scale": {}, "exclude": {"threshold": 3.0}}
    return {name: plan(budgets, Recipe(20, 40, 1.0), name, "rdp", **option) for name, option in options.items()}


def one_group(steps: int, noise: float):
    """A plan of one group that takes part in every step; its curve is that of a Gaussian mechanism."""
    budgets = Budgets.from_shares({50.0: 1.0}, records=100, delta=1e-5)
    made = plan(budgets, Recipe(steps, 100, 1.0), "uniform", "rdp")
    phase = replace(made.phases[0], sample_rate=np.ones(1), noise_std=noise * float(made.clip_norm[0]))
    return replace(made, phases=(phase,))


@pytest.mark.parametrize(("steps", "noise"), [(1, 0.7), (1, 2.0), (16, 4.0)])
def test_the_certified_area_of_a_gaussian_mechanism_is_its_closed_form_from_above(steps, noise):
    """µ = √steps / σ, and the area under Φ(Φ⁻¹(a) + µ) is Φ(µ/√2)."""
    bound = certified(one_group(steps, noise), np.array([0]))
    mu = np.sqrt(steps) / noise
    assert norm.cdf(mu / np.sqrt(2)) <= bound.area <= norm.cdf(mu / np.sqrt(2)) + 1e-3
    closed = norm.cdf(norm.ppf(RATES) + mu)
    assert (bound.power >= closed - 1e-12).all()
    assert (bound.power <= closed + 1e-3).all()


def test_a_looser_budget_certifies_less(four_budgets):
    for name in ("sample", "scale"):
        bounds = [certified(four_budgets[name], np.array([group])) for group in range(4)]
        for strict, loose in itertools.pairwise(bounds):
            assert strict.area < loose.area
            assert (strict.power <= loose.power).all()
        assert (np.diff(bounds[0].power) >= 0).all()


def test_the_bound_of_a_merged_row_is_that_of_its_loosest_member_and_of_nobody_less(four_budgets):
    for name, made in four_budgets.items():
        merged = certified(made, np.arange(4))
        for group in range(4):
            assert (merged.power >= certified(made, np.array([group])).power).all(), name
        np.testing.assert_array_equal(merged.power, certified(made, np.array([3])).power)


def test_a_group_that_is_never_drawn_allows_no_attack(four_budgets):
    made = four_budgets["exclude"]
    silent = np.flatnonzero(made.phases[0].sample_rate == 0)
    assert len(silent)
    bound = certified(made, silent[:1])
    assert 0.5 <= bound.area < 0.5005
    np.testing.assert_allclose(bound.power, RATES, rtol=1e-9)
