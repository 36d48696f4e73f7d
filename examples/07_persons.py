"""Persons with several rows: a budget covers all visits of one patient.

    python examples/07_persons.py

The table is GENERATED: patients have 1 to 6 visits, and a visit is one of the embedded handwritten digits. The script
trains three times at the same budget per patient: on patients, on patients with 2 views of each chosen visit under
random noise, and on visits that each got a share of their patient's budget, the only promise that rows can give.
"""

import os

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons import data

TINY = bool(os.environ.get("EPSILONS_TINY"))  # a few steps, as a test
STEPS = 10 if TINY else 100
DELTA = 1e-4

inputs, targets = (torch.from_numpy(part) for part in data.load("digits", "train"))
test_inputs, test_targets = (torch.from_numpy(part) for part in data.load("digits", "test"))

# -- the visits -----------------------------------------------------------------------------------------------------

make = np.random.default_rng(0)
visits = make.integers(1, 7, size=len(inputs))  # of each patient, until all digits are given away
ids = np.repeat([f"patient {number}" for number in range(len(visits))], visits)[: len(inputs)]
epsilon = np.where(np.char.str_len(ids) % 2, 2.0, 8.0)  # (rows,) what each patient consented to, in every row
order = make.permutation(len(ids))
ids, epsilon = ids[order], epsilon[order]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 10)


def accuracy(trained: nn.Module) -> float:
    with torch.no_grad():
        return float((trained(test_inputs).argmax(1) == test_targets).float().mean())


# -- patients -------------------------------------------------------------------------------------------------------

patients = epsilons.Budgets.by_person(epsilon, ids, delta=DELTA)
print(patients)
plan = epsilons.plan(patients, epsilons.Recipe(steps=STEPS, batch_size=100, clip_norm=1.0), accountant="rdp")
print(plan.summary())

# One coin per patient; a drawn patient contributes the clipped gradient of the mean over up to 4 of their visits.
by_patient = model()
epsilons.fit(
    by_patient,
    epsilons.Records((inputs, targets), rows_per_person=4),
    plan,
    budgets=patients,
    training=epsilons.Training(lr=1.0),
)
print(f"patients, up to 4 visits in a draw: {accuracy(by_patient):.1%}")


# -- patients, and 2 views of each chosen visit -----------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The visits with noise of their own, another one at each reading: every reading of a row has its own seed."""

    def __len__(self) -> int:
        return len(inputs)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return inputs[row] + 0.1 * torch.randn(64), targets[row]


by_view = model()
optimizer = torch.optim.SGD(by_view.parameters(), lr=1.0)
with epsilons.make_private(
    by_view, optimizer, epsilons.Records(Noisy(), rows_per_person=4, views=2), plan, budgets=patients
) as private:
    for x, y in private.batches:
        private.backward(F.cross_entropy(by_view(x), y, reduction="none"))  # one loss per row and view
        private.step()
print(f"the same, 2 views of each visit:    {accuracy(by_view):.1%}")

# -- visits ---------------------------------------------------------------------------------------------------------

# Rows of one patient spend together, so each may spend a part only: epsilon and delta divided by their number.
count = np.bincount(patients.person)[patients.person]
rows = epsilons.Budgets(epsilon / count, DELTA / count)
row_plan = epsilons.plan(rows, epsilons.Recipe(steps=STEPS, batch_size=250, clip_norm=1.0), accountant="rdp")
by_row = model()
epsilons.fit(by_row, (inputs, targets), row_plan, budgets=rows, training=epsilons.Training(lr=1.0))
print(f"visits, each with a share:          {accuracy(by_row):.1%}")

assert TINY or accuracy(by_patient) > accuracy(by_row)
