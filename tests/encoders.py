"""A transformer so small that a test can make it: random weights, 30 words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

TRAINED_ON = "nothing: the weights are random"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def tiny_encoder(folders: pytest.TempPathFactory) -> str:
    """A folder with the model, its tokenizer and its weights. Needs transformers."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = folders.mktemp("encoder")
    pieces: list[str] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    torch.manual_seed(random.Random(0).randrange(2**31))
    BertModel(BertConfig(vocab_size=len(pieces), max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return str(Path(folder))
