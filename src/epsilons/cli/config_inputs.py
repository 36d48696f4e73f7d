"""What the sections of a config are made of: their base, types of values, fixed features, ids of tokens, [about]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..data.text import Tokens
from ..tabular import decimal

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = str | int | float | bool


def check_levels(shares: dict[str, float] | None) -> dict[str, float] | None:
    """Shares by epsilon. Raises ValueError for a key that is no number."""
    for level in shares or {}:
        if decimal(level) is None:
            raise ValueError(f'an epsilon must be a number, got {level!r}; write {{"1" = 0.5, "2" = 0.5}}')
    return shares


#: Of every section: its keys have one type each, and others are refused.
STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)


class _Section(BaseModel):
    model_config = STRICT


class AboutSection(_Section):
    """What a reader of the report must know about the run. The report for release shows it, too."""

    purpose: Annotated[str, Field(max_length=10_000)] | None = None
    """What the model is for, in your own words."""
    responsible: Annotated[str, Field(max_length=10_000)] | None = None
    """Who is responsible for the run: a person, a team or an institution."""
    contact: Annotated[str, Field(max_length=10_000)] | None = None
    """Where people can ask questions, or withdraw."""


class FeaturesSection(_Section):
    """Fixed features in the place of the inputs."""

    name: str
    options: dict[str, Any] = {}


class TokensSection(_Section):
    """How the texts of a column become ids of tokens."""

    kind: Literal["words", "bytes"] = "words"
    length: Annotated[int, Field(ge=1, le=65_536)] = 256
    buckets: Annotated[int, Field(ge=2, le=2**20)] | None = None

    @model_validator(mode="after")
    def _no_buckets_of_bytes(self) -> TokensSection:
        if self.kind == "bytes" and self.buckets is not None:
            raise ValueError('buckets are for words: leave them out for kind = "bytes", which has 257 ids')
        return self

    @property
    def tokens(self) -> Tokens:
        """The same, with defaults."""
        return Tokens(self.kind, self.length) if self.buckets is None else Tokens(self.kind, self.length, self.buckets)
