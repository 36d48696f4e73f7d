"""The table's models, `mend`, which replaces what mixes records, and known architectures (docs/models.md)."""

from __future__ import annotations

import copy
import importlib.util
import random
import runpy
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import epsilons
import known_models
from epsilons.errors import InputError, ModelError, UnsupportedLayerError
from epsilons.models import MODELS, build
from epsilons.models.mending import FrozenNorm, group_count
from epsilons.models.model_checks import check_layers
from known_models import KNOWN, Known, try_out
from pages import ROOT
from sums import CLOSE, away, length, sums_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The budgets differ, and each class"),
]


# -- models of the table ----------------------------------------------------------------------------------------------

SHAPES = {"mnist-cnn": (1, 28, 28), "cifar10-cnn": (3, 32, 32), "resnet18-gn": (3, 32, 32)}
TEXT_MODELS = {"embedding-bag": {"buckets": 30}, "lstm": {"buckets": 30, "layers": 2}}


def ids(records: int, tokens: int = 9) -> Tensor:
    """(records, tokens) ids below 30 with the padding in front; the first record is an empty text."""
    lengths = torch.arange(records) * tokens // max(records - 1, 1)
    is_token = torch.arange(tokens) >= tokens - lengths[:, None]
    return torch.where(is_token, torch.randint(1, 30, (records, tokens)), 0)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_turns_each_record_into_its_outputs_and_mixes_nobody(name):
    x = ids(3) if name in TEXT_MODELS else torch.randn(3, *SHAPES.get(name, (2, 5)))
    model = build(name, tuple(x.shape[1:]), 7)
    check_layers(model)
    together = model.eval()(x)
    assert together.shape == (3, 7)
    alone = torch.cat([model(x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "options", "count"),
    [
        ("mnist-cnn", (1, 28, 28), {}, 26_010),  # the paper's, counted in its published code
        ("cifar10-cnn", (3, 32, 32), {}, 550_570),
        ("resnet18-gn", (3, 224, 224), {"stem": "large"}, 11_181_642),  # ResNet-18 with 10 classes
        ("logistic", (64,), {}, 650),
        ("mlp", (64,), {"hidden": [32, 16]}, 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10),
    ],
)
def test_a_model_has_the_parameters_that_were_published(name, shape, options, count):
    assert parameters(build(name, shape, 10, **options)) == count


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("mnist-cnn", (64,), {}, r"\(1, 28, 28\)"),
        ("cifar10-cnn", (1, 28, 28), {}, r"\(3, 32, 32\)"),
        ("resnet18-gn", (3, 4, 4), {}, "at least 8"),
        ("resnet18-gn", (3, 32, 32), {"norm_groups": 3}, "divide 64"),
        ("resnet18-gn", (3, 32, 32), {"stem": "tall"}, "'tall'"),
        ("mlp", (4,), {"hidden": [0]}, "layer widths"),
        ("mlp", (4,), {"activation": "sine"}, "'sine'"),
        ("mlp", (4,), {"hidden": [10**15]}, "cannot be made"),
        ("embedding-bag", (1, 28, 28), {}, r"\(tokens,\)"),
        ("embedding-bag", (9,), {"buckets": 1}, "at least 2, got 1"),
        ("embedding-bag", (9,), {"hidden": -1}, "0 for no hidden layer"),
        ("lstm", (9,), {"layers": 0}, "layers must be a whole number, at least 1"),
        ("lstm", (9,), {"bidirectional": True}, "takes: buckets, dimension, hidden, layers"),
        ("nothing", (4,), {}, "No model is called"),
        ("torch.nn:Linear", (4,), {"in_features": 4}, "cannot be made"),
    ],
)
def test_a_model_that_cannot_be_is_refused(name, shape, options, words):
    with pytest.raises(InputError, match=words):
        build(name, shape, 10, **options)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_text_model_s_gradients_are_clipped_as_the_definition_says(name):
    torch.manual_seed(0)
    model, x = build(name, (9,), 4, **TEXT_MODELS[name]), ids(8)
    clip_norm = torch.linspace(0.01, 3, 8, dtype=torch.float64)
    ours, theirs = sums_of(model, lambda model, x: model(x).square().sum(1), x, clip_norm)
    assert away(ours, theirs) <= CLOSE * length(theirs)


def test_padding_adds_nothing_to_the_mean_of_embeddings():
    torch.manual_seed(0)
    model = build("embedding-bag", (9,), 4, buckets=30)
    x = ids(5)
    torch.testing.assert_close(model(x), model(torch.cat([torch.zeros(5, 40, dtype=torch.long), x], 1)))
    mean = torch.stack([model[0].embeddings.embedding.weight[row[row > 0]].mean(0) for row in x[1:]])
    torch.testing.assert_close(model[0](x), torch.cat([torch.zeros(1, 16), mean]))


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_the_noise_in_the_padding_s_embedding_is_never_read(name):
    model, x = build(name, (9,), 4, **TEXT_MODELS[name]), ids(5)
    before = model(x)
    with torch.no_grad():
        model[0].embeddings.embedding.weight[0] += 7.0  # as the noise of many updates does
    assert torch.equal(model(x), before)


def test_an_lstm_reads_tokens_in_order_and_its_last_state_is_after_the_last_token():
    torch.manual_seed(0)
    model, x = build("lstm", (9,), 4, buckets=30), ids(2)
    last = model[0].lstm(model[0].embeddings(x))[1][0][-1]
    torch.testing.assert_close(model(x), model[1](last))
    assert not torch.allclose(model(x)[1], model(x.flip(1))[1])


@pytest.mark.parametrize("name", TEXT_MODELS)
@pytest.mark.parametrize("kind", [torch.int32, torch.float32])
def test_ids_of_tokens_may_have_any_type_of_numbers(name, kind):
    model, x = build(name, (9,), 4, **TEXT_MODELS[name]), ids(3)
    assert torch.equal(model(x.to(kind)), model(x))


def test_a_model_of_one_s_own_is_imported():
    assert parameters(build("torch.nn:Linear", (4,), 3, in_features=4, out_features=3)) == 15


# -- mend -------------------------------------------------------------------------------------------------------------

RECORDS, CLASSES = 8, 3
#: A layer for 12 channels, and an input of 8 records for it.
LAYERS = {
    "BatchNorm1d": (nn.BatchNorm1d, (12,)),
    "BatchNorm1d of sequences": (nn.BatchNorm1d, (12, 5)),
    "BatchNorm2d": (nn.BatchNorm2d, (12, 4, 4)),
    "BatchNorm2d of one pixel": (nn.BatchNorm2d, (12, 1, 1)),
    "BatchNorm3d": (nn.BatchNorm3d, (12, 2, 2, 2)),
    "SyncBatchNorm": (nn.SyncBatchNorm, (12, 3, 3)),
}
each_layer = pytest.mark.parametrize(("kind", "shape"), LAYERS.values(), ids=LAYERS)
each_mode = pytest.mark.parametrize("mode", ["group", "freeze"])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def used(norm: nn.Module) -> nn.Module:
    """The layer with weights and statistics as after some training."""
    for at, (name, value) in enumerate((*norm.named_parameters(), *norm.named_buffers())):
        if value.is_floating_point():
            new = numbers(*value.shape, seed=at + 5)
            value.data.copy_(new.abs() + 0.5 if name.endswith("var") else new)
    return norm


@cache
def everyone() -> tuple[epsilons.Budgets, epsilons.Plan]:
    budgets = epsilons.Budgets(np.resize((1.0, 2.0), RECORDS))
    recipe = epsilons.Recipe(steps=2, batch_size=RECORDS, clip_norm=0.5)
    return budgets, epsilons.plan(budgets, recipe, accountant="rdp")


def train(model: nn.Module, x: Tensor) -> None:
    """Two steps with all records. The library's own checks are on."""
    budgets, plan = everyone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(x, torch.arange(RECORDS) % CLASSES)
    with epsilons.make_private(model, optimizer, data, plan, budgets=budgets, seed=0) as private:
        for inputs, targets in private.batches:
            private.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
            private.step()
        assert private.is_finished


def rows_are_independent(model: nn.Module, x: Tensor) -> bool:
    """True if the other rows change nothing of the first two, in training, beyond rounding."""
    model.train()
    alone, among = model(x[:2]), model(torch.cat([x[:2], 3 * x[2:] + 1]))[:2]
    return torch.allclose(alone, among, atol=1e-5)


def before_a_head(norm: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(int(np.prod(shape)), CLASSES))


# -- GroupNorm ---------------------------------------------------------------------------------------------------------


@each_layer
@each_mode
def test_every_batch_norm_becomes_a_layer_that_trains_row_by_row(kind, shape, mode):
    model, x = before_a_head(used(kind(12)), shape), numbers(RECORDS, *shape)
    (line,) = epsilons.mend(model, mode)
    assert line.startswith(f"0: {kind.__name__}(12) is ")
    assert type(model[0]) is (nn.GroupNorm if mode == "group" else FrozenNorm)
    assert rows_are_independent(model, x)
    train(model, x)


@pytest.mark.parametrize("groups", [None, 1, 2, 3, 16, 32, 1000])
def test_no_group_has_fewer_than_two_values(groups):
    for channels in range(2, 600):
        count = group_count(channels, groups)
        assert channels % count == 0
        assert channels // count >= 2
        assert count <= (groups or 32)


@pytest.mark.parametrize("groups", [None, 1000])
@pytest.mark.parametrize("channels", [2, 3, 4, 7, 13, 64])
def test_flat_features_are_not_erased(channels, groups):
    model = nn.Sequential(nn.BatchNorm1d(channels))
    epsilons.mend(model, groups=groups)
    assert (model(numbers(64, channels)).std(0) > 0.1).all()


def test_the_number_of_groups_is_the_callers_where_it_divides_the_channels():
    model = nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm2d(24), nn.BatchNorm2d(8))
    epsilons.mend(model, groups=16)
    assert [norm.num_groups for norm in model] == [16, 12, 4]


def test_two_channels_become_a_group_with_a_warning_in_its_line():
    assert "the order" in epsilons.mend(nn.Sequential(nn.BatchNorm1d(2)))[0]
    assert "the order" not in epsilons.mend(nn.Sequential(nn.BatchNorm1d(3)))[0]


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"eps": 0.5}, {"track_running_stats": False}])
def test_weight_bias_and_eps_are_kept_as_the_same_parameters(options):
    norm = used(nn.BatchNorm2d(12, **options))
    model = nn.Sequential(norm).double().eval()
    (line,) = epsilons.mend(model)
    assert model[0].weight is norm.weight
    assert model[0].bias is norm.bias
    assert model[0].eps == norm.eps
    assert not model[0].training
    assert ("are kept" in line) == norm.affine
    plain = F.group_norm(x := numbers(4, 12, 3, 3).double(), model[0].num_groups, norm.weight, norm.bias, norm.eps)
    assert torch.equal(model(x), plain)


# -- frozen ------------------------------------------------------------------------------------------------------------


@each_layer
def test_a_frozen_norm_computes_what_batch_norm_computes_in_eval_mode(kind, shape):
    x, norm = numbers(RECORDS, *shape), used(kind(12))
    expected = norm.eval()(x)
    model = nn.Sequential(copy.deepcopy(norm))
    epsilons.mend(model, "freeze")
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    assert torch.equal(model.train()(x), expected)
    assert torch.equal(model.eval()(x), expected)
    assert all(torch.equal(value, statistics[name]) for name, value in model.named_buffers())


def test_weights_of_a_frozen_norm_are_trained_and_its_statistics_are_not():
    model = before_a_head(used(nn.BatchNorm1d(12)), (12,))
    epsilons.mend(model, "freeze")
    before = {name: value.clone() for name, value in model[0].state_dict().items()}
    train(model.train(), numbers(RECORDS, 12))
    changed = {name for name, value in model[0].state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"weight", "bias"}


def test_a_checkpoint_of_the_original_loads_into_the_frozen_model():
    original = nn.Sequential(used(nn.BatchNorm2d(4)))
    model = nn.Sequential(nn.BatchNorm2d(4))
    epsilons.mend(model, "freeze")
    model.load_state_dict(original.state_dict())
    assert torch.equal(model(x := numbers(3, 4, 2, 2)), original.eval()(x))


def test_the_line_of_a_frozen_norm_says_where_statistics_must_come_from():
    assert "public data" in epsilons.mend(nn.Sequential(used(nn.BatchNorm1d(4))), "freeze")[0]
    assert "never updated" in epsilons.mend(nn.Sequential(nn.BatchNorm1d(4)), "freeze")[0]


# -- the other layers that are refused ---------------------------------------------------------------------------------


@each_mode
def test_instance_norm_with_statistics_is_mended(mode):
    norm = used(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))
    expected = {"group": norm.train()(x := numbers(RECORDS, 4, 6)).clone(), "freeze": norm.eval()(x).clone()}
    model = nn.Sequential(copy.deepcopy(norm).train(), nn.Flatten(), nn.Linear(24, CLASSES))
    statistics = norm.running_mean.clone()
    if mode == "freeze":
        model[0].load_state_dict(norm.state_dict())
        expected["freeze"] = norm(x)
    assert len(epsilons.mend(model, mode)) == 1
    assert torch.allclose(model[0](x), expected[mode], atol=1e-6)
    assert torch.equal(norm.running_mean, statistics)
    train(model, x)


def test_instance_norm_without_statistics_is_left():
    assert epsilons.mend(nn.Sequential(nn.InstanceNorm1d(4))) == []


class StochasticDepth(nn.Module):
    """As in torchvision: one coin per batch, or one per row."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        size = (len(x) if self.mode == "row" else 1, *[1] * (x.ndim - 1))
        return x * torch.empty(size).bernoulli_(0.5)


@each_mode
def test_stochastic_depth_of_batches_becomes_one_of_rows(mode):
    model = nn.Sequential(nn.Linear(6, 6), StochasticDepth("batch"), nn.Linear(6, CLASSES))
    with pytest.raises(UnsupportedLayerError, match=r'Use mode="row".*epsilons\.mend'):
        train(model, numbers(RECORDS, 6))
    assert epsilons.mend(model, mode) == ["1: StochasticDepth now drops the layer for each record alone."]
    train(model, numbers(RECORDS, 6))


class BatchNormAct2d(nn.BatchNorm2d):
    """The layer of this name in timm 1.0 (layers/norm_act.py): norm, dropout and activation in one."""

    __module__ = "timm.layers.norm_act"

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


@each_mode
def test_the_activation_inside_a_norm_of_timm_is_kept(mode):
    norm = used(BatchNormAct2d(12))
    model = before_a_head(copy.deepcopy(norm), (12, 3, 3))
    keys, x = set(model.state_dict()), numbers(RECORDS, 12, 3, 3)
    assert "then SiLU as before" in epsilons.mend(model, mode)[0]
    normed = F.group_norm(x, 1, norm.weight, norm.bias) if mode == "group" else nn.BatchNorm2d.forward(norm.eval(), x)
    assert torch.allclose(model[0](x), F.silu(normed))
    assert keys - set(model.state_dict()) <= {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert type(model[0].act) is nn.SiLU
    train(model, x)


# -- places ------------------------------------------------------------------------------------------------------------


@each_mode
def test_a_shared_layer_is_replaced_at_every_place_by_one_layer(mode):
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.ModuleDict({"a": norm, "b": nn.BatchNorm1d(6)}), norm)
    lines = epsilons.mend(model, mode)
    assert [line.split(": ")[0] for line in lines] == ["1, 2.a, 3 (one layer)", "2.b"]
    assert model[1] is model[2]["a"] is model[3]
    assert not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())


def test_a_shared_block_is_mended_once_and_named_at_each_place():
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.Sequential(block, block)
    assert epsilons.mend(model)[0].startswith("0.1, 1.1 (one layer): ")
    assert model[0][1] is model[1][1]


def test_a_second_mend_changes_nothing():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))
    assert len(epsilons.mend(model)) == 1
    assert epsilons.mend(model) == []
    assert epsilons.mend(model, "freeze") == []


# -- refusals, which change nothing ------------------------------------------------------------------------------------


class _Own(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(0)


class _Listed(nn.Module):
    """Keeps its layers in a plain list, beside registering them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.all = [self.norm]


def _parametrized() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    parametrize.register_parametrization(norm, "weight", nn.Tanh())
    return norm


def _hooked() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.register_forward_hook(lambda *_: None)
    return norm


def _patched() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.forward = lambda x: x - x.mean(0)
    return norm


NOT_MENDED = {
    "own forward": (_Own(4), "forward method of its own"),
    "patched forward": (_patched(), "forward method of its own"),
    "parametrized": (_parametrized(), "remove_parametrizations"),
    "hooked": (_hooked(), "hooks"),
    "lazy": (nn.LazyBatchNorm1d(), "Call the model once"),
    "lazy without weights": (nn.LazyBatchNorm1d(affine=False), "Call the model once"),
    "one channel": (nn.BatchNorm1d(1), "has one channel"),
    "in a plain list": (_Listed(), r"1\.norm.*plain attribute 'all' of 1"),
}


@pytest.mark.parametrize(("layer", "message"), NOT_MENDED.values(), ids=NOT_MENDED)
def test_a_model_that_cannot_be_mended_stays_as_it_was(layer, message):
    model = nn.Sequential(first := nn.BatchNorm1d(6), layer)
    with pytest.raises(UnsupportedLayerError, match=message) as caught:
        epsilons.mend(model)
    assert "(1" in str(caught.value)
    assert list(model) == [first, layer]


def test_a_lazy_layer_is_mended_after_a_first_call():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(numbers(2, 5, 3, 3))
    assert epsilons.mend(model)[0].startswith("0: BatchNorm2d(5) is now GroupNorm(1, 5)")


def test_a_layer_itself_is_refused_because_it_has_no_place():
    with pytest.raises(UnsupportedLayerError, match=r"the model itself\) cannot be replaced in place"):
        epsilons.mend(nn.BatchNorm1d(4))


def test_freezing_needs_running_statistics():
    with pytest.raises(UnsupportedLayerError, match=r"\(0\) has no running statistics"):
        epsilons.mend(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "freeze")


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (InputError, "torch module, got str", ("model",)),
        (InputError, '"group" or "freeze", got \'groups\'', (nn.Sequential(), "groups")),
        (InputError, "at least 1, got 0", (nn.Sequential(), "group", 0)),
        (InputError, "at least 1, got True", (nn.Sequential(), "group", True)),
        (InputError, "Leave it out", (nn.Sequential(), "freeze", 8)),
        (ModelError, "torch.compile", (torch.compile(nn.Sequential(nn.BatchNorm1d(4))),)),
    ],
)
def test_wrong_arguments_and_wrapped_models_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        epsilons.mend(*arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_script_is_refused():
    with pytest.raises(ModelError, match=r"torch\.jit"):
        epsilons.mend(torch.jit.script(nn.Sequential(nn.BatchNorm1d(4))))


# -- random nets -------------------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"inner": body})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body["inner"](x)


def _random_net(draw: random.Random, images: bool) -> tuple[nn.Module, Tensor]:
    """Some layers of changing width, with BatchNorms before, after, within and twice."""
    layers: list[nn.Module] = []
    width = first = draw.choice([2, 3, 6, 8])
    norm = nn.BatchNorm2d if images else nn.BatchNorm1d
    for _ in range(draw.randint(2, 5)):
        after = draw.choice([2, 3, 4, 7, 16])
        layers.append(nn.Conv2d(width, after, 3, padding=1) if images else nn.Linear(width, after))
        width, one = after, used(norm(after, affine=draw.random() < 0.7))
        layers += draw.choice([[one], [one, nn.Tanh()], [_Residual(nn.Sequential(one, nn.Tanh()))], [one, one], []])
    layers.append(used(norm(width)))
    pool: list[nn.Module] = [nn.AdaptiveAvgPool2d(2), nn.Flatten()] if images else []
    head = nn.Linear(4 * width if images else width, CLASSES)
    return nn.Sequential(*layers, *pool, head), numbers(RECORDS, first, *((5, 5) if images else ()))


@each_mode
@pytest.mark.parametrize("seed", range(6))
def test_random_nets_with_batch_norms_are_mended_and_trained(seed, mode):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, x = _random_net(draw, images=bool(seed % 2))
    expected = copy.deepcopy(model).eval()(x)
    assert not rows_are_independent(copy.deepcopy(model), x)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(epsilons.mend(model, mode)) == len(norms)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if mode == "freeze":
        assert torch.equal(model(x), expected)
    assert rows_are_independent(model, x)
    train(model, x)


# -- known architectures with random weights: trained, mended and trained, or refused with a reason -------------------

PAGE = (ROOT / "docs" / "models.md").read_text("utf-8")
WRITER = runpy.run_path(str(ROOT / "docs" / "models_page.py"))
ROWS = WRITER["read"](PAGE)
#: A few of each family; the page has all.
SOME = [
    "Bert",
    "GPT2",
    "T5 encoder",
    "Llama",
    "Nystromformer",
    "ViT",
    "ConvNext",
    "ResNet",
    "MobileNetV2",
    "test_byobnet",
    "U-Net",
    "Variational autoencoder",
    "GPT with tied weights",
    "Transformer, sequence to sequence",
    "TabNet",
    "Siamese",
    "Graph attention",
    "Spectral normalisation",
]


def test_the_page_has_a_row_for_every_model_and_none_is_left_open():
    assert {key: row.takes for key, row in ROWS.items()} == {(k.library, k.name): k.takes for k in KNOWN}
    assert len(ROWS) == len(KNOWN) >= 100
    assert {row.how for row in ROWS.values()} <= {"trained", "mended", "refused"}
    assert all(row.layers for row in ROWS.values() if row.how == "mended")
    assert all(row.why for row in ROWS.values() if row.how == "refused")


def test_the_page_is_what_its_program_writes_of_these_rows():
    """If it is out of date: python docs/models_page.py."""
    in_order = {(known.library, known.name): ROWS[known.library, known.name] for known in KNOWN}
    assert WRITER["models_page"](in_order, WRITER["_versions"](PAGE)) == PAGE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("known", [known for known in KNOWN if known.name in SOME], ids=lambda known: known.name)
def test_a_known_model_ends_as_its_row_of_the_page_says(known: Known):
    if not importlib.util.find_spec(known.library):
        pytest.skip(f"{known.library} is not installed")
    row = ROWS[known.library, known.name]
    outcome = try_out(known)
    assert outcome.how == {"mended": "mended and trained"}.get(row.how, row.how)
    assert bool(outcome.vmap) == (row.how != "refused" and bool(row.why))
    assert outcome.how == "refused" or outcome.distance <= 2e-3


class _Bottleneck(nn.Module):
    """The residual block of ResNet-50 (He et al., 2016), as torchvision and timm build it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width // 2, 1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv2, self.bn2 = nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv3, self.bn3 = nn.Conv2d(width // 2, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["group", "freeze"])
def test_a_residual_net_by_its_definition_is_mended_and_trained(mode):
    body = [nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), _Bottleneck(16), _Bottleneck(16)]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    assert len(epsilons.mend(model, mode)) == 7
    known_models.train(model, "image")
