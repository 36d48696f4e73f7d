"""Small models of transformers on real reviews, for tests of epsilons.huggingface."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

import epsilons

transformers = pytest.importorskip("transformers", reason="epsilons.huggingface needs transformers")
pytest.importorskip("accelerate", reason="epsilons.huggingface needs accelerate")

if "EPSILONS_DATA" not in os.environ:
    pytest.skip("EPSILONS_DATA names no folder of data sets, with imdb-train.parquet", allow_module_level=True)

from epsilons.huggingface import PrivateTrainer  # noqa: E402

RECORDS, WORDS, LENGTH, DELTA = 96, 500, 24, 1e-3
EPSILONS = np.where(np.arange(RECORDS) % 3, 2.0, 8.0)
BUDGETS = epsilons.Budgets(EPSILONS, delta=DELTA)
Record = dict[str, Any]


def encoded(text: str, length: int = LENGTH) -> list[int]:
    """Numbers of its first words, by a hash; 0 is padding."""
    return [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.lower().split()[:length]]


@lru_cache
def imdb() -> list[dict[str, Any]]:
    """Reviews of both kinds, with text and label."""
    table = pyarrow.parquet.read_table(Path(os.environ["EPSILONS_DATA"]) / "imdb-train.parquet")
    return table.take(np.linspace(0, len(table) - 1, RECORDS).astype(int)).to_pylist()


def reviews() -> list[Record]:
    """Reviews of different lengths, each with its label and its epsilon."""
    return [
        {"input_ids": encoded(row["text"], 8 + i % 17), "labels": row["label"], "epsilon": float(EPSILONS[i])}
        for i, row in enumerate(imdb())
    ]


def padded(records: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch, padded to its longest record, with an attention mask. Labels may be one per record or per token."""
    longest = max(len(r["input_ids"]) for r in records)

    def rows(name: str, fill: int) -> Tensor:
        return torch.tensor([[*r[name], *[fill] * (longest - len(r[name]))] for r in records])

    ids = rows("input_ids", 0)
    is_of_tokens = isinstance(records[0]["labels"], list)
    labels = rows("labels", -100) if is_of_tokens else torch.tensor([r["labels"] for r in records])
    assert "epsilon" not in records[0]
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def bert(kind: str = "SequenceClassification", **options: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"BertFor{kind}")(config)


def gpt2(words: int = WORDS, layers: int = 1) -> Any:
    """Without dropout."""
    sizes = {"vocab_size": words, "n_embd": 32, "n_layer": layers, "n_head": 2, "n_positions": 64, "pad_token_id": 0}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))


def arguments(folder: Path, **options: Any) -> Any:
    given = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "save_steps": 5,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    cls = (
        transformers.Seq2SeqTrainingArguments if "predict_with_generate" in options else transformers.TrainingArguments
    )
    return cls(str(folder), **(given | options))


def trainer(
    folder: Path, model: Any = None, args: Mapping[str, Any] | None = None, cls: Any = PrivateTrainer, **options: Any
) -> Any:
    given: dict[str, Any] = {
        "train_dataset": reviews(),
        "data_collator": padded,
        "budgets": "epsilon",
        "delta": DELTA,
        "accountant": "rdp",
        "private_seed": 5,
    }
    return cls(model or bert(), arguments(folder, **(args or {})), **(given | options))


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def is_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | dict(other))


def interrupted_at(step: int) -> Any:
    """A callback that interrupts training after so many steps."""

    class Interrupt(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                raise KeyboardInterrupt

    return Interrupt()


Loss = Callable[[Any, Any], Tensor]
