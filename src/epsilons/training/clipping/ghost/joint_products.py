"""Joint products: the gradients of several matrices with one common side, as one product per record.

A recurrent layer has them: dz ⊗ [x, previous h]. One large product runs at a higher rate than its parts. Norms are
those of each part, from Gram matrices, which share that of the common side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..persons import SizeGroup
from ..products import is_single
from ..summing import product_in_64_bits
from .norms import GramBound
from .outer_products import OuterProductGrad, ProductSide, weighted_products
from .per_sample_grads import blanked


class Joint:
    """Sums of outer products with one left side, and right sides that are parts of one tensor.

    left    (records, time, k)
    right   (records, time, the sum of sizes)
    bounds  of each part; by default, computed when they are needed
    """

    def __init__(
        self,
        left: ProductSide,
        right: ProductSide,
        sizes: Sequence[int],
        bounds: Sequence[GramBound | None] | None = None,
    ) -> None:
        self.left, self.right, self.sizes = left, right, list(sizes)
        sides = torch.split(right.tensor, self.sizes, 2)
        bounds = [None] * len(sides) if bounds is None else bounds
        self.parts = [
            OuterProductGrad(left, ProductSide(side), bound=bound) for side, bound in zip(sides, bounds, strict=True)
        ]
        self._weighted: tuple[Tensor, Sequence[Tensor]] | None = None
        self._blank: tuple[Tensor, Joint] | None = None
        self._merged: dict[SizeGroup, Joint] = {}

    def grads(self) -> Sequence[OuterProductGrad]:
        """One for each part. By shapes alone, whether they are computed together."""
        return [JointGrad(self, place) for place in range(len(self.parts))] if self._is_faster else self.parts

    @property
    def _is_faster(self) -> bool:
        """Whether norms come from Gram matrices, and products are computed record by record."""
        whole, dtype = OuterProductGrad(self.left, self.right), self.left.tensor.dtype
        k, p = whole.shape
        if not whole.uses_grams or any(product_in_64_bits(whole.time, k, size, dtype) for size in self.sizes):
            return False
        return is_single(whole.time, k, p, self.left.tensor)

    def weighted(self, factor: Tensor) -> Sequence[Tensor]:
        """Of each part. The last result is kept, because each parameter asks for its part."""
        if self._weighted is None or not torch.equal(self._weighted[0], factor):
            # A record that cancels in one part is computed in 64 bits in all: the bounds of the others hold for it.
            cancelling = torch.unique(torch.cat([part.bound.cancelling for part in self.parts]))
            total = weighted_products(self.left.tensor, self.right.tensor, factor, cancelling)
            self._weighted = factor, torch.split(total, self.sizes, 1)
        return self._weighted[1]

    def blank(self, keep: Tensor) -> Joint:
        if self._blank is None or not torch.equal(self._blank[0], keep):
            left, right = (ProductSide(blanked(side.tensor, keep)) for side in (self.left, self.right))
            self._blank = keep, Joint(left, right, self.sizes, [part.bound for part in self.parts])
        return self._blank[1]

    def merged(self, group: SizeGroup) -> Joint:
        if group not in self._merged:
            self._merged[group] = Joint(self.left.merged(group), self.right.merged(group), self.sizes)
        return self._merged[group]


class JointGrad(OuterProductGrad):
    """One part, with a weighted sum that is computed for all parts together."""

    def __init__(self, joint: Joint, place: int) -> None:
        part = joint.parts[place]
        super().__init__(part.left, part.right)
        self._joint, self._place = joint, place

    @property
    def is_dense(self) -> bool:
        return False

    @property
    def bound(self) -> GramBound:
        return self._joint.parts[self._place].bound

    def weighted(self, factor: Tensor) -> Tensor:
        return self._joint.weighted(factor)[self._place]

    def blank(self, keep: Tensor) -> OuterProductGrad:
        return self._joint.blank(keep).grads()[self._place]

    def merged(self, group: SizeGroup) -> OuterProductGrad:
        return self._joint.merged(group).grads()[self._place]
