"""A DataLoader in place of a data set: what is used of it, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate

from epsilons.errors import DataError
from epsilons.training import Performance
from epsilons.training.values import Records, as_records
from small_runs import Listed, a_model, parameters_of, private_over, same, some_data, some_plan, train

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = TensorDataset(*some_data())


def doubled(records):
    return [2 * column for column in default_collate(records)]


def test_a_loader_is_taken_for_its_data_workers_and_collate_function():
    loader = DataLoader(DATA, 7, shuffle=True, num_workers=2, collate_fn=doubled, drop_last=True)
    assert as_records(loader, Performance(engine="loop")) == (
        Records(DATA, doubled),
        Performance(engine="loop", num_workers=2),
    )
    given = Records(loader, len, rows_per_person=2)
    assert as_records(given, Performance(num_workers=1)) == (
        Records(DATA, len, rows_per_person=2),
        Performance(num_workers=1),
    )
    assert as_records(DataLoader(DATA, 7))[0].collate_fn is None
    assert as_records(Records(DATA, len)) == (Records(DATA, len), Performance())


def test_a_loader_trains_as_its_data_set_does():
    ends = []
    for data in (DATA, DataLoader(DATA, batch_size=13, shuffle=True)):
        model = a_model()
        with private_over(model, data, plan=some_plan(steps=2)) as private:
            train(private, model)
        ends.append(parameters_of(model))
    assert same(*ends)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "draws with a RandomSampler"),
        (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5)), "draws with a RandomSampler"),
        (
            lambda: DataLoader(DATA, sampler=torch.utils.data.SubsetRandomSampler(range(5))),
            "SubsetRandomSampler.*Subset",
        ),
        (lambda: DataLoader(DATA, batch_sampler=OddBatches(SequentialSampler(DATA), 3, False)), "a OddBatches"),
        (lambda: DataLoader(Listed(), batch_size=None), "batch_size=None"),
        (lambda: DataLoader(DATA, worker_init_fn=print, num_workers=1), "worker_init_fn"),
    ],
)
def test_a_loader_that_chooses_records_is_refused(loader, words):
    with pytest.raises(DataError, match=words):
        private_over(a_model(), loader())


class OddBatches(BatchSampler):
    pass
