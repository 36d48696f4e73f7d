"""Language models under LoRA: adapters learn from every author's texts, and nothing else moves.

In other libraries adapters were left without updates, unnoticed (meta-pytorch/opacus#820). So what moves is compared
name by name, and the sum that moves it with plain backward passes of each author's texts alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from epsilons.huggingface import per_record_loss
from small_trainers import Record, gpt2, imdb, padded, trainer, transformers, weights
from sums import OVERSTATED, attached, away, length
from zoo import Case

peft = pytest.importorskip("peft")

WORDS, LENGTH = 32_000, 12
#: 12 authors of 1 to 4 texts each, and their budgets.
AUTHORS = np.repeat(np.arange(12), np.resize([1, 3, 2, 4], 12))
EPSILONS = np.where(np.arange(12) % 2, 4.0, 8.0)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {"gpt2": lambda: gpt2(WORDS, 2), "llama": llama}


def made(name: str) -> Any:
    """The model, with the head's weights tied to the table, under LoRA of all its linear layers but the head."""
    torch.manual_seed(0)
    model = MODELS[name]()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def tokens(text: str) -> list[int]:
    return [1 + sum(map(ord, word)) * 7919 % (WORDS - 1) for word in text.split()]


def of_each_author() -> list[tuple[int, list[int]]]:
    """(author, tokens) of texts of different lengths."""
    rows = zip(AUTHORS.tolist(), imdb(), strict=False)
    return [(author, tokens(row["text"])[: 5 + i % (LENGTH - 4)]) for i, (author, row) in enumerate(rows)]


def padded_rows() -> list[Record]:
    return [_row(author, text) for author, text in of_each_author()]


def packed_rows() -> list[Record]:
    """Blocks of equal length without padding, each cut from one author's texts."""
    rows = []
    for author, texts in itertools.groupby(of_each_author(), key=lambda pair: pair[0]):
        own = list(itertools.chain.from_iterable(text for _, text in texts))
        rows += [_row(author, (own[i : i + LENGTH] + own[:LENGTH])[:LENGTH]) for i in range(0, len(own), LENGTH)]
    return [{**row, "input_ids": (row["input_ids"] * LENGTH)[:LENGTH]} for row in rows]


def _row(author: int, ids: list[int]) -> Record:
    return {"input_ids": ids, "labels": ids, "author": f"A{author}", "epsilon": EPSILONS[author]}


def collated(rows: Sequence[Record]) -> dict[str, Tensor]:
    return padded([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows])


ROWS: dict[str, Callable[[], list[Record]]] = {"padded": padded_rows, "packed": packed_rows}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", "packed"),
        ("llama", "padded"),
        pytest.param("gpt2", "padded", marks=pytest.mark.slow),
        pytest.param("llama", "packed", marks=pytest.mark.slow),
    ],
)
def test_adapters_train_by_authors_and_frozen_parts_do_not_move(name, kind, tmp_path):
    model, rows = made(name), ROWS[kind]()
    assert (len({len(row["input_ids"]) for row in rows}) == 1) == (kind == "packed")
    before = weights(model)
    options = {"train_dataset": rows, "data_collator": collated, "person": "author", "rows_per_person": 2}
    one = trainer(tmp_path / "out", model, args={"max_steps": 2, "gradient_accumulation_steps": 1}, **options)
    one.train()
    assert one.plan.unit == "person"
    assert one.private.ledger.charged == (2,)
    assert one.private._clipper._engine.is_proven
    after = weights(model)
    moved = {key for key in after if not torch.equal(after[key], before[key])}
    assert moved == {key for key, p in model.named_parameters() if p.requires_grad}
    layers = {key.split(".lora_")[0] for key in moved}
    assert moved == {f"{layer}.lora_{side}.default.weight" for layer in layers for side in "AB"}
    assert len(layers) == (2 * 4 if name == "gpt2" else 2 * 7)


def losses_of(model: Any, rows: Sequence[Record]) -> Tensor:
    batch = collated(rows)
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return per_record_loss(model, outputs, {"labels": batch["labels"]})


def of_authors(model: nn.Module, rows: Sequence[Record], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Each author's gradient in 64 bits, from a forward pass on their texts alone."""
    exact, found, first = copy.deepcopy(model).double(), [], 0
    trained = [p for p in exact.parameters() if p.requires_grad]
    for size in sizes:
        found.append(list(torch.autograd.grad(losses_of(exact, rows[first : first + size]).mean(), trained)))
        first += size
    return found


def assert_sum_is_of_each_author_alone(model: Any, rows: Sequence[Record]) -> list[Tensor]:
    sizes = [len(list(own)) for _, own in itertools.groupby(rows, key=lambda row: row["author"])]
    engine = attached("ghost", Case(model, lambda records: ()))
    gradients = of_authors(model, rows, sizes)
    norms = [length(one) for one in gradients]
    clip_norm = torch.tensor(norms, dtype=torch.float64).median() * torch.ones(len(sizes), dtype=torch.float64)
    expected = [torch.zeros_like(g) for g in gradients[0]]
    for norm, one in zip(norms, gradients, strict=True):
        factor = min(1.0, float(clip_norm[0]) / (OVERSTATED * norm))
        expected = [total + factor * g for total, g in zip(expected, one, strict=True)]
    for _ in range(2):  # the second is not checked
        engine.begin(len(rows))
        ours = engine.clipped_sum(losses_of(model, rows), clip_norm, torch.ones_like(clip_norm), sizes)
        assert away(ours, expected) <= 1e-5 * length(expected)
    assert engine.is_proven
    return ours


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_adapters_get_the_clipped_gradients_of_each_author_alone(name, kind):
    """Of every adapter, both factors: B is 0 at the start, and then A has no gradient."""
    model = made(name)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_B" in key:
                p.normal_(std=0.1)
    assert all(float(part.abs().max()) > 0 for part in assert_sum_is_of_each_author_alone(model, ROWS[kind]()))


@pytest.mark.parametrize("name", MODELS)
def test_a_head_that_is_tied_to_a_large_table_is_trained_as_one_weight(name):
    """Without adapters: the table's rows that occur, and all rows as the head's weights, are clipped together."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for key, p in model.named_parameters():
        p.requires_grad_("embed_tokens" in key or "wte" in key)
    (table,) = assert_sum_is_of_each_author_alone(model, padded_rows()[:5])
    assert table.shape == (WORDS, 32)
