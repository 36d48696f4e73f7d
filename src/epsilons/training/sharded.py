"""Models that torch's `fully_shard` has divided among the ranks (FSDP2): each rank holds some rows of every parameter.

Every rank computes other records, with whole weights, so the norm of each record's gradient is known on one rank. The
clipped sums are added over the ranks, and each rank gets the rows of its shards. It adds the noise of these places, the
same values as in one process.

Weights are gathered by collective calls of torch, module by module, in every forward and backward pass. So all ranks
must make the same passes. A physical batch is computed in one of two ways, and the ranks agree on it:

    one pass   one forward and one backward pass, each module's weights gathered when it is computed. A rank without
               records computes one at weight 0
    gathered   where any rank needs more: checks, proofs, another engine, replays. Every rank holds all weights until
               the end of the physical batch. Then nothing is gathered meanwhile, and each rank computes as it needs to
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Shard, zeros

from ..clipping import Engine, Ghost, NonFiniteGradientError
from ..clipping.engine import Clipped, no_bare_errors
from ..clipping.loop import Loop
from ..clipping.summing import full_precision
from ..core.files import sync_folder
from ..core.modules import PAIRS, is_sharded, local
from ..draws.batches import mapped
from ..draws.randomness import Randomness
from ..errors import ModelError, RunError
from .checkpoints import sync_and_hash
from .datasets import PhysicalBatch
from .distributed import Ranks
from .opening import Request

#: The key of the mark that a checkpoint has in the place of a sharded tensor.
SHARD = "$shard"


_REFUSED = (
    "The model's parameters are sharded (fully_shard), and {}. What is supported: epsilons docs several-processes"
)


def check(request: Request, parameters: Sequence[nn.Parameter], engine: Engine, ranks: Ranks) -> None:
    """Raise ModelError for a model that is sharded in a way that is not known to be right."""
    model, kind = request.model, getattr(fsdp, "FSDPModule", None)
    groups = _groups(model)
    found = {id(one.sharded_param) for group in groups for one in group.fsdp_params}
    problems: list[tuple[bool, str]] = [
        (not hasattr(kind, "reset_iter_state"), f"torch {torch.__version__} is too old: it needs torch 2.13"),
        (not hasattr(model, "_get_fsdp_state"), "the model itself is not. Call fully_shard(model) last"),
        (request.is_whole_loop, "fit evaluates on one rank, which cannot compute alone. Write the loop"),
        (request.performance.channels_last is True, "channels_last=True was given, which was not tried. Leave it out"),
        (not isinstance(engine, Ghost | Loop), "the engine was not written for that. Use ghost or loop"),
        (
            any(id(p) not in found for p in [*model.parameters(), *parameters]),
            "others are not. Shard all of them, without ignored_params, before the optimizer is built",
        ),
        (
            not all(_is_by_rows(p, ranks.size) for p in model.parameters()),
            "not by rows over all ranks, in order. HSDP, tensor parallelism and shard_placement_fn are not supported",
        ),
        (
            not all(map(_is_plain, groups)),
            "a MixedPrecisionPolicy, a CPUOffloadPolicy or a number for reshard_after_forward was given, which were "
            "not tried. Leave them out",
        ),
        (any(p.element_size() < 4 for p in model.parameters()), "have less than 32 bits, which was not tried"),
    ]
    for is_so, problem in problems:
        if is_so:
            raise ModelError(_REFUSED.format(problem))


def _is_plain(group: Any) -> bool:
    """Whether a group of parameters is computed with as it is stored: in these precisions, and where they are kept."""
    is_mixed = (group.mp_policy.param_dtype, group.mp_policy.output_dtype) != (None, None)
    is_offloaded = isinstance(group.offload_policy, fsdp.CPUOffloadPolicy)
    return not is_mixed and not is_offloaded and group.post_forward_mesh_info in (None, group.mesh_info)


def _is_by_rows(p: Any, ranks: int) -> bool:
    """Whether each rank holds some rows of this parameter, in the order of ranks, as a plain tensor."""
    if not is_sharded(p) or p.device_mesh.mesh.tolist() != list(range(ranks)):
        return False
    return p.placements == (Shard(0),) and type(local(p)) is Tensor


def _groups(model: nn.Module) -> list[Any]:
    """The groups of parameters that are gathered together, in the order of modules."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    states = [module._get_fsdp_state() for module in modules]
    return list({id(group): group for state in states for group in state._fsdp_param_groups}.values())


class Shards:
    """The shards of one run's model, and how the ranks compute with them.

    twins         parameters with all rows that are computed with, in the order of the optimizer's
    is_gathered   True while every rank holds all weights
    """

    def __init__(self, model: Any, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        self._model = model
        self._parameters, self._ranks, self._groups = list(parameters), ranks, _groups(model)
        self._mesh, self.is_gathered = parameters[0].device_mesh, False  # type: ignore[attr-defined]
        if ranks.is_distributed:  # a rank that stops in the middle of a pass must not disturb the calls of torch
            ranks.group = dist.new_group(backend="gloo")
        self._model._get_fsdp_state()._lazy_init()  # now, while the ranks are in step
        self._kept = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in self._groups]
        for group in self._groups:  # a twin is made when its rows are first gathered
            group.unshard()
            group.wait_for_unshard()
            group.reshard()
        each = [one for group in self._groups for one in group.fsdp_params]
        pairs = [(one.sharded_param, one._unsharded_param) for one in each]
        self._pairs = {id(tensor): pair for pair in pairs for tensor in pair}
        PAIRS.update(self._pairs)
        self.twins = [self._pairs[id(p)][1] for p in parameters]
        self._sum: list[Tensor] = []  # of the current draw, over all ranks: this rank's rows
        self._pending: list[Tensor] = []  # of this rank alone, all rows: of physical batches that were gathered

    def end(self) -> None:
        """Leave the model to the caller."""
        self.reshard()
        for name in self._pairs:
            PAIRS.pop(name, None)

    def computed_by(self, engine: Engine) -> tuple[Engine, list[nn.Parameter]]:
        """The engine for this model, and the parameters that it differentiates by."""
        return ShardedEngine(engine, self), self.twins

    # -- lock-step -----------------------------------------------------------------------------------------

    def begin_batch(self, physical: PhysicalBatch, is_due: bool, is_watched: bool, is_foreign: bool) -> bool:
        """All ranks begin a physical batch. True if it is checked here: not one that only fills this rank's share.

        is_due       True if a check is due, which takes several passes
        is_watched   True if its operators are watched
        is_foreign   True in another library's loop, which calls the model as often as it likes: raises ModelError
        """
        is_checked = is_due and not physical.is_filler
        if is_foreign:
            raise ModelError(_REFUSED.format("another library's loop does not take them here. Write the loop"))
        self._end_batch()
        if self._ranks.any("before a physical batch", is_checked or is_watched):
            self.gather()
        return is_checked

    def _end_batch(self) -> None:
        """Add what ranks have computed while all weights were gathered.

        Sums are added over ranks by physical batch, however it was computed: so a run that is replayed has equal bits.
        """
        if self.is_gathered and self.any("adding up", bool(self._pending)):
            for k in range(len(self._parameters)):
                self.add_up(k, self._pending[k] if self._pending else None)
        self._pending = []
        self.reshard()

    def gather(self) -> None:
        """All ranks hold all weights from now on."""
        for group in self._groups:
            group.post_forward_mesh_info, group.reshard_after_backward = None, False
            group.unshard()
            group.wait_for_unshard()
        self.is_gathered = True

    def reshard(self) -> None:
        """This rank holds its shards alone, until a pass gathers the others."""
        self._model.reset_iter_state()
        for group, kept in zip(self._groups, self._kept, strict=True):
            group.post_forward_mesh_info, group.reshard_after_backward = kept
        self.is_gathered = False

    def any(self, where: str, vote: bool) -> bool:
        """True if any rank votes True."""
        return self._ranks.any(where, vote)

    # -- sums ------------------------------------------------------------------------------------------------

    def begin_sum(self) -> None:
        self._sum, self._pending = [], []

    def add(self, clipped: Clipped) -> None:
        """Add this rank's clipped gradients."""
        if not self._pending:
            self._pending = [torch.zeros_like(p, dtype=torch.float64) for p in self.twins]
        clipped(self._pending)

    def add_up(self, k: int, part: Tensor | None) -> None:
        """Add the k-th parameter's sums of all ranks; each rank keeps its rows. part: this rank's; None for zeros"""
        p, size = self._parameters[k], self._ranks.size
        rows = _rows(p, size)
        whole = torch.zeros(rows * size, *p.shape[1:], dtype=torch.float64, device=local(p).device)
        if part is not None:
            whole[: len(part)] = part
        own = torch.empty_like(whole[:rows])
        with self._ranks._translating_errors():
            dist.reduce_scatter_single(own, whole, group=self._mesh.get_group())
        if not self._sum:
            self._sum = [torch.zeros_like(local(p), dtype=torch.float64) for p in self._parameters]
        self._sum[k] += own[: len(self._sum[k])]

    def whole_sum(self) -> list[Tensor]:
        """The draw's sum over all ranks: this rank's rows of each parameter."""
        self._end_batch()
        return self._sum or [torch.zeros_like(local(p), dtype=torch.float64) for p in self._parameters]

    def noise(self, randomness: Randomness, phase: int, step: int) -> Any:
        """The values that one process would add to this rank's rows, one parameter after the other."""
        ranges, begin = [], 0
        for p in self._parameters:
            row = min(_rows(p, self._ranks.size) * self._ranks.rank, len(p))
            first = begin + row * (p.numel() // max(len(p), 1))
            ranges.append((first, first + local(p).numel()))
            begin += p.numel()
        return randomness.noise_at(phase, step, ranges, begin, torch.get_num_threads())

    def hash_of_all(self, own: str) -> str:
        """A hash of what all ranks hold, the same on every rank. own: of what this one holds"""
        hashes = self._ranks.gathered("after the noise", own)
        return hashlib.blake2b(" ".join(hashes).encode(), digest_size=16).hexdigest()

    def as_gradients(self, update: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows as gradients of the sharded parameters."""
        mesh, places = self._mesh, [Shard(0)]
        return [
            DTensor.from_local(rows, mesh, places, run_check=False, shape=p.shape, stride=p.stride())
            for p, rows in zip(self._parameters, update, strict=True)
        ]

    # -- checkpoints -------------------------------------------------------------------------------------------

    def saved(self, state: Mapping[str, Any], folder: Path, number: int) -> dict[str, Any]:
        """Save the sharded tensors of a state, every rank its rows; the state with their names in their place.

        number   of the checkpoint, from rank 0
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        tensors: dict[str, Tensor] = {}
        plain = _replaced(state, is_sharded, lambda t: _named(t, tensors))
        name = f"{self._ranks.broadcast(number):06d}.shards"
        into = folder / name
        with self._ranks.collective("saving a checkpoint"):
            if self._ranks.is_main:
                shutil.rmtree(into, ignore_errors=True)  # of a save that was cut short
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                into.mkdir(mode=0o700)
        try:
            save(tensors, storage_writer=HuggingFaceStorageWriter(str(into), save_distributed=True))
        except Exception as error:
            raise RunError(f"The checkpoint {into} cannot be written: {error}. Make room; charges stay.") from error
        files = into.glob(f"shard-{self._ranks.rank + 1:05d}-*")
        each = self._ranks.gathered("hashing a checkpoint", {file.name: sync_and_hash(file) for file in files})
        hashes = {file: own[file] for own in each for file in own}
        with self._ranks.collective("saving a checkpoint"):
            sync_folder(into)
            if {file.name for file in into.iterdir()} != set(hashes):
                raise RunError(f"The files of some ranks are not in {into}. All ranks must share its file system.")
        return {**plain, "shards": {"folder": name, "files": hashes}}

    def loaded(self, state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """A state with its sharded tensors: every rank reads its rows, on any number of ranks."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        tensors: dict[str, Tensor] = {}

        def empty(mark: Mapping[str, Any]) -> Tensor:
            kind, where = getattr(torch, mark["dtype"]), {"device_mesh": self._mesh, "placements": [Shard(0)]}
            return tensors.setdefault(mark[SHARD], zeros(*mark["shape"], dtype=kind, **where))

        whole = _replaced(state, lambda node: isinstance(node, dict) and SHARD in node, empty)
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder / state["shards"]["folder"])))
        return whole  # type: ignore[no-any-return]


def _named(tensor: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = f"{len(tensors)}"
    tensors[name] = tensor.detach()
    return {SHARD: name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _replaced(node: Any, is_meant: Callable[[Any], bool], by: Callable[[Any], Any]) -> Any:
    """A state with these nodes replaced, in order."""
    return mapped(node, lambda leaf: by(leaf) if is_meant(leaf) else leaf, is_meant)


def whole(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """All rows of these tensors, one after the other; every rank takes each of them."""
    return (t.full_tensor() if is_sharded(t) else t for t in tensors)  # type: ignore[attr-defined]


def _rows(p: Tensor, ranks: int) -> int:
    """The number of rows of each rank's shard; the last ones have fewer."""
    return -(-len(p) // ranks)


class ShardedEngine:
    """An engine for models with shards. In one pass, sums are added over all ranks at once, and none are returned."""

    def __init__(self, engine: Engine, shards: Shards) -> None:
        self._engine, self._shards = engine, shards
        if isinstance(engine, Ghost):
            engine.spare = Loop  # vmap calls modules again, and so torch's hooks on them

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._engine.attach(model, parameters)

    def begin(self, records: int) -> None:
        self._engine.begin(records)

    def detach(self) -> None:
        self._engine.detach()

    def clipped_sum(
        self, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        shards, engine = self._shards, self._engine
        if not shards.is_gathered:
            takes_one = isinstance(engine, Ghost) and engine.takes_one_pass(losses, clip_norm)
            if shards.any("before a backward pass", not takes_one):
                shards.gather()
        if shards.is_gathered:
            return engine.clipped_sum(losses, clip_norm, weight, sizes)
        assert isinstance(engine, Ghost)
        broken: NonFiniteGradientError | None = None
        try:
            with no_bare_errors():
                sums = engine.one_pass(losses, clip_norm, weight, sizes)
        except NonFiniteGradientError as error:
            broken = error
        if shards.any("after a backward pass", broken is not None):
            shards.gather()
            if broken is not None:
                raise broken
            with torch.no_grad(), full_precision():
                return list(sums)
        with torch.no_grad(), full_precision():
            for k, part in enumerate(sums):
                shards.add_up(k, part)
        return []
