"""epsilons.huggingface: Trainer under budgets trains as a loop of our own, resumes to the bit, and shows no secret."""

from __future__ import annotations

import itertools
import json
import math
import runpy
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import get_linear_schedule_with_warmup

import epsilons
from epsilons.errors import (
    BatchDependenceError,
    BudgetError,
    CallOrderError,
    DataError,
    EpsilonsError,
    InputError,
    ModelError,
    RunError,
)
from epsilons.huggingface import PrivateSeq2SeqTrainer, PrivateTrainer, per_record_loss
from epsilons.huggingface.trainer import Records
from options import make_flat
from pages import ROOT
from shares import share
from small_trainers import (
    BUDGETS,
    DELTA,
    Record,
    arguments,
    bert,
    gpt2,
    interrupted_at,
    is_same,
    padded,
    reviews,
    trainer,
    transformers,
    weights,
)

STEPS, WARMUP = 12, 2


# -- the same training as in a loop of our own -----------------------------------------------------------------------


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def own_loop(key, records, plan, warmup: int, **options):
    """Weights after the training that `trainer` makes, in a loop of our own."""
    model = bert().train()
    # The groups of transformers: no weight decay for biases and norms. Here it is 0 for both.
    plain = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "LayerNorm" not in n]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain}], lr=1e-3, weight_decay=0.0, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, plan.steps)
    performance = epsilons.Performance(max_physical_batch=8)
    options |= {"key": key, "performance": performance, "collate_fn": padded}
    with make_flat(model, optimizer, Records(records), plan, **options) as private:
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


def test_a_trainer_trains_as_a_loop_of_our_own_to_the_bit(whole):
    key = whole.private._draws.randomness.key
    plan = epsilons.plan(BUDGETS, epsilons.Recipe(STEPS, 16, 1.0), accountant="rdp")
    records = [without(record, "epsilon") for record in reviews()]
    assert is_same(weights(whole.model), own_loop(key, records, plan, WARMUP, budgets=BUDGETS))
    assert not is_same(weights(whole.model), weights(bert()))


def test_a_step_is_a_draw_and_every_draw_is_charged(whole):
    assert whole.state.global_step == whole.private.updates == STEPS
    assert whole.private.ledger.charged == (STEPS,)
    assert whole.plan.expected_batch == 16


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 8])
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
    assert float(whole._tr_loss) == whole._total_loss_scalar == 0  # what callbacks could reach
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


HEADS = {
    "SequenceClassification": (2,),
    "TokenClassification": (2,),
    "MaskedLM": (500,),
    "LMHeadModel": (500,),
    "MultipleChoice": (2,),
}


def labelled(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs and labels of five records of different lengths, for a head of this kind."""
    made = torch.Generator().manual_seed(3)
    batch = padded([without(record, "epsilon") for record in reviews()[:5]])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if kind == "QuestionAnswering":
        starts, ends = torch.tensor([0, 2, 3, 99, 1]), torch.tensor([1, 99, 5, 7, 7])
        return inputs, {"start_positions": starts, "end_positions": ends}
    if kind in ("TokenClassification", "MaskedLM", "LMHeadModel"):
        drawn = torch.randint(HEADS[kind][0], inputs["input_ids"].shape, generator=made)
        return inputs, {"labels": drawn.masked_fill(inputs["attention_mask"] == 0, -100)}
    if kind == "MultipleChoice":
        inputs = {name: torch.stack([value, value.roll(1, 1)], 1) for name, value in inputs.items()}
    return inputs, {"labels": batch["labels"]}


@pytest.mark.parametrize("kind", [*HEADS, "QuestionAnswering"])
def test_a_record_has_the_loss_that_the_model_computes_of_it_alone(kind):
    model = transformers.BertLMHeadModel(bert(is_decoder=True).config) if kind == "LMHeadModel" else bert(kind)
    model.eval()
    inputs, labels = labelled(kind)
    losses = per_record_loss(model, model(**inputs), labels)
    assert losses.shape == (5,)
    for i, loss in enumerate(losses):
        one = {name: value[i : i + 1] for name, value in (inputs | labels).items()}
        if kind == "QuestionAnswering" and 99 in (int(one["start_positions"]), int(one["end_positions"])):
            continue  # the model's own mean over no position is not a number
        assert float(loss) == pytest.approx(float(model(**one).loss), rel=1e-5)
    assert losses.isfinite().all()


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.eye(5, 3)),
        ({"num_labels": 3, "problem_type": "regression"}, torch.eye(5, 3)),
    ],
)
def test_numbers_and_several_labels_have_the_loss_of_the_model(options, target):
    model = bert(**options).eval()
    inputs, _ = labelled("SequenceClassification")
    losses = per_record_loss(model, model(**inputs), {"labels": target})
    assert float(losses.mean()) == pytest.approx(float(model(**inputs, labels=target).loss), rel=1e-5)


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_label_smoothing_is_that_of_transformers(kind):
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.2)
    model = bert(kind).eval()
    inputs, labels = labelled(kind)
    for i in range(5):
        one = {name: value[i : i + 1] for name, value in inputs.items()}
        own = {name: value[i : i + 1] for name, value in labels.items()}
        outputs = model(**one)
        theirs = smoother({"logits": outputs.logits}, own["labels"])
        assert float(per_record_loss(model, outputs, own, 0.2)) == pytest.approx(float(theirs), rel=1e-5)


#: peft's methods that learn a prompt, by the task; its models for labels of tokens compute no loss with virtual tokens.
PROMPTS = {
    "prompt tuning": lambda peft, task: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=4),
    "p-tuning": lambda peft, task: peft.PromptEncoderConfig(
        task_type=task, num_virtual_tokens=4, encoder_hidden_size=8
    ),
    "prefix tuning": lambda peft, task: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=4),
    **{
        name: lambda peft, task, kind=kind, options=options: getattr(peft, f"{kind}Config")(
            task_type=task, target_modules=MODULES.get(task, r".*(query|value|dense)"), **options
        )
        for name, (kind, options) in {
            "lora": ("Lora", {"r": 2}),
            "dora": ("Lora", {"r": 2, "use_dora": True}),
            "ia3": ("IA3", {"feedforward_modules": []}),
            "fourier": ("FourierFT", {"n_frequency": 10}),
        }.items()
    },
}
MODULES = {"CAUSAL_LM": "all-linear", "SEQ_2_SEQ_LM": "all-linear"}


def prompted(name: str, task: str):
    """A small model of this task under one of peft's methods, in evaluation mode."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = gpt2() if task == "CAUSAL_LM" else t5() if task == "SEQ_2_SEQ_LM" else bert(HEAD_OF[task])
    return peft.get_peft_model(model, PROMPTS[name](peft, task)).eval()


#: The head of a task, of which peft takes all linear layers but the last.
HEAD_OF = {"SEQ_CLS": "SequenceClassification", "TOKEN_CLS": "TokenClassification", "QUESTION_ANS": "QuestionAnswering"}


#: peft computes no loss for these: see the test below.
WITHOUT_LOSS = {("prompt tuning", "TOKEN_CLS"), ("p-tuning", "TOKEN_CLS")}


@pytest.mark.parametrize(
    ("name", "task"),
    sorted(set(itertools.product(PROMPTS, ["CAUSAL_LM", "SEQ_2_SEQ_LM", *HEAD_OF])) - WITHOUT_LOSS),
)
def test_a_record_behind_a_learned_prompt_has_the_loss_of_the_model(name, task):
    model = prompted(name, task)
    inputs, labels = labelled(HEAD_OF.get(task, "LMHeadModel"))
    labels = {key: value.clamp(max=7) if task == "QUESTION_ANS" else value for key, value in labels.items()}
    seen = inputs | labels if task == "SEQ_2_SEQ_LM" else inputs
    losses = per_record_loss(model, model(**seen), labels)
    assert losses.shape == (5,)
    for i, loss in enumerate(losses):
        one = {key: value[i : i + 1] for key, value in (inputs | labels).items()}
        assert float(loss) == pytest.approx(float(model(**one).loss), rel=1e-5)


def test_labels_of_tokens_behind_a_learned_prompt_belong_to_their_tokens():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(bert("TokenClassification"), PROMPTS["prompt tuning"](peft, "TOKEN_CLS")).eval()
    inputs, labels = labelled("TokenClassification")
    logits = model(**inputs).logits
    losses = per_record_loss(model, model(**inputs), labels)
    for i, loss in enumerate(losses):
        own = F.cross_entropy(logits[i, 4:], labels["labels"][i], ignore_index=-100)
        assert float(loss) == pytest.approx(float(own), rel=1e-5)


def texts() -> list[Record]:
    """Reviews with their own words as labels."""
    return [record | {"labels": record["input_ids"]} for record in reviews()]


@pytest.mark.parametrize("name", share(PROMPTS, 4))
def test_learned_prompts_train_and_nothing_else_moves(name, tmp_path):
    model = prompted(name, "CAUSAL_LM").train()
    before = weights(model)
    made = trainer(tmp_path / "out", model, args={"max_steps": 2}, train_dataset=texts())
    made.train()
    assert made.private.updates == 2
    after = weights(model)
    moved = {key for key in after if not torch.equal(after[key], before[key])}
    assert moved
    assert moved <= {key for key, p in model.named_parameters() if p.requires_grad}


def test_a_prompt_with_a_loss_of_its_own_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    cpt = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
    ada = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], total_step=9)
    for config, words in ((cpt, "CPT"), (ada, "AdaLoRA")):
        with pytest.raises(ModelError, match=words):
            trainer(tmp_path / words, peft.get_peft_model(gpt2(), config), train_dataset=texts()).train()


def test_an_empty_draw_is_a_step_of_the_schedule_too(tmp_path):
    made = trainer(
        tmp_path / "out",
        args={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 10, "logging_steps": 1},
    )
    sizes = []
    losses = made.record_losses
    made.record_losses = lambda model, inputs: sizes.append(made.private.updates) or losses(model, inputs)
    made.train()
    assert made.state.global_step == made.private.updates == 10
    assert len(set(sizes)) < 10  # some draws had no record
    rates = [line["learning_rate"] for line in made.state.log_history if "learning_rate" in line]
    assert rates == pytest.approx([1e-3 * (1 - step / 10) for step in range(10)])


def test_a_loss_function_is_used_in_training_and_in_evaluation(tmp_path):
    def loss(outputs, labels, num_items_in_batch):
        return F.cross_entropy(outputs.logits, labels, reduction="none")

    public = strangers()
    made = trainer(
        tmp_path / "out",
        args={"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
        compute_loss_func=loss,
        eval_dataset=public,
    )
    made.train()
    assert [line["step"] for line in made.state.log_history if "eval_loss" in line] == [1, 2]


# -- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "fp16": {"fp16": True},
    "max_grad_norm": {"max_grad_norm": 0.5},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "train_sampling_strategy": {"train_sampling_strategy": "group_by_length"},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "torch_compile": {"torch_compile": True},
    "use_liger_kernel": {"use_liger_kernel": True},
    "skip_memory_metrics=False": {"skip_memory_metrics": False},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": True},
    r"\(optim\)": {"optim": "lomo"},
    r"\(lr_scheduler_type\)": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_a_private_run_cannot_follow_are_refused(tmp_path, name):
    with pytest.raises(InputError, match=f"does not support .*{name}"):
        trainer(tmp_path / "out", args=REFUSED[name], eval_dataset=[])


@pytest.mark.parametrize(
    ("name", "value"), [("world_size", 2), ("n_gpu", 2), ("deepspeed", {"stage": 2}), ("fsdp", "full_shard")]
)
def test_several_processes_and_devices_are_refused(tmp_path, name, value):
    class Several(transformers.TrainingArguments):
        pass

    args = arguments(tmp_path / "out")
    args.__class__ = Several
    setattr(Several, name, value)
    args.__dict__.pop(name, None)
    with pytest.raises(InputError, match="averages raw gradients"):
        PrivateTrainer(bert(), args, padded, reviews(), budgets="epsilon")


def test_a_model_that_is_checkpointed_or_compiled_beforehand_is_refused(tmp_path):
    model = bert()
    model.gradient_checkpointing_enable()
    for given, name in ((model, "gradient_checkpointing"), (torch.compile(bert()), "torch_compile")):
        with pytest.raises(InputError, match=f"does not support {name}"):
            PrivateTrainer(given, arguments(tmp_path / "out"), padded, reviews(), budgets="epsilon")


def _event(name, act):
    """A callback that acts on one event: act(trainer's objects, state)."""

    def on(self, args, state, control, **objects):
        act(objects, state)

    return type("Acts", (transformers.TrainerCallback,), {name: on})()


ATTACKS = {
    "a write to weights": (
        "on_step_end",
        lambda o, s: o["model"].classifier.weight.data.add_(1),
        "changed between two",
    ),
    "a step": ("on_step_end", lambda o, s: o["optimizer"].step(), "without a training step"),
    "a step of the original": ("on_step_end", lambda o, s: o["optimizer"].original_optimizer.step(), "outside private"),
    "a frozen layer": ("on_step_end", lambda o, s: o["model"].classifier.requires_grad_(False), "trained parameters"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_callback_that_learns_beside_the_updates_is_refused(tmp_path, attack):
    event, act, message = ATTACKS[attack]
    with pytest.raises(EpsilonsError, match=message):
        trainer(tmp_path / "out", args={"max_steps": 3}, callbacks=[_event(event, act)]).train()


def test_callbacks_that_evaluate_or_write_gradients_change_nothing(tmp_path):
    def gradients(objects, state):
        for p in objects["model"].parameters():
            p.grad = torch.ones_like(p)

    plain = trainer(tmp_path / "plain", args={"max_steps": 3})
    plain.train()
    public = strangers()
    made = trainer(tmp_path / "out", args={"max_steps": 3}, eval_dataset=public)
    made.add_callback(_event("on_pre_optimizer_step", gradients))
    made.add_callback(_event("on_pre_optimizer_step", lambda objects, state: made.evaluate()))
    made.train()
    assert is_same(weights(made.model), weights(plain.model))
    assert made.private.ledger.charged == (3,)


def test_the_step_of_an_optimizer_may_project_the_weights_and_a_hook_may_not(tmp_path):
    def bound():
        with torch.no_grad():
            made.model.classifier.weight.clamp_(-0.01, 0.01)

    class Bounded(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            bound()

    hook = _event("on_train_begin", lambda o, s: o["optimizer"].register_step_post_hook(lambda *_: bound()) and None)
    made = trainer(tmp_path / "hooked", args={"max_steps": 2}, callbacks=[hook])
    with pytest.raises(ModelError, match="a hook of the optimizer"):
        made.train()
    made = trainer(tmp_path / "out", args={"max_steps": 2}, optimizer_cls_and_kwargs=(Bounded, {"lr": 1e-3}))
    made.train()
    assert float(made.model.classifier.weight.detach().abs().max()) == pytest.approx(0.01)


def strangers() -> list[Record]:
    """Records that are nobody's: reviews backwards."""
    return [without(record, "epsilon") | {"input_ids": record["input_ids"][::-1]} for record in reviews()[:20]]


def test_training_that_a_callback_stops_claims_the_whole_plan(tmp_path):
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    made = trainer(
        tmp_path / "out",
        args=often | {"load_best_model_at_end": True, "metric_for_best_model": "eval_score"},
        eval_dataset=strangers(),
        compute_metrics=lambda _: {"score": 1.0},
        callbacks=[stopping],
    )
    made.train()
    assert made.private.updates == 2 < STEPS
    assert made.private.epsilon_spent().tolist() == made.plan.epsilon_spent().tolist()


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=500, pad_token_id=0, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def test_texts_are_generated_in_evaluation_and_prediction_and_training_is_the_same(tmp_path):
    public, shapes, found = [record | {"labels": record["input_ids"][:6]} for record in strangers()], [], []

    def metrics(made):
        shapes.append(np.shape(made.predictions))
        return {}

    for cls, generates in ((PrivateSeq2SeqTrainer, True), (PrivateTrainer, False)):
        model = t5()
        args = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "predict_with_generate": generates}
        options = {"train_dataset": texts(), "eval_dataset": public, "compute_metrics": metrics if generates else None}
        made = trainer(tmp_path / cls.__name__, model, args=args, cls=cls, **options)
        if generates:
            made.args.generation_max_length = 30
        made.train()
        assert made.private.updates == 3
        found.append(weights(model))
        if generates:  # shorter texts are padded to the length in the model's own settings, 20
            assert (made.predict(public, max_length=5).predictions[:, 5:] <= 0).all()
    assert shapes == [(20, 30), (20, 30), (20, 20)]
    assert is_same(*found)


def test_scores_of_training_records_reach_no_log_whenever_they_are_asked_for(tmp_path):
    made = trainer(tmp_path / "out", args={"max_steps": 2}, eval_dataset=strangers(), compute_metrics=lambda _: {})
    made.train()
    assert "eval_loss" in made.evaluate()
    assert "eval_loss" in made.evaluate(strangers()[5:])
    with pytest.raises(InputError, match="hold records of it"):
        made.evaluate(reviews()[:40])
    often = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    made = trainer(tmp_path / "later", args=often, eval_dataset=strangers())
    made.eval_dataset = reviews()[::-1]
    with pytest.raises(InputError, match="hold records of it"):
        made.train()
    made = trainer(tmp_path / "logged", args={"max_steps": 2}, log_private_loss=True)
    made.train()
    assert "eval_loss" in made.evaluate(reviews())
    assert any("eval_loss" in line for line in made.state.log_history)


def test_the_best_checkpoint_may_be_loaded_at_the_end(tmp_path):
    public = strangers()
    seen = {}
    keep = _event("on_step_end", lambda o, s: seen.update({s.global_step: weights(o["model"])}))
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    made = trainer(
        tmp_path / "out",
        args=often | {"max_steps": 4, "load_best_model_at_end": True, "metric_for_best_model": "eval_score"},
        eval_dataset=public,
        compute_metrics=lambda _: {"score": -len(seen)},  # the first is the best
        callbacks=[keep],
    )
    made.train()
    assert is_same(weights(made.model), seen[1])
    assert not is_same(seen[1], seen[4])
    assert made.private.ledger.charged == (4,)
    assert made.private.ledger.is_closed
    assert not list(made.private_dir.glob("*key*"))


class _Mean(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        raise AssertionError


class _OwnStep(PrivateTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        batch = padded([without(record, "epsilon") for record in reviews()[:4]])
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()


class _OwnClass(transformers.BertForSequenceClassification):
    pass


class _OwnLoader(PrivateTrainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=8, collate_fn=padded)


class _OwnSampler(PrivateTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class _TwoSteps(PrivateTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        super().training_step(model, inputs, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)


def without_mask(records):
    return {name: value for name, value in padded(records).items() if name != "attention_mask"}


def packed(records):
    """All records in one row."""
    ids = [word for record in records for word in record["input_ids"]]
    places = [i for record in records for i in range(len(record["input_ids"]))]
    rows = {"input_ids": ids, "position_ids": places, "labels": ids}
    return {name: torch.tensor([row]) for name, row in rows.items()}


same = reviews()


class PackedByTRL(list):
    column_names = ("input_ids", "labels", "seq_lengths")


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 5}
BAD = {
    "a column that is missing": (BudgetError, "must be a column", {"budgets": "nothing"}),
    "an iterable data set": (InputError, "read by index", {"train_dataset": iter(same)}),
    "no data set": (InputError, "needs train_dataset", {"train_dataset": None}),
    "scores on the training data": (InputError, "are train_dataset", {"train_dataset": same, "eval_dataset": same}),
    "scores on a copy": (InputError, "hold records of it", {"eval_dataset": [dict(row) for row in same]}),
    "scores on a part": (InputError, "hold records of it", {"eval_dataset": same[10:50]}),
    "scores on a shuffled copy without budgets": (
        InputError,
        "hold records of it",
        {"eval_dataset": [without(row, "epsilon") for row in same[::-1]]},
    ),
    "one copy among several sets": (InputError, "hold records of it", {"eval_dataset": {"x": same[:20]}}),
    "the best by training records": (
        InputError,
        "choose the weights",
        {"eval_dataset": same[:40], "log_private_loss": True, "args": BEST},
    ),
    "checkpoints of the best only, by training records": (
        InputError,
        "choose the weights",
        {
            "eval_dataset": same,
            "log_private_loss": True,
            "args": {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"},
        },
    ),
    "an end by training records": (
        InputError,
        "the end of training",
        {
            "eval_dataset": same,
            "log_private_loss": True,
            "args": {"eval_strategy": "epoch", "metric_for_best_model": "loss"},
            "callbacks": [transformers.EarlyStoppingCallback()],
        },
    ),
    "records in one row": (
        InputError,
        "packs several records",
        {"data_collator": transformers.DataCollatorWithFlattening(), "train_dataset": same},
    ),
    "rows that TRL has packed": (InputError, "packed from several texts", {"train_dataset": PackedByTRL(same)}),
    "records in one row by another collator": (DataError, "packs several records", {"data_collator": packed}),
    "texts that are not generated": (InputError, "PrivateSeq2SeqTrainer", {"args": {"predict_with_generate": True}}),
    "such scores in a dict": (InputError, "are train_dataset", {"train_dataset": same, "eval_dataset": {"x": same}}),
    "too few budgets": (EpsilonsError, "96 records", {"budgets": BUDGETS.subset(np.arange(90))}),
    "a plan of other steps": (InputError, "max_steps=3", {"budgets": BUDGETS, "plan": (3, 16)}),
    "a plan of other draws": (InputError, "expects 8", {"budgets": BUDGETS, "plan": (STEPS, 8)}),
    "a class outside transformers": (EpsilonsError, "compute_loss_func", {"model": _OwnClass}),
    "a mean": (EpsilonsError, "one loss per record", {"compute_loss_func": lambda o, y: F.cross_entropy(o.logits, y)}),
    "padding without a mask": (BatchDependenceError, "without_mask pads", {"data_collator": without_mask}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_would_break_the_guarantee_is_refused(tmp_path, case):
    error, message, options = BAD[case]
    model = options["model"](bert().config) if "model" in options else bert()
    options = {name: value for name, value in options.items() if name != "model"}
    if "plan" in options:
        options["plan"] = epsilons.plan(BUDGETS, epsilons.Recipe(*options["plan"], 1.0), accountant="rdp")
    with pytest.raises(error, match=message):
        trainer(tmp_path / "out", model, **options).train()


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (_Mean, "record_losses"),
        (_OwnStep, "without a training step"),
        (_OwnLoader, "overrides get_train_dataloader"),
        (_OwnSampler, "overrides _get_train_sampler"),
        (_TwoSteps, "began a step before"),
    ],
)
def test_a_subclass_that_would_draw_or_learn_in_another_way_is_refused(tmp_path, cls, message):
    with pytest.raises(EpsilonsError, match=message):
        cls(bert(), arguments(tmp_path / "out"), padded, reviews(), budgets="epsilon", accountant="rdp").train()


def test_every_run_of_a_plan_for_several_claims_a_slot(tmp_path):
    recipe = epsilons.Recipe(2, 16, 1.0)
    folder = epsilons.PlanFolder.create(tmp_path / "plan", epsilons.plan(BUDGETS, recipe, accountant="rdp", runs=2))
    for run in ("first", "second"):
        made = trainer(tmp_path / run, args={"max_steps": 2}, plan=folder)
        made.train()
        assert made.private.plan.runs == 2
    assert folder.begun == 2
    with pytest.raises(RunError, match="All 2 runs"):
        trainer(tmp_path / "third", args={"max_steps": 2}, plan=folder).train()
    trainer(tmp_path / "first", args={"max_steps": 2}, plan=folder).train(resume_from_checkpoint=True)


def test_a_second_run_of_a_trainer_is_refused_and_so_are_searches(whole):
    with pytest.raises(CallOrderError, match="trained already"):
        whole.train()
    with pytest.raises(InputError, match="spends the budgets again"):
        whole.hyperparameter_search()


def test_a_finished_run_that_is_resumed_makes_no_further_step(whole):
    again = trainer(whole.private_dir.with_name("out"), args={"warmup_steps": WARMUP})
    again.train(resume_from_checkpoint=True)
    assert again.private.ledger.charged == (STEPS,)
    assert is_same(weights(again.model), weights(whole.model))


def test_a_checkpoint_without_its_private_folder_is_refused(whole, tmp_path):
    with pytest.raises(RunError, match="spends the budgets again"):
        trainer(whole.private_dir.with_name("out"), private_dir=tmp_path / "other").train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_an_older_copy_of_the_private_folder_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "out", callbacks=[interrupted_at(3)]).train()
    shutil.copytree(tmp_path / "out-private", tmp_path / "copy")
    trainer(tmp_path / "out").train(resume_from_checkpoint=True)
    with pytest.raises(RunError, match="older copy"):
        trainer(tmp_path / "out", private_dir=tmp_path / "copy").train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"bf16": True}, {"dataloader_num_workers": 1}, {"optim": "adafactor"}])
def test_other_arguments_of_transformers_run(tmp_path, options):
    made = trainer(tmp_path / "out", args={"max_steps": 2} | options)
    made.train()
    assert made.private.updates == 2


@pytest.mark.slow
def test_the_example_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("EPSILONS_TINY", "1")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "06_huggingface.py"))
    assert "tokens: 2 draws, epsilon spent [2. 8.]" in capsys.readouterr().out


# -- PrivateTrainer with budgets of persons: it trains as a loop of our own, and no number of rows gets out ----------


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
    records = [without(row, "who", "epsilon") for row in rows]
    key = made.private._draws.randomness.key
    own = own_loop(key, records, made.plan, warmup=0, budgets=people, rows_per_person=3)
    assert is_same(weights(made.model), own)
    assert not is_same(weights(made.model), weights(bert()))


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
