"""What a loop can ask of a Private: is this batch a check, which draw and epoch is it in, what was spent so far."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import epsilons
from epsilons.clipping.ghost import operator_rules
from epsilons.draws import batches as structures
from epsilons.errors import CallOrderError, DataError, InputError, ModelError
from epsilons.training.datasets import data_source, seed_torch
from functional import Model, Records
from shares import share
from small_runs import (
    RECORDS,
    Listed,
    a_model,
    losses_of,
    of_phases,
    one_update,
    parameters_of,
    private_over,
    same,
    some_budgets,
    some_data,
    some_plan,
    train,
    trained,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def in_phases() -> epsilons.Plan:
    """Seven steps in three phases, one of which draws no record."""
    return of_phases(
        {"steps": 3, "sample_rate": [0.2, 0.1]},
        {"steps": 2, "sample_rate": [0.0, 0.0]},
        {"steps": 2, "sample_rate": [0.05, 0.2]},
    )


#: Plans with several physical batches per draw, with one, with none, and in phases; and how many records at once.
CASES = {
    "several batches": (lambda: some_plan(steps=6), 5),
    "one record at once": (lambda: some_plan(steps=3), 1),
    "empty draws": (lambda: some_plan("uniform", steps=12, batch_size=0.7), "auto"),
    "phases": (in_phases, 4),
}
every_case = pytest.mark.parametrize("case", CASES)


def opened(case: str, model: nn.Module, **options: Any) -> epsilons.Private:
    make, largest = CASES[case]
    options = {"max_physical_batch": largest, "engine": "vmap"} | options
    return private_over(model, (*some_data(), torch.arange(RECORDS)), make(), **options)


def step(private: epsilons.Private, model: nn.Module, batch: Any) -> bool:
    private.backward(losses_of(model, batch[:2]))
    return private.step()


def run_through(batches: Iterable[Any], private: epsilons.Private, model: nn.Module) -> list[int]:
    """The loop over these batches: the records of those that are no checks."""
    seen = []
    for batch in batches:
        if not private.is_check:
            seen += batch[2].tolist()
        step(private, model, batch)
    return seen


@cache
def whole(case: str) -> list[Tensor]:
    model = a_model(4)
    with opened(case, model) as private:
        run_through(private.batches, private, model)
    return parameters_of(model)


def drawn(private: epsilons.Private) -> list[list[int]]:
    """The records of every draw of the plan, one after the other, from the coins themselves."""
    return [
        private._draws.at(number, step).tolist()
        for number, phase in enumerate(private.plan.phases)
        for step in range(phase.steps)
    ]


# -- checks ---------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("read", ["before backward", "after backward", "after step"])
def test_batches_that_are_no_checks_are_the_draws_and_nothing_else(case, read):
    """So running losses and counts are right; and where is_check is read in the body makes no difference."""
    model, found, checks, flags_of_updates = a_model(4), [], 0, []
    with opened(case, model) as private:
        expected = drawn(private)
        private.on_update(lambda known: flags_of_updates.append(known.is_check))
        assert private.is_check is False
        for batch in private.batches:
            is_check = private.is_check
            private.backward(losses_of(model, batch[:2]))
            if read == "after backward":
                is_check = private.is_check
            private.step()
            if read == "after step":
                is_check = private.is_check
            checks += is_check
            if not is_check:
                found += batch[2].tolist()
        assert private.is_check is False
    assert found == [i for draw in expected for i in draw]
    assert checks > 0
    assert flags_of_updates == [False] * len(expected)  # no update is made of a check


def test_a_check_alters_the_batch_and_moves_nothing():
    """The oracle: what the engine was asked to add."""
    model, added = a_model(4), []
    with opened("several batches", model) as private:
        real = private._clipper.clipped
        private._clipper.clipped = lambda *given: added.append(private.is_check) or real(*given)
        flags = []
        for batch in private.batches:
            flags.append(private.is_check)
            step(private, model, batch)
    assert added == [flag for flag in flags if not flag]
    assert True in flags


# -- draws and epochs ------------------------------------------------------------------------------------------------


@every_case
def test_draws_gives_one_iterable_per_draw_and_trains_as_batches_does(case):
    model, found = a_model(4), []
    with opened(case, model) as private:
        expected = drawn(private)
        for number, draw in enumerate(private.draws):
            assert sum(private.ledger.charged) == number  # a draw begins when it is iterated
            found.append(run_through(draw, private, model))
            assert private.updates == number + 1
        assert private.is_finished
        assert list(private.draws) == []
        assert private.ledger.is_closed
    assert found == expected
    assert same(parameters_of(model), whole(case))


@every_case
@pytest.mark.parametrize("n", [1, 2, 3])
def test_epochs_gives_the_plans_draws_in_nearly_equal_parts(case, n):
    model, sizes, found = a_model(4), [], []
    with opened(case, model) as private:
        expected = drawn(private)
        for part in private.epochs(n):
            before = private.updates
            found += run_through(part, private, model)
            sizes.append(private.updates - before)
        assert private.is_finished
    assert len(sizes) == n
    assert sum(sizes) == len(expected)
    assert max(sizes) - min(sizes) <= 1
    assert found == [i for draw in expected for i in draw]
    assert same(parameters_of(model), whole(case))


@pytest.mark.parametrize(("case", "how"), share(product(CASES, ["draws", "epochs"]), 3))
def test_a_run_that_is_resumed_goes_on_in_the_part_it_was_in(case, how, tmp_path):
    """Cut off after every number of updates in turn: parts are parts of the plan, not of what is left."""
    expected = whole(case)
    steps = CASES[case][0]().steps
    ends = [part * steps // 3 for part in (1, 2, 3)]
    for until in range(1, steps):
        run_dir, model = tmp_path / f"{until}", a_model(4)
        with opened(case, model, run_dir=run_dir, checkpoint_every=1) as private:
            private.on_update(lambda made, until=until: made.stop() if made.updates == until else None)
            run_through(private.batches, private, model)
        model = a_model(4)
        with opened(case, model, run_dir=run_dir, checkpoint_every=1, resume=True) as private:
            assert private.updates == until
            after = []
            for part in private.draws if how == "draws" else private.epochs(3):
                run_through(part, private, model)
                after.append(private.updates)
        assert after == (list(range(until + 1, steps + 1)) if how == "draws" else [end for end in ends if end > until])
        assert same(parameters_of(model), expected)


@pytest.mark.parametrize("n", [0, -1, 7])
def test_epochs_needs_a_number_of_parts_that_the_steps_can_be_dealt_into(n):
    with (
        opened("several batches", a_model(4)) as private,
        pytest.raises(InputError, match=rf"from 1 to the plan's 6 steps; got {n}"),
    ):
        private.epochs(n)


@pytest.mark.parametrize("after", ["nothing", "yield", "backward", "step"])
@pytest.mark.parametrize("how", ["draws", "epochs"])
def test_a_draw_that_is_left_unfinished_ends_the_loop(how, after):
    model = a_model(4)
    with opened("several batches", model) as private:
        parts = private.draws if how == "draws" else private.epochs(2)
        for batch in next(parts) if after != "nothing" else ():
            if after == "yield":
                break
            private.backward(losses_of(model, batch[:2]))
            if after == "backward":
                break
            assert not private.step()
            break
        if after == "nothing":
            next(parts)
        if after == "nothing" and how == "epochs":
            next(parts)  # nothing was drawn: the second part begins where the first did
            return
        with pytest.raises(CallOrderError, match=r"private\.backward"):
            next(parts)
        assert private.updates == 0


def test_a_part_that_is_left_between_draws_is_gone_on_with_in_the_next():
    model = a_model(4)
    with opened("several batches", model) as private:
        updates = []
        for part in private.epochs(2):
            for batch in part:
                if step(private, model, batch) and not updates:
                    break
            updates.append(private.updates)
        assert updates == [1, 6]
    assert same(parameters_of(model), whole("several batches"))


def test_two_loops_at_once_are_refused_whatever_they_are():
    model = a_model(4)
    with opened("several batches", model) as private:
        first = private.draws
        run_through(next(first), private, model)
        one_update(private, model, (batch[:2] for batch in private.batches))
        with pytest.raises(CallOrderError, match="Another loop"):
            list(next(first))


def test_closing_in_a_loop_over_draws_ends_it():
    model = a_model(4)

    def go_on(private: epsilons.Private) -> None:
        for draw in private.draws:
            run_through(draw, private, model)
            private.close()

    for case in ("several batches", "empty draws"):
        with opened(case, model) as private, pytest.raises(CallOrderError, match=r"This run (is|was) closed"):
            go_on(private)


# -- what was spent ---------------------------------------------------------------------------------------------------


@every_case
def test_the_epsilon_spent_is_an_upper_bound_in_the_plans_order(case):
    model, seen = a_model(4), []
    with opened(case, model) as private:
        plan = private.plan
        assert (private.epsilon_spent() == 0).all()

        def look(now: epsilons.Private) -> None:
            exact = np.array([plan._spent(now.ledger.charged, [group])[0] for group in range(len(plan.epsilons))])
            assert (now.epsilon_spent() >= exact * (1 - 1e-12)).all()
            seen.append(now.epsilon_spent())

        private.on_update(look)
        run_through(private.batches, private, model)
    assert all(row.shape == plan.epsilons.shape for row in seen)
    assert (np.diff(seen, axis=0) >= 0).all()
    assert (seen[-1] <= plan.epsilons).all()
    assert np.allclose(seen[-1], plan.epsilon_spent())


@pytest.mark.parametrize("few", [1, 5, 19])
@pytest.mark.parametrize("strategy", ["uniform", "scale", "sample"])
def test_the_epsilon_spent_is_empty_where_a_group_is_too_small_to_be_shown(few, strategy):
    """Under uniform, everybody's spend is what the strictest person chose."""
    budgets = epsilons.Budgets([0.7123] * few + [4.0] * (RECORDS - few), delta=1e-3)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=3, batch_size=12, clip_norm=0.5), strategy, "rdp")
    model = a_model(4)
    with private_over(model, plan=plan, budgets=budgets) as private:
        for batch in private.batches:
            assert private.epsilon_spent().shape == (0,)
            step(private, model, batch)


# -- generators -------------------------------------------------------------------------------------------------------


def test_generators_are_seeded_as_by_torch_itself():
    for seed in (0, 1, 2**62, 2**63 - 1):
        torch.manual_seed(seed)
        expected = torch.get_rng_state()
        torch.manual_seed(17)
        seed_torch(seed)
        assert torch.equal(torch.get_rng_state(), expected)
        assert torch.initial_seed() == seed


def test_no_stack_trace_is_made_to_seed_a_generator(monkeypatch):
    """torch.manual_seed makes one for each accelerator that is not in use."""
    model = a_model()
    monkeypatch.setattr("traceback.format_stack", Mock(side_effect=AssertionError("a stack trace")))
    with private_over(model, Listed()) as private:
        train(private, model)
    assert private.updates == 6


# -- the structure of batches -----------------------------------------------------------------------------------------


class Encoding(UserDict):
    """As transformers' BatchEncoding: a UserDict with something of its own."""

    def __init__(self, data: Any = None, words: str = "") -> None:
        super().__init__(data)
        self.words = words


class Frozen(Mapping):
    """A mapping that cannot be written to."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


MAKERS: dict[str, Any] = {
    "dict": dict,
    "UserDict": lambda d: Encoding(d, "own"),
    "mapping": Frozen,
    "dataclass": lambda d: Pair(**d),
    "named tuple": lambda d: Named(**d),
    "nested": lambda d: {"deep": [Encoding({"x": d["x"]}), (d["y"], Pair(**d))]},
}
every_structure = pytest.mark.parametrize("kind", MAKERS)


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping) and "deep" in batch:
        return batch["deep"][0]["x"], batch["deep"][1][0]
    return (batch["x"], batch["y"]) if isinstance(batch, Mapping) else (batch.x, batch.y)


def structured() -> Records:
    return Records(lambda index: tuple(t[index] for t in some_data()), RECORDS)


@pytest.mark.parametrize(("kind", "largest"), share(product(MAKERS, ["auto", 1]), 8))
def test_batches_of_every_structure_are_understood_and_keep_their_type(kind, largest):
    def collate(rows: list[tuple[Tensor, Tensor]]) -> Any:
        return MAKERS[kind]({"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])})

    model, types = a_model(hidden=4), set()
    data = structured()
    with private_over(model, data, collate_fn=collate, max_physical_batch=largest, engine="vmap") as private:
        for batch in private.batches:
            types.add(type(batch))
            if kind == "UserDict":
                assert batch.words == "own"
            private.backward(losses_of(model, pair_of(batch)))
            private.step()
        assert private.updates == 6
    assert same(parameters_of(model), trained(hidden=4, max_physical_batch=largest, engine="vmap"))
    own = type(MAKERS[kind]({"x": torch.zeros(2, 1), "y": torch.zeros(2)}))
    assert types <= {own, dict} if kind == "mapping" else types == {own}


@every_structure
def test_every_tensor_of_a_structure_is_moved(kind):
    batch = MAKERS[kind]({"x": torch.ones(3, 2), "y": torch.zeros(3)})
    before = copy.deepcopy(batch)
    moved = structures.moved(batch, torch.device("meta"))
    assert all(t.device.type == "meta" for t in pair_of(moved))
    assert structures.is_same(batch, before)  # the batch itself is left alone
    assert not structures.is_same(batch, MAKERS[kind]({"x": torch.ones(3, 2), "y": torch.ones(3)}))


def test_a_packed_sequence_is_moved():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    assert structures.moved({"x": packed}, torch.device("meta"))["x"].data.device.type == "meta"


# -- what is passed by mistake ----------------------------------------------------------------------------------------


def arrow() -> Any:
    import pyarrow

    return pyarrow.table({"x": [1.0] * RECORDS})


def given_to(by: str, data: Any) -> None:
    if by == "fit":
        epsilons.fit(a_model(), data, some_plan(), budgets=some_budgets())
    else:
        private_over(a_model(), data)


@pytest.mark.parametrize("by", ["make_private", "fit"])
def test_tables_are_refused_with_the_way_to_pass_them(by):
    with pytest.raises(DataError, match=r"(?s)which is read by column.*to_numpy.*epsilons init"):
        given_to(by, arrow())


def test_a_dict_of_records_by_number_is_a_data_set():
    assert len(data_source({i: (x, y) for i, (x, y) in enumerate(zip(*some_data(), strict=True))})) == RECORDS


class Wrapper:
    """As Lightning's, apex's or a GradScaler's wrapper: no optimizer itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class Accelerated(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by type, whose __init__ never ran."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (Wrapper, r"Got a Wrapper, which wraps an optimizer.*\(\.optimizer\)"),
        (Accelerated, r"Got a Accelerated, which wraps an optimizer.*\(\.optimizer\)"),
        (lambda optimizer: [optimizer, optimizer], "Got a list of 2 optimizers.*groups of parameters"),
        (lambda optimizer: {"body": optimizer}, "Got a dict of 1 optimizers"),
        (lambda optimizer: torch.optim.SGD, "in place of an optimizer"),
        (lambda optimizer: None, "Got a NoneType in place of an optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused_with_what_to_pass(wrap, words):
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match=words):
        epsilons.make_private(model, wrap(optimizer), some_data(), some_plan(), budgets=some_budgets())
    private_over(model, optimizer=optimizer).close()


# -- why an engine is slower ------------------------------------------------------------------------------------------


def packed_lstm() -> nn.Module:
    """Sequences of different lengths, packed: torch's own loop over time steps."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        steps, lengths = x[:, None].expand(-1, 5, -1), 2 + (x[:, 0] > 0).long()
        packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
        return model.last(model.lstm(packed)[1][0][-1])

    return Model(compute, lstm=nn.LSTM(6, 4, batch_first=True), last=nn.Linear(4, 3))


def rolled(model: nn.Module, x: Tensor) -> Tensor:
    """A use of an operator that its rule does not prove."""
    return torch.roll(x.flatten(), 0).reshape(x.shape) + torch.roll(x, 0)


MODELS = {"packed LSTM": packed_lstm, "roll": lambda: nn.Sequential(nn.Linear(6, 3), Model(rolled))}


@pytest.mark.parametrize("kind", MODELS)
def test_the_log_says_which_operator_makes_a_model_slower(kind, caplog):
    torch.manual_seed(0)
    model = MODELS[kind]()
    with private_over(model, engine="ghost") as private:
        train(private, model)
    (line,) = [record.getMessage() for record in caplog.records if "which is slower" in record.getMessage()]
    reason = line.partition("which is slower: ")[2]
    assert len(reason) > 5, line
    assert reason[0].isalpha()


@pytest.mark.parametrize("name", operator_rules.RULES)
def test_no_rule_refuses_without_naming_its_operator(name, monkeypatch):
    """Every rule, given outputs without a batch axis."""

    class Node:
        next_functions = ()

        def name(self) -> str:
            return f"{name}Backward0"

    monkeypatch.setattr(operator_rules, "operator", lambda node: name)
    with pytest.raises(operator_rules.UnsupportedOp) as caught:
        operator_rules.propagate(Node(), [None, None], 2)
    assert str(caught.value).startswith(name)


def test_the_physical_batch_size_may_change_between_draws():
    model, sizes = a_model(), []
    with private_over(model, plan=some_plan(steps=8), max_physical_batch=100) as private:
        for inputs, _ in private.batches:
            sizes.append((private.updates, private.is_check, len(inputs)))
            private.backward(losses_of(model, (inputs, _)))
            was_last = private.is_last
            assert private.step() == was_last
            if private.updates == 4:
                private.max_physical_batch = 3
        assert private.max_physical_batch == 3
    assert max(size for update, check, size in sizes if update < 4 and not check) > 3
    assert max(size for update, check, size in sizes if update >= 4 and not check) <= 3


def test_a_physical_batch_size_of_no_record_is_refused():
    with private_over(a_model()) as private, pytest.raises(DataError, match="at least 1, got 0"):
        private.max_physical_batch = 0
