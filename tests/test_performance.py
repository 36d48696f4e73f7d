"""Performance: the settings of speed, what they record and change; products stay in full precision."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import random
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import epsilons
from epsilons.clipping import ENGINES
from epsilons.clipping.summing import _switches, full_precision, in_use
from epsilons.configs.config_training import PerformanceSection
from epsilons.core import modules
from epsilons.draws.batches import is_same
from epsilons.errors import InputError, UnsupportedLayerError
from epsilons.training import checkpoints, performance
from epsilons.training.datasets import data_source, first_record
from epsilons.training.performance import Trial
from shares import share
from small_runs import parameters_of, private_over, some_budgets, some_plan, train


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(60, 3, 8, 8, generator=generator), torch.randint(0, 4, (60,), generator=generator)


def begun(model: nn.Module | None = None, data=None, **options):
    model = network() if model is None else model
    return model, private_over(model, pictures() if data is None else data, some_plan(steps=3), lr=0.1, **options)


def trained(**options) -> nn.Module:
    model, private = begun(**options)
    with private:
        train(private, model)
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_channels_last_is_another_layout_of_the_same_training(engine):
    usual, ours = trained(engine=engine), trained(engine=engine, channels_last=True)
    assert ours[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not ours[0].weight.is_contiguous()
    torch.testing.assert_close(parameters_of(ours), parameters_of(usual), atol=1e-6, rtol=1e-5)


def settings_of(folder) -> dict:
    return json.loads((folder / "run.json").read_text())["performance"]


def test_what_was_tuned_is_in_the_run_and_another_layout_is_another_sum(tmp_path):
    _, private = begun(run_dir=tmp_path / "run", channels_last=True, allocator=True)
    described = private._checkpointer._fingerprint
    private.close()
    assert settings_of(tmp_path / "run") == {
        "engine": "ghost", "max_physical_batch": 512, "num_workers": 0,
        "allocator": True, "channels_last": True, "threads": torch.get_num_threads(),
    }  # fmt: skip
    _, private = begun(run_dir=tmp_path / "other", channels_last=False)
    assert private._checkpointer._fingerprint != described
    private.close()


def is_channels_last(layer: nn.Module) -> bool:
    return layer.weight.is_contiguous(memory_format=torch.channels_last) and not layer.weight.is_contiguous()


def test_a_convolutional_net_has_its_channels_last_while_it_trains(tmp_path):
    model, private = begun(run_dir=tmp_path / "run")
    with private:
        assert is_channels_last(model[0])
        assert is_channels_last(model[3])
        train(private, model)
    assert model[0].weight.is_contiguous()
    assert settings_of(tmp_path / "run")["channels_last"] is True
    asked = trained(channels_last=True)
    assert is_channels_last(asked[0])
    for ours, same in zip(parameters_of(model), parameters_of(asked), strict=True):
        assert torch.equal(ours, same)


class Viewed(nn.Module):
    """`view` behind a convolution, as many models have it: an error with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.head = nn.Conv2d(3, 4, 3), nn.Linear(144, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.near(x)).view(len(x), -1))


class Strided(Viewed):
    """It reads memory in its order, and computes something else with channels last."""

    def forward(self, x):
        hidden = torch.tanh(self.near(x))
        return self.head(torch.as_strided(hidden, (len(x), 144), (144, 1)))


class Named(Viewed):
    """It cannot be called with the inputs alone."""

    def forward(self, x, scale):
        return self.head(torch.tanh(self.near(x) * scale).reshape(len(x), -1))


def wide() -> nn.Module:
    return network().double()


def drawing() -> nn.Module:
    """It returns pictures, and a loop may view them."""
    return nn.Conv2d(3, 1, 3)


def tried(model: nn.Module, data) -> bool:
    return modules.prefers_channels_last(model) and Trial.of(model, first_record(data_source(data))).takes_channels_last


@pytest.mark.parametrize("make", [Viewed, Strided, Named, wide, drawing], ids=lambda make: make.__name__)
def test_a_model_that_depends_on_its_layout_keeps_it(make):
    assert not tried(make(), pictures())


def norm_behind_frozen_layers() -> nn.Module:
    """Torch 2.13's backward pass ends the process with a segmentation fault if its channels are innermost."""
    frozen = nn.Conv2d(3, 6, 3).requires_grad_(False)
    return nn.Sequential(frozen, nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4))


def norm_first() -> nn.Module:
    return nn.Sequential(nn.GroupNorm(1, 3), *network())


@pytest.mark.parametrize(("make", "takes"), [(norm_behind_frozen_layers, False), (norm_first, True)])
def test_a_layout_that_would_end_the_process_is_not_chosen(make, takes):
    """Behind frozen convolutions, channels would be innermost. Data have the usual layout."""
    model = make()
    assert tried(model, pictures()) is takes
    before = [p.detach().clone() for p in model.parameters()]
    _, private = begun(model)
    with private:
        train(private, model)
    assert not all(map(torch.equal, before, model.parameters()))


def test_a_layout_that_would_end_the_process_is_an_error_where_it_is_asked_for():
    model, private = begun(norm_behind_frozen_layers(), channels_last=True)
    with private, pytest.raises(UnsupportedLayerError, match="ends the process"):
        train(private, model)


def test_vmap_differentiates_a_norm_with_channels_last_by_the_graph():
    """Asked for the norm's parameters alone, torch would end the process."""
    model = network().to(memory_format=torch.channels_last)
    engine = ENGINES["vmap"]()
    engine.attach(model, list(model.parameters()))
    inputs, targets = pictures()
    losses = F.cross_entropy(model(inputs[:4]), targets[:4], reduction="none")
    exact = torch.autograd.grad(losses.sum(), list(model.parameters()), retain_graph=True)
    norms = [4, 5]
    assert all(p is q for p, q in zip([engine._parameters[k] for k in norms], model[4].parameters(), strict=True))
    gradients = engine._by_graph(losses)
    engine.detach()
    for k in norms:
        torch.testing.assert_close(gradients[k].sum(0), exact[k])


def test_a_model_with_a_view_trains_as_it_is(tmp_path):
    torch.manual_seed(0)
    model, private = begun(Viewed(), run_dir=tmp_path / "run")
    with private:
        assert model.near.weight.is_contiguous()
        train(private, model)
    assert settings_of(tmp_path / "run")["channels_last"] is False


@pytest.mark.parametrize("kind", ["8 bits", "map-style", "wide", "a matrix", "none", "no record can be read"])
def test_the_layout_is_tried_on_the_shape_of_the_first_record(kind):
    x, y = pictures()

    class Broken(Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, index):
            raise OSError("no such file")

    data = {
        "8 bits": ((x * 20).to(torch.uint8), y),
        "map-style": TensorDataset(x, y),
        "wide": (x.double(), y),
        "a matrix": (x.flatten(1), y),
        "none": (x[:0], y[:0]),
        "no record can be read": Broken(),
    }[kind]
    if kind == "map-style":
        data = [*zip(*data.tensors, strict=True)]
    assert tried(network(), data) is (kind in ("8 bits", "map-style", "wide"))


class Augmented(Dataset):
    """Every record is augmented, by all three generators."""

    def __init__(self) -> None:
        self.x, self.y = pictures()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index] + torch.rand(1) * random.random() * float(np.random.rand()), self.y[index]


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.3), *network())


def test_the_trial_moves_no_generator_and_no_weight():
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    model = with_dropout()
    before, state = copy.deepcopy(model.state_dict()), checkpoints.of_generators()
    assert tried(model, Augmented())
    assert is_same(state, checkpoints.of_generators())
    assert model.training
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert model[1].weight.is_contiguous()


def random_network(seed: int) -> nn.Module:
    """Convolutions, pools, norms and views in any order; some of them cannot have their channels last."""
    torch.manual_seed(seed)
    pick = random.Random(seed)
    channels = [3, *(pick.choice([2, 4, 8]) for _ in range(pick.randint(1, 3)))]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(channels):
        groups = pick.choice([1, math.gcd(a, b)])
        layers.append(nn.Conv2d(a, b, pick.choice([1, 3]), padding=1, groups=groups, bias=pick.random() < 0.5))
        some = [nn.Tanh(), nn.MaxPool2d(2, 1), nn.AvgPool2d(2, 1), nn.GroupNorm(1, b), nn.Dropout(0.1), nn.Identity()]
        layers += pick.sample(some, pick.randint(0, 3))
    flat = pick.choice(
        [nn.Flatten(), Flat("view"), Flat("reshape"), nn.Sequential(nn.AdaptiveAvgPool2d(1), Flat("view"))]
    )
    return nn.Sequential(*layers, flat, nn.LazyLinear(4))


class Flat(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x):
        return getattr(x, self.how)(len(x), -1)


@pytest.mark.parametrize("seed", share(range(200), 10))
def test_what_trains_with_the_usual_layout_trains_with_auto(seed):
    models = []
    for channels_last in (False, "auto"):
        model = random_network(seed)
        with torch.no_grad():
            model(pictures()[0][:2])  # the lazy layer
        model, private = begun(model, channels_last=channels_last)
        has_dropout = any(isinstance(layer, nn.Dropout) for layer in model.modules())
        with private:
            train(private, model)
        models.append(parameters_of(model))
    if not has_dropout:  # its mask follows the layout
        torch.testing.assert_close(models[0], models[1], atol=1e-5, rtol=1e-4)


def test_usual_draws_are_cut_into_few_parts_of_nearly_one_size():
    small = nn.Linear(10, 2)
    for expected in (1, 60, 512, 600, 1000, 5000, 16_000):
        largest = performance.default_physical_batch(small, list(small.parameters()), expected)
        usual, large = expected, expected + 3 * expected**0.5
        assert math.ceil(large / largest) == math.ceil(usual / largest) or math.ceil(usual / largest) > 10
        assert 512 <= largest <= 1.6 * 512


@pytest.mark.parametrize("expected", [1.0, 512.0, 16_384.0, 16_385.0, 65_535.0])
def test_the_default_leaves_the_room_for_rounding_that_the_page_of_the_engine_states(expected):
    """255 parts per record are covered up to 65,535 records (docs/engine.md#norms), for any number of parameters."""
    for width in (1, 1000, 100_000):
        model = nn.Linear(width, 10)
        largest = performance.default_physical_batch(model, list(model.parameters()), expected)
        drawn = min(expected + 6 * expected**0.5, 65_535)
        assert drawn * (255 * largest + drawn / largest) <= 2**32


def test_the_default_keeps_the_memory_of_a_forward_pass():
    """A picture that passes few weights and leaves many activations."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.Tanh(), nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))  # fmt: skip
    saved = Trial.of(model, torch.zeros(2, 3, 224, 224)).saved
    assert saved >= 2 * 64 * 224 * 224 * 4  # both tanh keep their outputs
    largest = performance.default_physical_batch(model, list(model.parameters()), 512, saved)
    assert saved * largest <= performance.MOST_SAVED < saved * (largest + 1)


def test_the_number_of_rows_of_a_person_is_in_no_file_of_the_run(tmp_path, monkeypatch):
    """A physical batch holds all rows of a person, and is made larger for them."""
    monkeypatch.setattr(performance, "LARGEST_BATCH", 16)
    rows = {}
    for most in (20, 30):
        ids = np.repeat(np.arange(60), [most, *[1] * 59])
        x = torch.randn(len(ids), 6)
        folder = tmp_path / str(most)
        private = private_over(nn.Linear(6, 4), (x, torch.zeros(len(ids), dtype=torch.int64)), persons_plan(), lr=0.1,
                               budgets=persons_budgets(), persons=ids, rows_per_person=30, run_dir=folder)  # fmt: skip
        rows[most] = private.max_physical_batch
        private.close()
    assert rows[30] == 30
    assert settings_of(tmp_path / "20") == settings_of(tmp_path / "30")


def persons_budgets() -> epsilons.Budgets:
    return epsilons.Budgets(np.resize([1.0, 2.0], 60), delta=1e-5, unit="person")


def persons_plan() -> epsilons.Plan:
    return epsilons.plan(persons_budgets(), epsilons.Recipe(steps=1, batch_size=4.0, clip_norm=1.0), accountant="rdp")


def test_an_error_that_the_layout_caused_says_so():
    model, private = begun()

    def view() -> None:
        with private:
            for x, _ in private.batches:
                model[0](x).view(-1)

    with pytest.raises(RuntimeError) as caught:
        view()
    assert "channels_last=False" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("options", [{}, {"channels_last": True}, {"threads": 1}])
def test_a_run_that_is_resumed_decides_the_same_and_keeps_its_key(tmp_path, options):
    whole, private = begun(run_dir=tmp_path / "whole", seed=1, **options)
    with private:
        train(private, whole)
    half, private = begun(run_dir=tmp_path / "half", seed=1, checkpoint_every=1, **options)
    with private:
        train(private, half, until=2)
    half, private = begun(run_dir=tmp_path / "half", seed=1, resume=True, **options)
    assert private.ledger.epoch == 0
    with private:
        train(private, half)
    assert all(map(torch.equal, parameters_of(half), parameters_of(whole)))


def fitted(tmp_path, **options) -> dict:
    plan = some_plan(steps=1)
    tuned = epsilons.Performance(**options)
    epsilons.fit(network(), pictures(), plan, budgets=some_budgets(), run_dir=tmp_path / "run", performance=tuned)
    return settings_of(tmp_path / "run")


def test_the_process_is_set_up_by_fit_and_not_in_a_loop_of_ones_own(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(performance, "use_allocator", lambda: called.append("allocator"))
    monkeypatch.setattr(performance, "has_glibc", lambda: True)
    monkeypatch.setattr(performance, "cpu_limit", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: called.append(threads))
    _, private = begun(run_dir=tmp_path / "own")
    private.close()
    own = settings_of(tmp_path / "own")
    assert (own["allocator"], own["threads"], called) == (False, 4, [])
    whole = fitted(tmp_path)
    assert (whole["allocator"], whole["threads"], called) == (True, 1, ["allocator", 1])


def test_no_glibc_is_no_error_unless_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(performance.ctypes, "CDLL", lambda _: object())
    assert fitted(tmp_path)["allocator"] is False


@pytest.mark.parametrize(
    ("text", "limit"), [("150000 100000", 2), ("max 100000", sys.maxsize), ("50000 100000", 1), ("", sys.maxsize)]
)
def test_the_limit_of_a_container_is_read(tmp_path, monkeypatch, text, limit):
    file = tmp_path / "cpu.max"
    file.write_text(text + "\n")
    monkeypatch.setattr(performance, "CPU_QUOTA", file)
    assert performance.cpu_limit() == limit
    file.unlink()
    assert performance.cpu_limit() == sys.maxsize


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"threads": 1_000_000}, {"threads": True}, {"max_physical_batch": 1.5},
                {"allocator": "yes"}, {"channels_last": None}, {"max_physical_batch": None}],
)  # fmt: skip
def test_other_values_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        epsilons.Performance(**options)


def test_a_line_of_the_log_says_what_was_chosen(caplog):
    with caplog.at_level("INFO", logger="epsilons"):
        begun()[1].close()
    (line,) = [record.message for record in caplog.records if record.message.startswith("Performance")]
    assert all(part in line for part in ("engine ghost", "512 rows", "channels last"))


def test_make_private_takes_at_most_16_keywords_and_fit_at_most_25():
    for function, most in ((epsilons.make_private, 16), (epsilons.fit, 25)):
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        assert kinds.count(inspect.Parameter.KEYWORD_ONLY) <= most


def test_the_config_has_the_fields_of_performance_with_their_defaults():
    """Its data are in memory, so it needs no workers."""
    assert PerformanceSection().model_dump() | {"num_workers": 0} == asdict(epsilons.Performance())


def test_the_allocator_is_refused_where_it_cannot_be_set(monkeypatch):
    monkeypatch.setattr(performance.ctypes, "CDLL", lambda _: object())
    with pytest.raises(InputError, match="glibc"):
        begun(allocator=True)


def _set(name: str) -> None:
    backends = torch.backends
    if name == "older":
        torch.set_float32_matmul_precision("medium")
    elif not hasattr(backends.mkldnn, "matmul"):
        pytest.skip("needs torch 2.9")
    elif name == "newer":
        backends.mkldnn.matmul.fp32_precision = "bf16"
    else:
        backends.fp32_precision = "tf32"


@pytest.fixture(params=["older", "newer", "all"])
def coarse(request):
    """Every way to ask torch for coarser products."""
    own = [part.fp32_precision for part in _switches()]
    before = getattr(torch.backends, "fp32_precision", None)
    _set(request.param)
    yield
    torch.set_float32_matmul_precision("highest")
    if before is not None:
        torch.backends.fp32_precision = before
    for part, precision in zip(_switches(), own, strict=True):
        part.fp32_precision = precision
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("engine", ["ghost", "vmap"])
def test_norms_and_sums_are_full_precision_whatever_torch_is_set_to(engine, coarse):
    before = in_use()
    assert "bf16" in before or "tf32" in before or before == "medium"
    inside = []
    own = ENGINES[engine]()
    model = network()
    own.attach(model, list(model.parameters()))
    x, y = torch.randn(6, 3, 8, 8), torch.randint(4, (6,))
    for record in (0, 5):
        only = torch.zeros(6, dtype=torch.float64)
        only[record] = 1.0
        own.begin(6)
        hidden = model(x)
        hidden.register_hook(lambda g: inside.append(in_use()))
        losses = F.cross_entropy(hidden, y, reduction="none")
        found = own.clipped_sum(losses, torch.full((6,), 1e-3, dtype=torch.float64), only)
        assert 0.999e-3 <= sum(float(f.square().sum()) for f in found) ** 0.5 <= 1e-3
    assert inside
    assert all(precision == "highest" or set(precision.split()) == {"ieee"} for precision in inside)
    assert in_use() == before


def test_full_precision_is_left_by_errors_too():
    before = in_use()
    with pytest.raises(ValueError, match="out"), full_precision():
        raise ValueError("out")
    assert in_use() == before
