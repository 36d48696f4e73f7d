"""PrivateTrainer with budgets of persons: it trains as a loop of our own, and no number of rows gets out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import epsilons
from epsilons.errors import BudgetError, DataError
from epsilons.huggingface.steps import Records
from shares import share
from small_trainers import DELTA, bert, is_same, padded, reviews, trainer, weights

#: 24 persons with 1 to 8 of the 96 reviews each, and their budgets.
OWNERS = np.repeat(np.arange(24), np.resize([1, 2, 8, 5], 24))
BY_PERSON = np.where(np.arange(24) % 2, 2.0, 8.0)
FEW = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


def visits(owners=OWNERS):
    return [row | {"who": f"P{who}", "epsilon": BY_PERSON[who]} for row, who in zip(reviews(), owners, strict=True)]


@pytest.mark.parametrize("given", share(["ids", "columns", "budgets"], 1))
def test_a_trainer_of_persons_trains_as_a_loop_of_our_own_to_the_bit(tmp_path, given):
    rows, ids = visits(), [f"P{who}" for who in OWNERS]
    people = epsilons.Budgets.by_person(BY_PERSON[OWNERS], ids, delta=DELTA)
    options = {
        "columns": {"person": "who"},
        "ids": {"person": ids, "train_dataset": [without(row, "who") for row in rows]},
        "budgets": {"budgets": people, "train_dataset": [without(row, "who", "epsilon") for row in rows]},
    }[given]
    made = trainer(tmp_path / "out", args=FEW, **{"train_dataset": rows, "rows_per_person": 3} | options)
    made.train()
    assert made.private.updates == made.plan.steps == 6
    assert made.plan.unit == "person"
    model = bert().train()
    plain = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "LayerNorm" not in n]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain}], lr=1e-3, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)
    with epsilons.make_private(
        model, optimizer, Records([without(row, "who", "epsilon") for row in rows]), made.plan, budgets=people,
        rows_per_person=3, key=made.private._draws.randomness.key, collate_fn=padded,
        performance=epsilons.Performance(max_physical_batch=8),
    ) as private:  # fmt: skip
        private.on_update(lambda _: schedule.step())
        for batch in private.batches:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            private.backward(F.cross_entropy(logits, batch["labels"], reduction="none"))
            private.step()
    assert is_same(weights(made.model), weights(model))
    assert not is_same(weights(made.model), weights(bert()))


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def test_no_number_of_rows_is_in_plan_steps_or_output(tmp_path):
    seen = []
    for owners in (OWNERS, np.resize(np.arange(24), 96)):
        folder = tmp_path / str(len(seen))
        rows = visits(owners)[: len(owners) - 40 * len(seen)]
        made = trainer(folder / "out", args=FEW, train_dataset=rows, person="who")
        result = made.train()
        assert result.metrics["train_samples_per_second"] * result.metrics["train_runtime"] == pytest.approx(
            48, rel=0.1
        )
        states = [json.loads(path.read_text()) for path in sorted((folder / "out").rglob("trainer_state.json"))]
        history = [line for state in states for line in state["log_history"] if "train_runtime" not in line]
        seen.append((made.plan.steps, made.plan.expected_batch, made.state.epoch, history))
    assert seen[0] == seen[1]


def test_a_column_of_ids_that_is_missing_is_refused(tmp_path):
    with pytest.raises(BudgetError, match="person='patient' must be a column of train_dataset"):
        trainer(tmp_path / "out", train_dataset=visits(), person="patient")


def test_ids_beside_budgets_of_records_are_refused(tmp_path):
    records = epsilons.Budgets(BY_PERSON[OWNERS], delta=DELTA)
    made = trainer(tmp_path / "out", train_dataset=visits(), budgets=records, person="who", data_collator=None)
    with pytest.raises(DataError, match="persons= is for budgets of persons"):
        made.train()


def test_rows_of_one_person_that_state_different_budgets_are_refused(tmp_path):
    rows = visits()
    rows[1]["epsilon"], rows[2]["epsilon"] = 3.0, 4.0
    with pytest.raises(BudgetError, match="state different budgets"):
        trainer(tmp_path / "out", train_dataset=rows, person="who")
