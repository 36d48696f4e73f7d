"""epsilons.huggingface: Trainer under budgets trains as a loop of our own, resumes to the bit, and shows no secret."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional as F
from transformers import get_linear_schedule_with_warmup

import epsilons
from epsilons.errors import InputError
from epsilons.huggingface.data import Records
from small_trainers import (
    BUDGETS,
    Record,
    bert,
    interrupted_at,
    is_same,
    padded,
    reviews,
    trainer,
    weights,
)

STEPS, WARMUP = 12, 2


# -- the same training as in a loop of our own -----------------------------------------------------------------------


def own_loop(folder, key):
    """Weights after the training that `trainer` makes, in a loop of our own."""
    model = bert()
    model.train()
    # The groups of transformers: no weight decay for biases and norms. Here it is 0 for both.
    plain = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "LayerNorm" not in n]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain}], lr=1e-3, weight_decay=0.0, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)
    plan = epsilons.plan(BUDGETS, epsilons.Recipe(STEPS, 16, 1.0), accountant="rdp")
    with epsilons.make_private(
        model,
        optimizer,
        Records(reviews(), without="epsilon"),
        plan,
        budgets=BUDGETS,
        key=key,
        performance=epsilons.Performance(max_physical_batch=8),
        collate_fn=padded,
    ) as private:
        private.on_update(lambda _: schedule.step())
        for batch in private.batches:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            private.backward(F.cross_entropy(logits, batch["labels"], reduction="none"))
            private.step()
    return weights(model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole training, of 12 steps."""
    made = trainer(tmp_path_factory.mktemp("whole") / "out", args={"warmup_steps": WARMUP})
    made.output = made.train()
    return made


def test_a_trainer_trains_as_a_loop_of_our_own_to_the_bit(whole, tmp_path):
    key = whole.private._draws.randomness.key
    assert is_same(weights(whole.model), own_loop(tmp_path / "own", key))
    assert not is_same(weights(whole.model), weights(bert()))


def test_a_step_is_a_draw_and_every_draw_is_charged(whole):
    assert whole.state.global_step == whole.private.updates == STEPS
    assert whole.private.ledger.charged == (STEPS,)
    assert whole.plan.expected_batch == 16


@pytest.mark.parametrize("step", [2, 8])
def test_an_interrupted_training_resumes_to_the_bit(whole, tmp_path, step):
    folder, args = tmp_path / "out", {"warmup_steps": WARMUP}
    with pytest.raises(KeyboardInterrupt):
        trainer(folder, args=args, callbacks=[interrupted_at(step)]).train()
    resumed = trainer(folder, args=args)
    resumed.train(resume_from_checkpoint=True)
    assert is_same(weights(resumed.model), weights(whole.model))
    assert resumed.private.ledger.charged == (STEPS,)
    assert resumed.private.ledger.epoch == 0
    assert resumed.state.global_step == STEPS
    assert resumed.state.epoch == 2
    assert resumed.state.log_history[-2]["epoch"] == 2


# -- what gets out ---------------------------------------------------------------------------------------------------


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_output_dir_has_neither_key_nor_budgets_nor_training_losses(whole):
    folder = whole.private_dir.with_name("out")
    key = whole.private._draws.randomness.key
    assert whole.private_dir.name == "out-private"
    assert files(whole.private_dir)
    for path in files(folder):
        content = path.read_bytes()
        secrets = key, key.hex().encode(), b'epsilon"', b"budget", b"private_dir"
        assert not [secret for secret in secrets if secret in content]
    states = [json.loads(path.read_text()) for path in folder.rglob("trainer_state.json")]
    assert states
    assert not any({"loss", "train_loss", "grad_norm"} & set(line) for state in states for line in state["log_history"])
    assert not list(folder.rglob("rng_state*"))  # how far generators have come shows who was drawn


def test_logs_and_the_result_have_no_loss_and_no_budget(whole):
    assert math.isnan(whole.output.training_loss)
    names = {name for line in [*whole.state.log_history, whole.output.metrics] for name in line}
    assert names <= {
        "learning_rate", "epoch", "step", "total_flos", "train_runtime", "train_samples_per_second",
        "train_steps_per_second",
    }  # fmt: skip
    assert whole.state.total_flos == 0


def test_the_loss_is_logged_if_it_is_asked_for(tmp_path):
    made = trainer(tmp_path / "out", args={"max_steps": 2}, log_private_loss=True)
    output = made.train()
    assert 0.3 < output.training_loss < 1.5
    assert made.state.log_history[0]["loss"] == pytest.approx(output.training_loss)


@pytest.mark.parametrize("inside", ["out", "out/private", "out/a/b", "out/../out/private"])
def test_a_private_folder_within_output_dir_is_refused(tmp_path, inside):
    with pytest.raises(InputError, match="within output_dir"):
        trainer(tmp_path / "out", private_dir=tmp_path / inside)


def test_the_collator_never_sees_the_column_of_budgets(tmp_path):
    def collate(records):
        assert all("epsilon" not in record for record in records)
        return padded(records)

    made = trainer(tmp_path / "out", args={"max_steps": 1, "remove_unused_columns": False}, data_collator=collate)
    made.train()
    assert "epsilon" not in made.train_dataset[0]
    assert made.private.updates == 1


# -- models ----------------------------------------------------------------------------------------------------------


def test_lora_moves_its_own_parameters_only(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        bert(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.1)
    )
    before = weights(model)
    trainer(tmp_path / "out", model, args={"max_steps": 3}).train()
    after = weights(model)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in name or "classifier" in name for name in moved)


def tagged() -> list[Record]:
    """Reviews with one label per word: whether the word is long. Some have no label that counts."""
    return [
        record | {"labels": [-100 if i % 10 == 0 else token % 3 for token in record["input_ids"]]}
        for i, record in enumerate(reviews())
    ]


def test_token_classification_trains_with_labels_that_are_padded(tmp_path):
    model = bert("TokenClassification", num_labels=3)
    before = weights(model)
    made = trainer(tmp_path / "out", model, args={"max_steps": 2}, train_dataset=tagged())
    made.train()
    assert made.private.updates == 2
    assert not is_same(before, weights(model))
