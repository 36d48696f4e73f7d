"""Training in one call, on the handwritten digits, with its plan and ledger in a folder."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import epsilons
from epsilons import data
from epsilons.ledger.ledger import read_charges

train, test = (tuple(map(torch.from_numpy, data.load("digits", split))) for split in ("train", "test"))

# One epsilon per record, in data-set order; here every second record has the stricter one.
budgets = epsilons.Budgets([0.5 if i % 2 else 2.0 for i in range(len(train[0]))], delta=1e-5)
plan = epsilons.plan(budgets, epsilons.Recipe(steps=60, batch_size=256, clip_norm=2.0), strategy="sample")

with tempfile.TemporaryDirectory() as folder:
    run_dir = Path(folder) / "run"
    torch.manual_seed(0)
    run = epsilons.fit(
        nn.Linear(64, 10),
        train,
        plan,
        budgets=budgets,
        training=epsilons.Training(lr=0.25),
        evaluation=test,
        run_dir=run_dir,
    )
    print(sorted(file.name for file in run_dir.iterdir()))
    print(run.metrics[-1])
    assert read_charges(run_dir / "ledger.jsonl", plan) == run.charged == (60,)
    assert run.metrics[-1]["accuracy"] > 0.6
print(plan.summary())
