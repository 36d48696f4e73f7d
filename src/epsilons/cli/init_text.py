"""What `epsilons init` drafts for columns of texts: fixed features of them, or ids of tokens, and settings that fit."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.infer import TableGuess

#: Bytes that the features of all records may take; features are not sparse.
MOST_BYTES = 2 * 10**9
#: Buckets of hashed n-grams: of words, and of the characters of short texts.
BUCKETS, SHORT_BUCKETS = 8192, 4096
#: With fewer buckets than this, hashed words are worse than embeddings, if there is nothing beside the text.
FEWEST_BUCKETS = 4096


@dataclass(frozen=True)
class Way:
    """One way to learn from texts.

    inputs    the line that turns texts into inputs
    model     name of the model
    training  settings of [training] that fit it
    """

    inputs: str
    model: str
    training: dict[str, str]

    @property
    def settings(self) -> str:
        """The settings of [training] in words."""
        listed = [f"{name} = {value}" for name, value in self.training.items()]
        return ", ".join(listed if "momentum" in self.training else [*listed, "no momentum"])


@dataclass(frozen=True)
class TextSettings(Way):
    """The way that a draft takes.

    instead  another way, as a comment; None if there is none
    most     largest batch size
    """

    instead: Way | None
    most: float


def text_settings(guess: TableGuess, records: int) -> TextSettings | None:
    """Settings for the columns of texts; None if there are none."""
    texts = [column for column in guess.columns if column.kind == "text"]
    if not texts:
        return None
    is_short, is_number = all(column.short for column in texts), guess.classes is None
    others = [name for kind in ("numeric", "categorical") for name in guess.names(kind) if name != guess.target]
    buckets = _buckets(SHORT_BUCKETS if is_short else BUCKETS, records * len(texts))
    hashed = _hashed(buckets, is_short, is_number)
    tokens = _tokens(is_short) if len(texts) == 1 and not others else None
    if tokens is not None and buckets < FEWEST_BUCKETS and not is_short:
        return TextSettings(tokens.inputs, tokens.model, tokens.training, hashed, most=512)
    return TextSettings(hashed.inputs, hashed.model, hashed.training, tokens, most=2048)


def _buckets(buckets: int, texts: int) -> int:
    """As many as fit, a power of 2, and at least 256."""
    while buckets > 256 and 4 * buckets * texts > MOST_BYTES:
        buckets //= 2
    return buckets


def _hashed(buckets: int, is_short: bool, is_number: bool) -> Way:
    n_grams = ", words = [], characters = [1, 2, 3]" if is_short else ""
    training = {"clip_norm": "0.5", "optimizer": '"sgd"', "lr": "10", "momentum": "0.9"}
    if is_number:  # a squared loss diverges at such rates
        training = {"clip_norm": "1.0", "optimizer": '"sgd"', "lr": "0.5"}
    inputs = f'features = {{ name = "hashed-text", options = {{ buckets = {buckets}{n_grams} }} }}'
    return Way(inputs, "logistic", training)


def _tokens(is_short: bool) -> Way:
    if is_short:
        training = {"clip_norm": "1.5", "optimizer": '"sgd"', "lr": "2"}
        return Way('tokens = { kind = "bytes", length = 32 }', "lstm", training)
    training = {"clip_norm": "1.0", "optimizer": '"adam"', "lr": "0.02"}
    return Way('tokens = { kind = "words", length = 256, buckets = 16384 }', "embedding-bag", training)
