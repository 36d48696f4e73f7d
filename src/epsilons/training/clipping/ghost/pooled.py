"""Tables with rows that are only added up: the mean or sum of a text's embeddings, with or without weights; bags.

All tokens of a record then have one gradient g, multiplied by each token's weight. So row v of the table has C_v·g,
where C_v is the sum of the weights of token v, and the squared norm is |g|²·Σ_v C_v². No gradients by tokens are
computed. Which gradient that is follows from the graph, not from values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch_axis import BatchAxis, dims_of, grad_shape, input_shape, operator, signed
from .embeddings import TableGrad, TokenSums, begins_in, in_order, is_first, owners, table_sum
from .graph import ParameterUse
from .per_sample_grads import OutputGrads, PerSampleGradFn, blanked, first, to_32_bits

#: {operator: the operators that read its outputs, each with the number of the input}
Readers = Mapping[Any, Sequence[tuple[Any, int]]]


#: The smallest normal 64-bit number: a square below it may become 0.
SMALLEST = 2.0**-1022


class Texts(NamedTuple):
    """The tokens that each record looks up, in the order of records.

    token, owner  (N,) which token of which record
    weight        (N,) 64-bit; None: all 1
    scale         (records,) or (), 64-bit: a further factor
    """

    token: Tensor
    owner: Tensor
    weight: Tensor | None
    scale: Tensor


class Weights(NamedTuple):
    """What a record's gradient is multiplied by for each token that it has, by token, then by record.

    token, owner, weight  (sums,), the weights 64-bit
    """

    token: Tensor
    owner: Tensor
    weight: Tensor


class PooledGrad(TableGrad):
    """Gradients by a table: weight·gradient, with one gradient for each record. gradient: (records, features) 64-bit"""

    def __init__(self, weights: Weights, gradient: Tensor, size: int, dtype: torch.dtype) -> None:
        super().__init__(None, len(gradient), size)
        self._weights, self._gradient, self._dtype = weights, gradient, dtype

    def _computed(self) -> TokenSums:
        """With all entries computed, for sums that have other rows too."""
        token, owner, weight = self._weights
        return TokenSums(token, owner, (weight[:, None] * self._gradient.index_select(0, owner)).to(self._dtype))

    def squared_norm(self) -> Tensor:
        _, owner, weight = self._weights
        squared = self._gradient.square().sum(1) + self._gradient.shape[1] * SMALLEST
        weights = weight.new_zeros(self._records).index_add_(0, owner, weight.square() + SMALLEST)
        return squared * weights

    def weighted(self, factor: Tensor) -> Tensor:
        token, owner, weight = self._weights
        return table_sum(begins_in(token, self._size), owner, self._gradient, weight * factor.index_select(0, owner))

    def blank(self, keep: Tensor) -> PooledGrad:
        weights = self._weights._replace(weight=blanked(self._weights.weight, keep[self._weights.owner]))
        return PooledGrad(weights, blanked(self._gradient, keep), self._size, self._dtype)


def weights_of(texts: Texts, size: int, padding: int) -> Weights:
    """The weights of equal tokens of a record, added."""
    token, places = in_order(texts.token, size, padding)
    owner = texts.owner.index_select(0, places)
    is_new = is_first(token, owner)
    begins = is_new.nonzero()[:, 0]
    if texts.weight is None:
        counts = torch.diff(begins, append=begins.new_tensor([len(token)])).double()
    else:
        own = texts.weight.index_select(0, places)
        counts = own.new_zeros(len(begins)).index_add_(0, is_new.cumsum(0) - 1, own)
    return Weights(token.index_select(0, begins).long(), owner.index_select(0, begins).long(), counts)


# -- lookups whose rows are added up ------------------------------------------------------------------------


def pooled(use: ParameterUse, readers: Readers, records: int) -> tuple[ParameterUse, PerSampleGradFn] | None:
    """This use of a table as one of the operator that adds its rows up, and its sampler; None for all other uses."""
    name = operator(use.node)
    if name == "EmbeddingBag":
        texts = _bags(use, records)
        return None if texts is None else (use, _sampler(use, texts))
    found = _adding(use, readers, records) if name == "Embedding" else None
    if found is None:
        return None
    node, factors = found
    shape, axis = grad_shape(use.node, 0), use.batch.axis
    index = use.node._saved_indices.movedim(axis, 0)  # (records, time)
    weight = None
    for factor in factors:
        own = factor.double().expand(shape)[..., 0].movedim(axis, 0).flatten()
        weight = own if weight is None else weight * own
    scale = 1.0 / index.shape[1] if operator(node) == "Mean" else 1.0
    texts = Texts(
        index.flatten(),
        owners(index, index.dtype),
        weight,
        torch.tensor(scale, dtype=torch.float64, device=index.device),
    )
    return dataclasses.replace(use, node=node, axes=(BatchAxis(0),)), _sampler(use, texts)


def _adding(use: ParameterUse, readers: Readers, records: int) -> tuple[Any, list[Tensor]] | None:
    """(the operator that adds up a record's rows, the factors without features by which they are multiplied)."""
    shape, batch = grad_shape(use.node, 0), use.batch
    if len(shape) != 3 or batch.axis > 1 or batch.inner != 1 or shape[batch.axis] != records:
        return None
    node, factors = use.node, list[Tensor]()
    while len(readers.get(node, ())) == 1:
        (node, place), *_ = readers[node]
        name = operator(node)
        if name in ("Sum", "Mean"):
            is_over_time = node._saved_dim is not None and dims_of(node._saved_dim, 3) == (1 - batch.axis,)
            return (node, factors) if is_over_time and input_shape(node, 0) == shape else None
        if name != "Mul" or grad_shape(node, 0) != shape:
            return None
        factor = node._saved_self if place == 1 else node._saved_other
        if factor is None or (factor.ndim > 0 and factor.shape[-1] != 1) or factor.is_complex():
            return None
        factors.append(factor)
    return None


def _bags(use: ParameterUse, records: int) -> Texts | None:
    """The texts of torch's bags, one for each record; None for the largest of their embeddings."""
    node = use.node
    offsets, index, padding = node._saved_offsets, node._saved_indices, signed(node._saved_padding_idx)
    mode, weight = node._saved_mode, node._saved_per_sample_weights
    if mode == 2 or grad_shape(node, 0)[0] != records:
        return None
    ends = torch.cat([offsets, offsets.new_tensor([len(index)])])[1 : records + 1]
    owner = torch.arange(records, device=index.device).repeat_interleave(ends - offsets[:records])
    index = index[: len(owner)]
    scale = torch.ones(records, dtype=torch.float64, device=index.device)
    if mode == 1:
        scale /= torch.bincount(owner[index != padding], minlength=records).clamp_min(1)
    return Texts(index, owner, None if weight is None else weight[: len(owner)].double(), scale)


def _sampler(use: ParameterUse, texts: Texts) -> PerSampleGradFn:
    size, padding = input_shape(use.node, use.index)[0], signed(use.node._saved_padding_idx)

    def per_sample_grad(output_grads: OutputGrads) -> PooledGrad:
        gradient = to_32_bits(first(output_grads))
        rows = gradient.reshape(-1, gradient.shape[-1]).double() * texts.scale.unsqueeze(-1)
        return PooledGrad(weights_of(texts, size, padding), rows, size, gradient.dtype)

    return per_sample_grad
