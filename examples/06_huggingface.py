"""Hugging Face: two kinds of text models with one budget per record: a label for each review, a tag for each word.

It reads imdb-train.parquet in the folder that EPSILONS_DATA names; without it, a few sentences. Models begin from
random weights, and words get numbers by a hash, so nothing is downloaded.
"""

import os
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow.parquet
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DefaultDataCollator,
    TrainingArguments,
)

from epsilons.huggingface import PrivateTrainer

TINY = bool(os.environ.get("EPSILONS_TINY"))  # a few steps on a few records, as a test
RECORDS, EPOCHS, WORDS, LENGTH = (120, 1, 500, 16) if TINY else (5_000, 4, 8_000, 64)
REVIEWS = Path(os.environ.get("EPSILONS_DATA", ".")) / "imdb-train.parquet"


def texts_and_labels() -> tuple[list[str], list[int]]:
    if not REVIEWS.exists():
        return ["A moving film .", "Dull , from start to end ."] * (RECORDS // 2), [1, 0] * (RECORDS // 2)
    table = pyarrow.parquet.read_table(REVIEWS)
    chosen = table.take(np.linspace(0, len(table) - 1, RECORDS).astype(int))
    return chosen["text"].to_pylist(), chosen["label"].to_pylist()


def padded(values: list[int], fill: int) -> list[int]:
    """To a fixed length: no record's rounding depends on the length of others."""
    return [*values, *[fill] * LENGTH][:LENGTH]


def inputs(text: str) -> dict[str, list[int]]:
    ids = padded([1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.lower().split()], 0)
    return {"input_ids": ids, "attention_mask": [int(token > 0) for token in ids]}


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        num_train_epochs=EPOCHS,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


config = BertConfig(
    vocab_size=WORDS,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    max_position_embeddings=LENGTH,
)
texts, labels = texts_and_labels()
epsilon = np.where(np.arange(RECORDS) % 3, 2.0, 8.0)  # one per record: a column of the data

with tempfile.TemporaryDirectory() as folder:
    # One label per text: is the review favourable?
    rows = [
        inputs(text) | {"labels": label, "epsilon": e} for text, label, e in zip(texts, labels, epsilon, strict=True)
    ]
    reviews = PrivateTrainer(
        BertForSequenceClassification(config),
        arguments(Path(folder) / "reviews"),
        DefaultDataCollator(),
        rows,
        budgets="epsilon",
    )
    reviews.train()
    print(f"texts: {reviews.private.updates} draws, epsilon spent {reviews.private.epsilon_spent().round(3)}")

    # One label per word: is it written with a capital? -100 has no loss.
    rows = [
        inputs(text) | {"labels": padded([int(word[0].isupper()) for word in text.split()], -100), "epsilon": e}
        for text, e in zip(texts, epsilon, strict=True)
    ]
    tags = PrivateTrainer(
        BertForTokenClassification(config),
        arguments(Path(folder) / "tags"),
        DefaultDataCollator(),
        rows,
        budgets="epsilon",
    )
    tags.train()
    print(f"tokens: {tags.private.updates} draws, epsilon spent {tags.private.epsilon_spent().round(3)}")

    assert (reviews.private.epsilon_spent() <= reviews.plan.epsilons).all()
    assert not list((Path(folder) / "reviews").rglob("*ledger*"))  # beside it, in reviews-private
