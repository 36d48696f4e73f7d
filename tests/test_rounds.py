"""A site of federated training: its rounds equal runs of its own, and nothing else of its records leaves it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import epsilons
from epsilons.clipping.engine import HEADROOM, SHRINK
from epsilons.doors import rounds
from epsilons.doors.rounds import Answer, OpenSite, RoundRefused, Site
from epsilons.draws.persons_rows import Draws
from epsilons.draws.randomness import Randomness
from epsilons.errors import InputError
from epsilons.ledger.account import read_account, read_charges
from epsilons.registry import Registry, databases
from hospitals import (
    NAMES,
    RATE,
    a_model,
    a_site,
    averaged,
    data_of,
    farthest,
    first_weights,
    key_of,
    losses,
    same_weights,
    with_momentum,
)
from small_runs import LEVELS, epochs, lines, some_budgets, some_plan

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::epsilons.errors.EpsilonsWarning"),
]


def charged(site: Site) -> int:
    return sum(read_charges(Path(site.run_dir) / "ledger.jsonl", site.plan))


# -- equality: with one process over the union, and with runs of their own ------------------------------------------


def summed_by_hand(name: str, plan: epsilons.Plan, weights: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """Clipped gradients of one site's draw, record by record, plus the site's noise; in 64 bits."""
    model, (inputs, targets) = a_model().double(), data_of(name)
    model.load_state_dict({key: torch.from_numpy(value).double() for key, value in weights.items()})
    group, (phase,), randomness = some_budgets(LEVELS).group, plan.phases, Randomness(key_of(name))
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for record in Draws(plan, group, randomness).at(0, step):
        loss = losses(model, (inputs[record : record + 1].double(), targets[record : record + 1])).sum()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        clip_norm, weight = phase.clip_norm[group[record]], phase.weight[group[record]]
        norm = float(gradient.norm()) * (1 + HEADROOM) ** 0.5  # what is clipped is a little shorter, in every engine
        total += weight * gradient * min(1.0, clip_norm / norm) * SHRINK
    total += torch.from_numpy(randomness.noise(0, step, len(total))) * phase.noise_std
    parts = total.split([value.size for value in weights.values()])
    return {key: part.numpy().reshape(weights[key].shape) for key, part in zip(weights, parts, strict=True)}


def test_three_sites_with_one_draw_per_round_equal_one_process_over_the_union(tmp_path):
    sites = {name: a_site(tmp_path, name) for name in NAMES}
    ours = twin = first_weights()
    expected = sum(site.plan.phases[0].expected_batch for site in sites.values())
    for step in range(4):
        ours = averaged([site.answer("run", step + 1, ours) for site in sites.values()])
        sums = [summed_by_hand(name, site.plan, twin, step) for name, site in sites.items()]
        twin = {key: value - RATE * sum(one[key] for one in sums) / expected for key, value in twin.items()}
        assert farthest(ours, twin) <= 1e-6


def run_of_its_own(name: str, plan: epsilons.Plan, weights, step: int, draws: int, state=None):
    """(weights, state of the optimizer) after these draws of a run without a folder, begun at this step."""
    model = a_model()
    model.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()})
    optimizer = with_momentum(model.parameters())
    if state is not None:
        optimizer.load_state_dict(state)
    key = epsilons.Randomness.with_key(key_of(name))
    with epsilons.make_private(
        model, optimizer, data_of(name), plan, budgets=some_budgets(LEVELS), seed=key
    ) as private:
        for before in range(step):
            private.ledger.charge(0, before)
        private._position.step = step
        for batch in private.batches:
            private.backward(losses(model, batch))
            if private.step() and private.updates == draws:
                break
    return {key: value.numpy().copy() for key, value in model.state_dict().items()}, optimizer.state_dict()


def test_each_site_equals_a_run_of_its_own_from_the_same_weights_to_the_bit(tmp_path):
    sites = {name: a_site(tmp_path, name, optimizer=with_momentum, draws=3) for name in NAMES}
    weights, states = first_weights(), dict.fromkeys(NAMES)
    for number in (1, 2):
        answers = {name: site.answer("run", number, weights) for name, site in sites.items()}
        for name, answer in answers.items():
            step = 3 * (number - 1)
            alone, states[name] = run_of_its_own(name, sites[name].plan, weights, step, 3, states[name])
            assert same_weights(answer.weights, alone)
        weights = averaged(list(answers.values()))


def test_a_site_that_stays_open_sends_what_one_sends_that_is_opened_for_every_round(tmp_path):
    """The same bits, with a refusal and an error in between, and another process afterwards."""
    closed, weights = a_site(tmp_path / "a", optimizer=with_momentum, steps=12, draws=2), first_weights()
    with a_site(tmp_path / "b", optimizer=with_momentum, steps=12, draws=2).kept_open() as site:
        for number in (1, 2, 2, 3):
            expected, found = closed.answer("run", number, weights), site.answer("run", number, weights)
            assert same_weights(expected.weights, found.weights)
            assert (expected.spent, expected.num_examples) == (found.spent, found.num_examples)
            weights = {key: value + 0.1 for key, value in found.weights.items()}
        for wrong in (BAD_WEIGHTS["NaN"], weights):
            with pytest.raises(RoundRefused):
                site.answer("run", 2, wrong)
        assert same_weights(closed.answer("run", 4, weights).weights, site.answer("run", 4, weights).weights)
        with pytest.raises(RoundRefused):
            a_site(tmp_path / "b", optimizer=with_momentum, steps=12, draws=2).answer("run", 5, weights)
    last = a_site(tmp_path / "b", optimizer=with_momentum, steps=12, draws=2)
    for number in (5, 6):
        assert same_weights(closed.answer("run", number, weights).weights, last.answer("run", number, weights).weights)
    with pytest.raises(RoundRefused, match="spent"):
        last.answer("run", 7, weights)


def test_a_difference_is_what_the_round_changed(tmp_path):
    start = first_weights()
    whole = a_site(tmp_path / "a").answer("run", 1, start)
    difference = a_site(tmp_path / "b", sends="difference").answer("run", 1, start)
    assert farthest(difference.weights, {key: whole.weights[key] - start[key] for key in start}) == 0


def test_an_empty_draw_counts_as_one_of_the_round(tmp_path):
    """Batches of one record expected: a third of the draws are empty."""
    site = a_site(tmp_path, plan=some_plan(steps=30, batch_size=1.0), draws=10)
    for number in (1, 2, 3):
        site.answer("run", number, first_weights())
        assert charged(site) == 10 * number
        assert sum(line["kind"] == "update" for line in lines(tmp_path / "north")) == 10 * number


# -- what leaves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [0.0, float("nan"), 1e6])
def test_a_neighbours_record_changes_its_sites_message_by_the_clip_norm_and_no_other(tmp_path, replaced):
    """A record of NaN contributes nothing, so it is as if it were not there. The noise is the same and cancels out."""
    plan = some_plan(steps=6, batch_size=60.0, strategy="scale")  # everyone is drawn
    (phase,), group, start = plan.phases, some_budgets(LEVELS).group, first_weights()
    before = {name: a_site(tmp_path / "before", name, plan=plan).answer("run", 1, start) for name in NAMES}
    for record in (0, 7, 31):
        inputs, targets = data_of("east")
        inputs[record] = replaced
        folder = tmp_path / f"{record} {replaced}"
        after = {
            name: a_site(folder, name, plan=plan, **({"data": (inputs, targets)} if name == "east" else {}))
            for name in NAMES
        }
        messages = {name: site.answer("run", 1, start) for name, site in after.items()}
        moved = np.concatenate(
            [(messages["east"].weights[key] - before["east"].weights[key]).ravel().astype(float) for key in start]
        )
        times = 1.0 if np.isnan(replaced) else 2.0  # taken out, or exchanged
        limit = times * phase.clip_norm[group[record]] * phase.weight[group[record]]
        assert 0 < np.linalg.norm(moved) * phase.expected_batch / RATE <= limit + 1e-4
        assert replace(messages["east"], weights={}) == replace(before["east"], weights={})
        for name in ("north", "south"):
            assert same_weights(messages[name].weights, before[name].weights)
            assert messages[name].spent == before[name].spent


def test_a_message_holds_weights_a_public_number_and_what_the_ledger_says(tmp_path):
    site = a_site(tmp_path, draws=2)
    answer = site.answer("run", 1, first_weights())
    assert vars(answer).keys() == {"weights", "num_examples", "spent"}
    assert {key: value.shape for key, value in answer.weights.items()} == {
        key: value.shape for key, value in first_weights().items()
    }
    assert answer.num_examples == site.plan.batch_size  # neither the records nor those drawn
    by_ledger = site.plan.spent_after([charged(site)])
    assert list(answer.spent) == ["1", "2", "4"]
    assert [float(text) for text in answer.spent.values()] == pytest.approx(by_ledger.tolist(), rel=2e-3)
    assert all(float(text) >= spent for text, spent in zip(answer.spent.values(), by_ledger, strict=True))


def test_a_few_peoples_budgets_are_in_no_message(tmp_path):
    """Fewer than 20 chose ε = 1.7 or 1.8: the message is the same, and none of its rows has a solved number."""
    sent = []
    for few in (1.7, 1.8):
        budgets = epsilons.Budgets([1.0] * 55 + [few] * 5, delta=1e-3)
        plan = epsilons.plan(budgets, epsilons.Recipe(steps=4, batch_size=10, clip_norm=0.5), accountant="rdp")
        sent.append(a_site(tmp_path / str(few), plan=plan, budgets=budgets).answer("run", 1, first_weights()))
    assert sent[0].spent == sent[1].spent
    assert sent[0].num_examples == sent[1].num_examples


class WithSecret(nn.Module):
    """A buffer and a frozen weight that a site computed from its records."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = a_model()
        self.register_buffer("mean", data_of("north")[0].mean(0))
        self.scale = nn.Parameter(data_of("north")[0].std(0), requires_grad=False)

    def forward(self, x):
        return self.layers((x - self.mean) / self.scale)


def test_buffers_and_frozen_weights_stay_at_the_site(tmp_path):
    start = {f"layers.{key}": value for key, value in first_weights().items()}
    assert a_site(tmp_path, model=WithSecret).answer("run", 1, start).weights.keys() == start.keys()


def test_an_error_tells_the_server_nothing_about_records_and_the_log_tells_the_site(tmp_path, caplog):
    def fails(model, batch):
        raise ValueError(f"patient 17 has {batch[0].shape}")

    site = a_site(tmp_path)
    site.answer("run", 1, first_weights())
    with pytest.raises(RoundRefused) as refusal:
        replace(site, loss=fails).answer("run", 2, first_weights())
    assert str(refusal.value) == rounds.FAILED
    assert refusal.value.__cause__ is None
    assert "patient 17" in caplog.text
    assert charged(site) == 2  # it was drawn
    site.answer("run", 3, first_weights())
    assert charged(site) == 3


# -- a hostile server ----------------------------------------------------------------------------------------------


def altered(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (first_weights() | changes).items() if value is not None}


BAD_WEIGHTS = {
    "NaN": altered(**{"0.bias": np.full(4, np.nan, np.float32)}),
    "too large for its type": altered(**{"0.bias": np.full(4, 1e300)}),
    "another shape": altered(**{"0.bias": np.zeros(5, np.float32)}),
    "shape of one": altered(**{"0.bias": np.zeros((1, 4), np.float32)}),
    "missing": altered(**{"0.bias": None}),
    "one more": altered(secret=np.zeros(4, np.float32)),
    "whole numbers": altered(**{"0.bias": np.zeros(4, np.int64)}),
    "objects": altered(**{"0.bias": np.array([None] * 4)}),
    "complex": altered(**{"0.bias": np.zeros(4, np.complex64)}),
}


@pytest.mark.parametrize("weights", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_weights_that_are_not_the_models_are_refused_and_cost_nothing(tmp_path, weights):
    site = a_site(tmp_path)
    with pytest.raises(RoundRefused, match="The weights are not"):
        site.answer("run", 1, weights)
    assert charged(site) == 0
    site.answer("run", 1, first_weights())  # the round is not lost
    assert charged(site) == 1


@pytest.mark.parametrize("number", [0, -1, 1.0, "1", None, True])
def test_a_round_without_a_number_is_refused(tmp_path, number):
    with pytest.raises(RoundRefused, match="whole number"):
        a_site(tmp_path).answer("run", number, first_weights())


def test_huge_weights_of_the_server_cost_the_site_no_more(tmp_path):
    site = a_site(tmp_path)
    answer = site.answer("run", 1, {key: value * 0 + np.float32(3e38) for key, value in first_weights().items()})
    assert charged(site) == 1
    assert answer.spent.keys() == {"1", "2", "4"}


def test_a_round_that_is_repeated_is_answered_again_and_an_older_one_is_refused(tmp_path):
    site, other = a_site(tmp_path, steps=4), {key: value + 1 for key, value in first_weights().items()}
    answers = {}
    for of, number in [("run", 1), ("run", 3), ("other", 1)]:
        answers[of, number] = site.answer(of, number, first_weights())
        for _ in range(2):
            again = site.answer(of, number, other)  # whatever the server sends now
            assert same_weights(again.weights, answers[of, number].weights)
            assert (again.num_examples, again.spent) == (answers[of, number].num_examples, answers[of, number].spent)
    for of, number in [("run", 1), ("run", 2), ("run", 3)]:
        with pytest.raises(RoundRefused, match="begun this round"):
            site.answer(of, number, first_weights())
    assert charged(site) == 3
    last = site.answer("run", 4, first_weights())
    assert same_weights(site.answer("run", 4, first_weights()).weights, last.weights)  # of a run that has ended, too


def test_a_site_that_is_spent_drops_out_at_its_last_step(tmp_path):
    site = a_site(tmp_path, steps=5, draws=2)
    seen = [charged(site) for number in range(1, 4) if site.answer("run", number, first_weights())]
    assert seen == [2, 4, 5]
    for number in (4, 5):
        with pytest.raises(RoundRefused, match="has spent its budgets"):
            site.answer("run", number, first_weights())
    assert sum(line["kind"] == "update" for line in lines(tmp_path / "north")) == charged(site) == 5
    assert not (tmp_path / "north" / "secret").exists()


def test_a_round_is_charged_and_noted_on_disk_before_its_answer_is_made(tmp_path, monkeypatch):
    site, found = a_site(tmp_path, draws=2), []
    sent, file = OpenSite._sent, tmp_path / "north" / "ledger.jsonl"

    def spied(self, private, given):
        account = read_account(file, site.plan)
        found.append((account.rounds, sum(account.charged), account.next_step(0)))
        return sent(self, private, given)

    monkeypatch.setattr(OpenSite, "_sent", spied)
    for number in (1, 2):
        site.answer("run", number, first_weights())
    assert found == [({"run": 1}, 2, 2), ({"run": 2}, 4, 4)]


def test_settings_that_make_no_site_are_refused(tmp_path):
    for wrong in ({"draws": 0}, {"num_examples": -1.0}, {"num_examples": float("nan")}, {"sends": "gradients"}):
        with pytest.raises(InputError):
            a_site(tmp_path, **wrong)


# -- processes that end, and folders that come back -----------------------------------------------------------------


def interrupted(site: Site, number: int, after: int) -> None:
    """A process that is killed in this round, after so many updates in all."""

    def dies(model, batch):
        if sum(line["kind"] == "update" for line in lines(Path(site.run_dir))) == after:
            os._exit(9)
        return losses(model, batch)

    pid = os.fork()
    if pid == 0:
        replace(site, loss=dies).answer("run", number, first_weights())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_a_killed_round_stays_charged_and_the_next_one_uses_other_noise(tmp_path):
    site = a_site(tmp_path, steps=12, draws=3, plan=some_plan(steps=12, batch_size=30.0))
    site.answer("run", 1, first_weights())
    interrupted(site, 2, after=5)
    with pytest.raises(RoundRefused, match="begun this round"):
        site.answer("run", 2, first_weights())
    assert charged(site) == 6
    site.answer("run", 3, first_weights())
    assert charged(site) == 9
    steps = [line["step"] for line in lines(tmp_path / "north") if line["kind"] == "update"]
    assert steps == [0, 1, 2, 3, 4, 6, 7, 8]


def test_a_first_round_that_is_killed_goes_on_under_another_key_and_stays_charged(tmp_path):
    site = a_site(tmp_path, plan=some_plan(steps=12, batch_size=30.0), draws=3)
    interrupted(site, 1, after=0)
    site.answer("run", 2, first_weights())
    assert charged(site) == 6


def test_a_site_from_a_backup_opens_a_new_key_epoch(tmp_path):
    site = a_site(tmp_path)
    site.answer("run", 1, first_weights())
    shutil.copytree(tmp_path / "north", tmp_path / "backup")
    lost = site.answer("run", 2, first_weights())
    shutil.rmtree(tmp_path / "north")
    shutil.move(tmp_path / "backup", tmp_path / "north")
    made = site.answer("run", 2, first_weights())
    assert epochs(tmp_path / "north") == [0, 1]
    assert not same_weights(made.weights, lost.weights), "the same noise for another answer"


def lives(site: Site, seed: int, kills: int) -> dict[str, int]:
    """Rounds of a site whose processes are killed at random moments, and of a server that forgets and repeats.

    Every answer is made in a process of its own, which is killed after a random time. The server loses answers, asks
    again, asks for older rounds, and begins other runs. Checks after each message; counts of what happened.
    """
    rng, told, seen = np.random.default_rng(seed), Path(f"{site.run_dir}.told"), {}
    count = dict.fromkeys(["messages", "killed", "answered", "again", "refused"], 0)
    of, number, weights, usual = 0, 0, first_weights(), 0.05
    while count["killed"] < kills:
        chance = rng.random()
        if chance < 0.1:  # the server is killed, and begins again
            of, number, weights = of + 1, 1, first_weights()
        elif chance < 0.3:
            number = max(1, number - int(rng.integers(3)))  # lost, repeated, or out of order
        else:
            number += 1 + int(rng.integers(2))
        told.unlink(missing_ok=True)
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _tell(site, f"run {of}", number, weights, told)
        if rng.random() < 0.6:
            time.sleep(rng.random() * usual)
            os.kill(pid, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        usual = usual if killed else 0.5 * usual + 0.5 * (time.monotonic() - start)
        count["messages"] += 1
        count["killed"] += killed
        text = json.loads(told.read_text()) if told.exists() else None
        if text is not None and "refused" in text:
            count["refused"] += 1
            if text["refused"] == rounds.SPENT:
                break
            assert text["refused"] in (rounds.REPEATED, rounds.SPENT)
        elif text is not None:
            known = seen.setdefault((of, number), text["weights"])
            assert known == text["weights"], "a second draw for one round"
            count["again" if known is not text["weights"] else "answered"] += 1
            weights = {key: np.array(value, np.float32) for key, value in text["weights"].items()}
        _check_ledger(site, len(seen))
    return count


def _tell(site: Site, of: str, number: int, weights: dict[str, Any], told: Path) -> None:
    try:
        answer = site.answer(of, number, weights)
        text = {"weights": {key: value.tolist() for key, value in answer.weights.items()}}
    except RoundRefused as refusal:
        text = {"refused": str(refusal)}
    except BaseException:
        os._exit(1)
    new = told.with_suffix(".new")
    new.write_text(json.dumps(text))
    os.replace(new, told)
    os._exit(0)


def _check_ledger(site: Site, released: int) -> None:
    """Nobody over, every release charged, no noise in two updates."""
    file = Path(site.run_dir) / "ledger.jsonl"
    if not file.exists() or file.read_bytes().count(b"\n") < 2:
        assert released == 0
        return
    whole = lines(file.parent)
    made = [(line["epoch"], line["phase"], line["step"]) for line in whole if line["kind"] == "update"]
    account = read_account(file, site.plan)
    assert len(set(made)) == len(made), "noise was used twice"
    assert site.draws * released <= len(made) <= sum(account.charged) <= site.plan.steps
    assert len({line["key"] for line in whole if line["kind"] == "key"}) == account.epoch + 1
    begun = [(line["of"], line["round"]) for line in whole if line["kind"] == "round"]
    assert len(set(begun)) == len(begun) >= released


def killed_and_checked(folder: Path, kills: int) -> dict[str, int]:
    a_site(folder / "first").answer("run", 1, first_weights())  # what a process imports at its first update is here
    plan = some_plan(steps=20_000, batch_size=12.0, levels=LEVELS)
    site = a_site(folder, plan=plan, draws=2, seed=None, optimizer=with_momentum)
    count = lives(site, kills, kills)
    assert count["killed"] == kills
    assert count["answered"] > kills / 8, "training goes on"
    number = 10**6
    before = charged(site)
    assert site.answer("last", number, first_weights()).spent
    assert charged(site) >= before + 2
    return count


def test_processes_that_are_killed_at_random_moments_release_nothing_uncharged(tmp_path):
    killed_and_checked(tmp_path, 15)


@pytest.mark.slow
def test_two_hundred_kills_release_nothing_uncharged(tmp_path):
    print(killed_and_checked(tmp_path, 200))


# -- a patient in two hospitals ---------------------------------------------------------------------------------------

BOTH, PEOPLE = [f"both {i}" for i in range(10)], 40


def ids_of(name: str) -> list[str]:
    return BOTH + [f"{name} {i}" for i in range(PEOPLE - len(BOTH))]


def with_registry(registry: Registry, folder: Path, name: str, share: float, **options: Any) -> Callable[[], Site]:
    """Makes the site again for every round, as a process of its own would, with its reservation."""
    ids = ids_of(name)
    accounts = registry.account(ids)
    budgets = accounts.budgets(share)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=8, batch_size=10, clip_norm=1.0), accountant="filter")
    registry.reserve(name, plan, accounts, budgets=budgets)
    inputs, targets = (column[:PEOPLE] for column in data_of(name))

    def made() -> Site:
        _, own, reservation = registry.reserved(name, plan, ids)
        run = epsilons.RunFolder(folder / name, reservation=reservation)
        settings = {"draws": 2, "seed": None} | options
        site = a_site(folder, name, plan=plan, budgets=own, data=epsilons.Records((inputs, targets), persons=ids))
        return replace(site, run_dir=run, **settings)

    return made


@pytest.fixture
def shared(place):
    with Registry.create(*place) as registry:
        registry.enrol(BOTH + ids_of("north")[10:] + ids_of("south")[10:], 3.0)
        yield registry


def test_lifetime_budgets_hold_across_sites_that_share_a_registry(tmp_path, shared):
    sites = {name: with_registry(shared, tmp_path, name, share) for name, share in (("north", 0.5), ("south", 1.0))}
    weights = first_weights()
    for number in range(1, 5):
        weights = averaged([made().answer("run", number, weights) for made in sites.values()])
    for made in sites.values():
        with pytest.raises(RoundRefused, match="has spent"):
            made().answer("run", 5, weights)
    assert not shared.account(BOTH).can_take_part.any()  # half at the one, the rest at the other
    assert shared.account(ids_of("north")[10:]).can_take_part.all()
    assert shared.verify().is_right


def test_who_withdraws_is_in_no_further_round_of_any_site(tmp_path, shared):
    sites = {name: with_registry(shared, tmp_path, name, 0.3) for name in ("north", "south")}
    for number in (1, 2):
        for made in sites.values():
            made().answer("run", number, first_weights())
        if number == 1:
            shared.withdraw(["both 3"])
    for name in sites:
        masks = [line for line in lines(tmp_path / name) if line["kind"] == "mask"]
        plan = epsilons.Plan.load(tmp_path / name / "plan.json")
        account = read_account(tmp_path / name / "ledger.jsonl", plan)
        assert [line["from"] for line in masks] == [2]
        assert (account.left_out(0, 1).tolist(), account.left_out(0, 2).tolist()) == ([], [3])


def test_a_site_whose_registry_is_away_leaves_out_the_round_and_comes_back(tmp_path, shared, monkeypatch):
    made = with_registry(shared, tmp_path, "north", 0.3)
    made().answer("run", 1, first_weights())
    site, number = made(), len(lines(tmp_path / "north"))
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "begin", lambda *_: (_ for _ in ()).throw(ConnectionError("no route")))
        with pytest.raises(RoundRefused) as refusal:
            site.answer("run", 2, first_weights())
    assert str(refusal.value) == rounds.FAILED
    assert len(lines(tmp_path / "north")) == number
    with monkeypatch.context() as patch:  # it goes away within the round, which is paid for
        patch.setattr(Registry, "leavers", lambda *_: (_ for _ in ()).throw(ConnectionError("no route")))
        site.answer("run", 2, first_weights())
    made().answer("run", 3, first_weights())
    assert shared.verify().is_right


def clock_off_by(patch: pytest.MonkeyPatch, by: timedelta) -> None:
    """The clock of the process that writes to a registry is off."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + by

    patch.setattr(databases, "datetime", Clock)


def test_clocks_that_differ_between_sites_change_nothing(tmp_path, shared, monkeypatch):
    sites = {name: with_registry(shared, tmp_path, name, 0.3) for name in ("north", "south")}
    skew = {"north": timedelta(hours=-7), "south": timedelta(minutes=4)}
    for number in range(1, 5):
        for name, made in sites.items():
            with monkeypatch.context() as patch:
                clock_off_by(patch, skew[name])
                made().answer("run", number, first_weights())
    for name in sites:
        assert read_charges(tmp_path / name / "ledger.jsonl", epsilons.Plan.load(tmp_path / name / "plan.json")) == (8,)
    assert shared.verify().is_right


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_a_site_whose_clock_is_hours_ahead_of_the_registrys_leaves_out_its_round(tmp_path, shared, monkeypatch):
    sites = {name: with_registry(shared, tmp_path, name, 0.3) for name in ("north", "south")}
    with monkeypatch.context() as patch:
        clock_off_by(patch, timedelta(hours=9))
        with pytest.raises(RoundRefused):
            sites["south"]().answer("run", 1, first_weights())
    for made in sites.values():
        made().answer("run", 2, first_weights())
    assert shared.verify().is_right


def test_answers_do_not_show_what_they_hold():
    assert "weights" not in repr(Answer({"w": np.ones(2)}, 1.0, {}))
