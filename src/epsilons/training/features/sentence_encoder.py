"""Sentence embeddings by a transformer that others trained: the mean of its last states over a text's tokens.

Reimers and Gurevych, "Sentence-BERT", arXiv 1908.10084v1, section 3 (mean pooling). The weights are constants; what
they were trained on decides whether they are public, so the caller must state it. The extra `encoder` has the library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import InputError, printable
from .fixed import Features, blocks, check_texts

#: Texts are encoded in blocks of this size, the last one filled up by empty texts.
BLOCK = 16
MOST_TOKENS = 8192
#: Characters of `trained_on`, which the guarantee repeats.
MOST_CHARACTERS = 500


@torch.no_grad()
def encoder(
    texts: Sequence[str], model: str, trained_on: str, tokens: int = 128, revision: str | None = None
) -> Tensor:
    """(records, width of the model) features of norm 1, 32-bit.

    texts       one text for each record
    model       a folder with the model, its tokenizer and its weights (.safetensors), or a name on the hub
    trained_on  what the weights were trained on, in words; the guarantee repeats it. If private records, or texts close
                to them, are among these data, features reveal what the weights remember, and no guarantee covers that
    tokens      texts are cut or filled up to this number of tokens
    revision    of a model on the hub: a commit

    A record's features depend on no other record: every block has the same shape. Raises InputError if the inputs are
    not texts, an option is out of range, or the model cannot be loaded.
    """
    check_texts(texts, "encoder")
    _check_options(model, trained_on, tokens)
    tokenizer, network, _ = _loaded(model, revision)
    parts = []
    for rows in blocks(len(texts), BLOCK):
        block = list(texts[rows])
        filled = block + [""] * (BLOCK - len(block))
        parts.append(_embedded(tokenizer, network, filled, tokens)[: len(block)])
    return torch.cat(parts)


def _embedded(tokenizer: Any, network: Any, texts: list[str], tokens: int) -> Tensor:
    """(BLOCK, width): mean of the last states of the real tokens, at norm 1."""
    read = tokenizer(texts, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt")
    states = network(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).last_hidden_state
    weights = read["attention_mask"][..., None].float()
    return F.normalize((states * weights).sum(1) / weights.sum(1).clamp_min(1))


def _check_options(model: str, trained_on: str, tokens: int) -> None:
    if not isinstance(model, str) or not model:
        raise InputError(f"model must be a folder or a name on the hub, got {model!r}.")
    if not isinstance(trained_on, str) or not trained_on.strip() or len(trained_on) > MOST_CHARACTERS:
        raise InputError(
            f"trained_on must state in 1 to {MOST_CHARACTERS} characters what the encoder's weights were trained on, "
            f"got {str(trained_on)[:40]!r}."
        )
    if not isinstance(tokens, int) or not 2 <= tokens <= MOST_TOKENS:
        raise InputError(f"tokens must be a whole number from 2 to {MOST_TOKENS:,}, got {tokens!r}.")


@lru_cache(maxsize=1)
def _loaded(model: str, revision: str | None) -> tuple[Any, Any, str]:
    """Tokenizer, network in evaluation mode, and the SHA-256 of the network's weights. No code of a model is run."""
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise InputError(
            'The features "encoder" need the library transformers: pip install "transformers>=4.40"'
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
        network = AutoModel.from_pretrained(model, revision=revision, trust_remote_code=False, use_safetensors=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        kind = "folder" if Path(model).is_dir() else "hub"
        raise InputError(f"The encoder {model!r} cannot be loaded from the {kind}: {printable(reason)}.") from None
    network.float().eval()
    return tokenizer, network, _digest(network)


def _digest(network: Any) -> str:
    whole = hashlib.sha256()
    for name, values in sorted(network.state_dict().items()):
        whole.update(name.encode())
        whole.update(values.contiguous().numpy().tobytes())
    return whole.hexdigest()


def _origin(shape: tuple[int, ...], *, model: str, trained_on: str, revision: str | None = None, **_: Any) -> str:
    digest = _loaded(model, revision)[2]
    said = printable(trained_on.strip())
    name = printable(Path(model).name)
    return (
        f"each record's text by the encoder {name} (weights with SHA-256 {digest[:16]}), trained, as its user states, "
        f'on "{said}". If private records, or data close to them, are among that, no guarantee covers what the weights '
        "reveal"
    )


ENCODER = Features(encoder, _origin, of_texts=True)
