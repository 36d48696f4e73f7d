"""Models that fully_shard has divided among the ranks: trained as one process would, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.clipping import Ghost
from epsilons.draws.persons_rows import Draws
from epsilons.draws.randomness import BLOCK, Randomness, key_from_seed
from epsilons.training import Performance, Records, RunFolder
from options import fit_flat
from ranked import Processes, Stopped, wait_until
from shares import share
from small_runs import blocks_of

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(getattr(fsdp, "FSDPModule", None), "reset_iter_state"), reason="needs torch 2.13"),
]

RECORDS, WIDTH, CLASSES = 60, 8, 3
KEY = key_from_seed(5)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with blocks_of(16):
        yield


@pytest.fixture(scope="module")
def groups(small_blocks: None) -> Iterator[dict[int, Processes]]:
    made = {size: Processes(size) for size in (1, 2, 4)}
    yield made
    for processes in made.values():
        processes.end()


@pytest.fixture(scope="module")
def pair(groups: dict[int, Processes]) -> Processes:
    return groups[2]


# -- models ------------------------------------------------------------


class Block(nn.Module):
    """Attention over four places, with low-rank additions to the frozen projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (self.project(y) + self.up(self.down(y))).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x[:, :4].abs() * 5).long().clamp(max=10))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Recomputed(Transformer):
    """Its blocks are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x[:, :4].abs() * 5).long().clamp(max=10))
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """An LSTM, and a weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 5, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(5, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(len(x), 4, 2))[0][:, -1])


def a_model(name: str) -> tuple[nn.Module, list[nn.Module]]:
    """(the model, its parts that are sharded each by itself)."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = nn.Sequential(
            nn.Linear(WIDTH, 5), nn.Tanh(), nn.Dropout(0.0), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, CLASSES)
        )
        return layers, [part for part in layers if isinstance(part, nn.Linear)]
    if name == "cnn":
        body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU()
        )
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 4)), nn.Upsample(scale_factor=2), body, nn.Flatten(), nn.Linear(60, 3)
        ), [body]
    if name == "recurrent":
        return Recurrent(), []
    model = Recomputed() if name == "recomputed" else Transformer()
    if name == "lora":
        for part, p in model.named_parameters():
            p.requires_grad_("down" in part or "up" in part or "head" in part)
    return model, list(model.blocks)


def sharded(name: str) -> nn.Module:
    """The model, divided among the ranks if there are any."""
    model, parts = a_model(name)
    if dist.is_initialized():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in [*parts, model]:
            fsdp.fully_shard(part, mesh=mesh)
    return model


def whole(tensors: Any) -> np.ndarray:
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().reshape(-1) for t in full]).numpy().copy()


# -- data, and a training on this rank or alone ------------------------------------------------------------


@cache
def budgets() -> epsilons.Budgets:
    return epsilons.Budgets(np.random.default_rng(1).permutation(np.repeat([1.0, 2.0, 8.0], 20)), delta=1e-3)


@cache
def plan(batch_size: float = 8.0, steps: int = 24) -> epsilons.Plan:
    return epsilons.plan(budgets(), epsilons.Recipe(steps, batch_size, clip_norm=0.5), "sample", "rdp")


def points(broken: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    inputs, classes = torch.randn(RECORDS, WIDTH, generator=make), torch.randint(CLASSES, (RECORDS,), generator=make)
    inputs[list(broken)] = float("nan")
    return inputs, classes, torch.arange(RECORDS)


def cross_entropy(outputs: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(outputs, classes, reduction="none")


def nothing(outputs: Tensor, classes: Tensor) -> Tensor:
    """Losses with a gradient of exactly zero."""
    return (outputs * 0.0).sum(1)


def run(
    name: str = "mlp",
    *,
    until: int | None = None,
    broken: tuple[int, ...] = (),
    losses: Any = cross_entropy,
    optimizer: Any = torch.optim.SGD,
    model: nn.Module | None = None,
    each: Any = None,
    made: epsilons.Plan | None = None,
    wide: bool = False,
    largest: int = 4,
    engine: Any = "auto",
    seed: Any = None,
    persons: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """What came of a training on this rank, or alone."""
    model = sharded(name) if model is None else model
    model = model.double() if wide else model
    settings = {"momentum": 0.5} if optimizer is torch.optim.SGD else {}
    updates = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1, **settings)
    seed = epsilons.training.Randomness(key=KEY) if seed is None else seed
    performance = Performance(max_physical_batch=largest, engine=engine)
    options = {"seed": seed, "performance": performance, "budgets": budgets()} | options
    seen: dict[int, list[int]] = {}
    passes = {"one": 0, "gathered": 0, "fillers": 0}
    data = points(broken) if persons is None else Records(points(broken), persons=persons, rows_per_person=3)
    with epsilons.make_private(model, updates, data, made or plan(), **options) as private:
        for inputs, classes, numbers in private.batches:
            if each is not None:
                each(private, model)
            private.backward(losses(model(inputs.double() if wide else inputs), classes))
            is_filler = private._issued.physical.is_filler
            if not private.is_check:
                seen.setdefault(private.updates, []).extend(numbers.tolist())
            if not private.is_check or is_filler:
                is_gathered = private.ranks.shards is not None and private.ranks.shards.is_gathered
                passes["fillers" if is_filler else "gathered" if is_gathered else "one"] += 1
            private.step()
            if private.updates == until:
                break
        key = private._draws.randomness.key
    held = [p._local_tensor if hasattr(p, "_local_tensor") else p for p in model.parameters()]
    return {
        "values": whole(model.parameters()),
        "state": [whole([v for v in s.values() if isinstance(v, Tensor)]) for s in updates.state.values()],
        "seen": seen,
        "passes": passes,
        "updates": private.updates,
        "charged": private.ledger.charged,
        "epoch": private.ledger.epoch,
        "key": key,
        "held": sum(t.numel() for t in held),
    }


def on_each(options: dict[str, Any]) -> dict[str, Any]:
    return run(**options)


def check_matches_one_process(options: dict[str, Any], ranks: Processes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    alone, outcomes = run(**options), ranks.together(on_each, options)
    before = whole(a_model(options.get("name", "mlp"))[0].parameters())
    assert np.isfinite(alone["values"]).all()
    assert np.abs(alone["values"] - before).max() > 0.05  # something was learnt
    for rank in outcomes:
        assert not isinstance(rank, Stopped), rank
        assert np.abs(rank["values"] - alone["values"]).max() <= 1e-6
        assert rank["charged"] == alone["charged"]
    return alone, outcomes


# -- as one process would ------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), share(product(["mlp", "cnn", "lora", "transformer"], [1, 2, 4]), 4))
def test_weights_are_those_of_one_process_and_each_rank_holds_its_share(name, size, groups):
    alone, outcomes = check_matches_one_process({"name": name, "optimizer": torch.optim.Adam}, groups[size])
    shares = [rank["held"] / alone["held"] for rank in outcomes]
    print(f"{name} on {size} ranks: each holds {', '.join(f'{share:.0%}' for share in shares)} of the parameters")
    assert sum(shares) == pytest.approx(1.0)
    assert max(shares) < 1 / size + 0.2  # small layers cannot be divided evenly
    for rank in outcomes:
        assert rank["passes"]["one"] > rank["passes"]["gathered"]  # the usual physical batch gathers nothing else


@pytest.mark.parametrize("name", ["recomputed", "recurrent"])
def test_models_that_need_their_weights_in_another_order_hold_all_of_them_meanwhile(name, pair):
    _, outcomes = check_matches_one_process({"name": name}, pair)
    for rank in outcomes:
        assert rank["passes"]["gathered"] > rank["passes"]["one"]


@pytest.mark.parametrize("name", ["mlp", "recurrent"])
def test_the_reference_engine_takes_shards(name, pair):
    check_matches_one_process({"name": name, "engine": "loop"}, pair)


def gathering(options: dict[str, Any]) -> dict[str, Any]:
    """The same, with all weights for every physical batch."""
    with mock.patch.object(Ghost, "takes_one_pass", return_value=False):
        return run(**options)


@pytest.mark.parametrize("broken", [(), tuple(range(0, RECORDS, 4))])
def test_sums_are_the_same_to_the_bit_however_they_are_computed(broken, pair):
    """Which physical batches are proven differs when a run is replayed."""
    options = {"wide": True, "broken": broken, "made": plan(12.0)}
    usual, gathered = pair.together(on_each, options), pair.together(gathering, options)
    for one, other in zip(usual, gathered, strict=True):
        assert one["passes"]["one"] > other["passes"]["one"] == 0
        assert np.array_equal(one["values"], other["values"])


@pytest.mark.parametrize("source", ["chacha20", "secure"])
def test_noise_is_that_of_one_process_to_the_bit(source, groups):
    """Gradients of zero: what is left is the noise."""
    options = {"losses": nothing, "seed": epsilons.training.Randomness(key=KEY, source=source)}
    alone = run(**options)
    for size in (1, 2, 4):
        for rank in groups[size].together(on_each, options):
            assert np.array_equal(rank["values"], alone["values"])


ENDS = st.lists(st.integers(0, 3 * BLOCK + 77), min_size=2, max_size=8).map(sorted)


@given(ENDS, st.sampled_from([1, 3]))
def test_noise_at_some_places_is_the_noise_at_these_places_and_no_other_block_is_made(ends, threads):
    randomness, count = Randomness(KEY), 3 * BLOCK + 77
    ranges = list(zip(ends[::2], ends[1::2], strict=False))
    expected = [randomness.noise(1, 2, count)[first:last] for first, last in ranges]
    with mock.patch.object(Randomness, "stream", side_effect=randomness.stream) as made:
        assert np.array_equal(randomness.noise_at(1, 2, ranges, count, threads), np.concatenate(expected))
    blocks = {
        place // BLOCK for first, last in ranges if last > first for place in (*range(first, last, BLOCK), last - 1)
    }
    assert sorted(call.args[-1] for call in made.call_args_list) == sorted(blocks)


def test_a_seed_gives_the_same_run_on_any_number_of_ranks_of_a_sharded_model(groups):
    first, other = (groups[size].together(on_each, {"seed": 3})[0] for size in (1, 2))
    assert first["key"] == other["key"]
    assert np.abs(first["values"] - other["values"]).max() <= 1e-6
    assert groups[2].together(on_each, {"seed": 3, "name": "cnn"})[0]["key"] != first["key"]


# -- in step ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "batch_size", "largest"),
    share(
        [("mlp", 2, 2.0, 1), ("cnn", 2, 3.0, 2), ("lora", 4, 3.0, 2), ("transformer", 4, 3.0, 2), ("mlp", 4, 12.0, 2)],
        3,
    ),
)
def test_ranks_with_few_records_or_none_keep_in_step(name, size, batch_size, largest, groups):
    made = plan(batch_size)
    _, outcomes = check_matches_one_process({"name": name, "made": made, "largest": largest}, groups[size])
    draws = Draws(made, budgets().group, Randomness(KEY))
    for step in range(made.steps):
        handed = [record for rank in outcomes for record in rank["seen"].get(step, [])]
        assert sorted(handed) == draws.at(0, step).tolist()  # each drawn record by one rank, once; fillers are checks
    assert sum(rank["passes"]["fillers"] for rank in outcomes) > 0


def test_persons_with_several_rows(groups):
    person = np.random.default_rng(6).permutation(np.concatenate([np.arange(20), np.resize(np.arange(10), 40)]))
    people = epsilons.Budgets(np.resize([1.0, 2.0, 8.0], 20), delta=1e-3, unit="person")
    made = epsilons.plan(people, epsilons.Recipe(24, 3.0, clip_norm=0.5), "sample", "rdp")
    for size in (2, 4):
        check_matches_one_process({"budgets": people, "made": made, "largest": 6, "persons": person}, groups[size])


@pytest.mark.parametrize(
    ("engine", "size", "batch_size"), share([(e, *one) for e in ("auto", "loop") for one in ((2, 10.0), (4, 3.0))], 2)
)
def test_records_that_are_not_finite_contribute_nothing_on_any_rank(engine, size, batch_size, groups):
    """Some are replayed, and some only fill a rank's share."""
    options = {"broken": tuple(range(0, RECORDS, 5)), "made": plan(batch_size), "largest": 3, "engine": engine}
    check_matches_one_process(options, groups[size])


def test_every_physical_batch_of_one_rank_is_replayed_in_step(pair):
    check_matches_one_process({"broken": tuple(range(30)), "made": plan(12.0), "largest": 3}, pair)


def failing(where: str) -> dict[str, Any]:
    """Rank 1 fails before the other's weights are gathered, or after."""

    def each(private: Any, model: Any) -> None:
        if private.updates == 3 and dist.get_rank() == 1 and where == "loop":
            raise ValueError("a mistake")

    def losses(outputs: Tensor, classes: Tensor) -> Tensor:
        if where == "losses" and dist.get_rank() == 1 and outputs.sum() > -1e9:
            raise ValueError("a mistake")
        return cross_entropy(outputs, classes)

    return run(each=each, losses=losses)


@pytest.mark.parametrize("where", ["loop", "losses"])
def test_a_rank_that_fails_stops_the_others(where, small_blocks):
    ranks = Processes(2)
    try:
        ranks.begin(failing, where)
        failed = ranks.outcome(1)
        ranks.kill(1)  # its process ends; the other may wait for it in a call of torch
        other = ranks.outcome(0)
    finally:
        ranks.end()
    assert failed.kind == "ValueError"
    assert isinstance(other, Stopped)


def kept_waiting(folder: str) -> dict[str, Any]:
    def each(private: Any, model: Any) -> None:
        if private.updates == 5:
            (Path(folder) / f"here {dist.get_rank()}").touch()
            if dist.get_rank() == 1:
                wait_until(lambda: False)

    return run(each=each, run_dir=RunFolder(f"{folder}/run", checkpoint_every=2))


def test_a_killed_rank_stops_the_others_and_the_run_resumes(tmp_path, pair):
    options = {"run_dir": RunFolder(tmp_path / "whole", checkpoint_every=2)}
    expected = pair.together(on_each, options)[0]
    ranks = Processes(2)
    try:
        ranks.begin(kept_waiting, str(tmp_path))
        wait_until(lambda: all((tmp_path / f"here {rank}").exists() for rank in (0, 1)))
        ranks.kill(1)
        stopped = ranks.outcome(0)
    finally:
        ranks.end()
    assert isinstance(stopped, Stopped)
    resumed = pair.together(on_each, {"run_dir": RunFolder(tmp_path / "run", resume=True)})
    for rank in resumed:
        assert np.array_equal(rank["values"], expected["values"])
        assert rank["charged"] == expected["charged"]


# -- checkpoints ------------------------------------------------------------


@pytest.mark.parametrize(("name", "optimizer"), share(product(["mlp", "lora"], [torch.optim.SGD, torch.optim.Adam]), 2))
def test_a_run_resumes_to_the_same_bits_on_as_many_ranks(name, optimizer, pair, tmp_path):
    options = {"name": name, "optimizer": optimizer}
    expected = pair.together(on_each, {**options, "run_dir": tmp_path / "whole"})
    path = tmp_path / "run"
    stopped = pair.together(on_each, {**options, "run_dir": path, "until": 7})
    assert [rank["updates"] for rank in stopped] == [7, 7]
    files = sorted(file.name for file in (path / "checkpoints").rglob("*") if file.is_file())
    assert sum(name.startswith("shard-") for name in files) >= 2
    assert not [name for name in files if name.endswith((".distcp", ".metadata", ".pt"))]  # nothing is pickled
    for rank, one in zip(
        pair.together(on_each, {**options, "run_dir": RunFolder(path, resume=True)}), expected, strict=True
    ):
        assert np.array_equal(rank["values"], one["values"])
        assert all(np.array_equal(a, b) for a, b in zip(rank["state"], one["state"], strict=True))
        assert rank["epoch"] == 0


def test_a_run_resumes_under_a_new_key_on_another_number_of_ranks(groups, tmp_path):
    longer = {"optimizer": torch.optim.Adam, "made": plan(steps=60)}
    first = groups[4].together(on_each, {**longer, "run_dir": tmp_path / "run", "until": 7})
    same = {**longer, "run_dir": RunFolder(tmp_path / "run", resume=True)}
    resumed = groups[2].together(on_each, {**same, "until": 8})
    assert {rank["key"] for rank in resumed}.isdisjoint({rank["key"] for rank in first})
    assert len({rank["key"] for rank in resumed}) == 1
    assert [rank["epoch"] for rank in resumed] == [1, 1]
    ended = groups[1].together(on_each, same)[0]
    assert ended["epoch"] == 2
    assert ended["charged"] == (60,)
    assert 20 < ended["updates"] < 60  # what was reserved under the other keys is lost
    assert np.isfinite(ended["values"]).all()


def restored(path: str) -> np.ndarray:
    """The values that a run begins with, and the optimizer's state."""
    model = sharded("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    performance = Performance(max_physical_batch=4)
    private = epsilons.make_private(
        model, optimizer, points(), plan(), budgets=budgets(), performance=performance,
        run_dir=RunFolder(path, resume=True), seed=epsilons.training.Randomness(key=KEY),
    )  # fmt: skip
    found = whole([*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())])
    private.ranks.has_aborted = True  # leave the folder as it is
    private.close()
    return found


def test_shards_are_read_on_any_number_of_ranks(groups, tmp_path):
    made = groups[4].together(on_each, {"run_dir": RunFolder(tmp_path / "run", checkpoint_every=1), "until": 7})
    saved = json.loads(sorted((tmp_path / "run" / "checkpoints").glob("*.json"))[-1].read_text())
    assert saved["schema"] == 1
    found = {size: groups[size].together(restored, str(tmp_path / "run")) for size in (4, 2, 1)}
    for outcomes in found.values():
        for values in outcomes:
            assert np.array_equal(values, found[4][0])
    assert len(found[1][0]) == 2 * len(made[0]["values"])
    assert not np.array_equal(found[1][0][: len(made[0]["values"])], whole(a_model("mlp")[0].parameters()))


def test_damaged_shards_are_left_for_an_older_checkpoint(pair, tmp_path):
    path = tmp_path / "run"
    whole_run = pair.together(on_each, {"run_dir": tmp_path / "whole"})[0]
    pair.together(on_each, {"run_dir": RunFolder(path, checkpoint_every=3), "until": 7})
    newest = sorted((path / "checkpoints").glob("*.shards"))[-1]
    file = next(newest.iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    resumed = pair.together(on_each, {"run_dir": RunFolder(path, resume=True)})[0]
    assert np.array_equal(resumed["values"], whole_run["values"])


# -- refused ------------------------------------------------------------


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def badly(how: str) -> dict[str, Any]:
    """A model that is sharded, or trained, in a way that is refused."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model, parts = a_model("mlp")
    shard = fsdp.fully_shard
    options: dict[str, Any] = {}
    if how == "a part":
        shard(parts[0], mesh=mesh)
    elif how == "ignored":
        shard(model, mesh=mesh, ignored_params={parts[0].weight})
    elif how == "hsdp":
        shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
    elif how == "tensor parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(model, mesh, {"0": ColwiseParallel()})
    elif how == "offloaded":
        shard(model, mesh=mesh, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    elif how == "bf16":
        shard(model, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    elif how == "16 bits":
        shard(model.bfloat16(), mesh=mesh)
    elif how == "columns":
        model = nn.Linear(WIDTH, 4)
        shard(model, mesh=mesh, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.ndim - 1))
    elif how == "vmap":
        shard(model, mesh=mesh)
        options["engine"] = "vmap"
    elif how == "mixes":
        model = nn.Sequential(model, Mixes())
        shard(model, mesh=mesh)
    elif how == "written":
        shard(model, mesh=mesh)

        def each(private: Any, model: Any) -> None:
            if private.updates == 2 and dist.get_rank() == 1:
                next(model.parameters()).to_local().data[0] += 1.0

        options["each"] = each
    return run(model=model, **options)


REFUSED = {
    "a part": "the model itself is not",
    "ignored": "others are not",
    "hsdp": "not by rows over all ranks",
    "tensor parallel": "the model itself is not",
    "offloaded": "CPUOffloadPolicy",
    "bf16": "MixedPrecisionPolicy",
    "16 bits": "less than 32 bits",
    "columns": "not by rows",
    "vmap": "the engine was not written",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_was_not_proven_is_refused(how, pair):
    for stopped in pair.together(badly, how):
        assert (stopped.kind, REFUSED[how] in stopped.message) == ("ModelError", True), stopped


def test_a_sharded_model_that_mixes_records_is_refused_on_all_ranks(pair):
    stopped = pair.together(badly, "mixes")
    assert "BatchDependenceError" in {one.kind for one in stopped}
    assert all(isinstance(one, Stopped) for one in stopped)


def test_a_foreign_write_to_a_shard_stops_all_ranks(pair):
    stopped = pair.together(badly, "written")
    assert stopped[1].kind == "ModelError"
    assert "changed between two updates" in stopped[1].message
    assert stopped[0].kind == "RankError"


def fitted() -> None:
    fit_flat(sharded("mlp"), points()[:2], plan(), budgets=budgets(), device="cpu")


def test_fit_refuses_shards(pair):
    for stopped in pair.together(fitted):
        assert (stopped.kind, "fit evaluates on one rank" in stopped.message) == ("ModelError", True)


# -- DistributedDataParallel ------------------------------------------------------------


def wrapped(how: str) -> dict[str, Any]:
    model, _ = a_model("mlp")
    model.register_buffer("kept", torch.zeros(2))  # the wrapper would broadcast it at each call
    if how == "plain":
        return run(model=model, made=plan(3.0))
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=how == "unused")
    if how == "used before":
        for _ in range(2):
            ddp(torch.zeros(2, WIDTH)).sum().backward()
        model.zero_grad()
    found = run(model=ddp, made=plan(3.0))
    assert ddp.require_backward_grad_sync
    ddp(torch.full((2, WIDTH), 1.0 + dist.get_rank())).sum().backward()  # the wrapper is as before
    each = [torch.empty_like(model[0].weight.grad) for _ in range(2)]
    dist.all_gather(each, model[0].weight.grad)
    assert torch.equal(*each)
    return found


@pytest.mark.parametrize("how", ["wrapped", "used before"])
def test_a_model_in_ddp_trains_as_the_model_itself(how, pair):
    for plain, other in zip(pair.together(wrapped, "plain"), pair.together(wrapped, how), strict=True):
        assert np.array_equal(plain["values"], other["values"])


def test_a_wrapper_that_alters_outputs_is_refused(pair):
    for stopped in pair.together(wrapped, "unused"):
        assert (stopped.kind, "find_unused_parameters" in stopped.message) == ("ModelError", True)
