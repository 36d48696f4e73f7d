"""Well-known architectures with random weights, made small, and what happens when they are trained: docs/models.md.

Widths and depths are small where the library that defines a model lets one choose. Images have 3 x 32 x 32 pixels,
texts 12 tokens of 99, signals 400 numbers.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons

RECORDS, CLASSES, TOKENS = 12, 3, 99
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Known:
    """A model from a library, and what kind of input it takes: "text", "image" or "signal"."""

    library: str
    name: str
    make: Make
    takes: str


@dataclass(frozen=True)
class Outcome:
    """How two steps ended: "trained", "mended and trained" or "refused", with what was mended or the message."""

    how: str
    detail: str = ""


class Encoder(nn.Module):
    """The mean over positions of what an encoder returns, and a linear layer."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).last_hidden_state.mean(1))
        return out


def inputs_of(takes: str) -> Tensor:
    make = torch.Generator().manual_seed(1)
    if takes == "text":
        return torch.randint(3, TOKENS, (RECORDS, 12), generator=make)
    return torch.randn(RECORDS, *((3, 32, 32) if takes == "image" else (400,)), generator=make)


class _Listener(logging.Handler):
    """Keeps what the default engine logs: the operators that send a model to the slower engine."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage().replace("This model, or a part of it, is clipped", "Clipped"))


def try_out(known: Known) -> Outcome:
    """Train two steps, and say what was mended, or why it was refused, and whether the engine is the slower one."""
    listener, log = _Listener(), logging.getLogger("epsilons.training.clipping.ghost.ghost")
    log.addHandler(listener)
    try:
        outcome = _trained_or_mended(known)
    finally:
        log.removeHandler(listener)
    return Outcome(outcome.how, " ".join([outcome.detail, *listener.said]).strip())


def _trained_or_mended(known: Known) -> Outcome:
    """Train; if that is refused, mend a new copy and train it."""
    try:
        train(_new(known), inputs_of(known.takes))
        return Outcome("trained")
    except epsilons.errors.ModelError as refusal:
        first = str(refusal)
    try:
        lines = epsilons.mend(model := _new(known))
        if not lines:
            return Outcome("refused", first)
        train(model, inputs_of(known.takes))
        return Outcome("mended and trained", f"{len(lines)} layers, e.g. {lines[0]}")
    except epsilons.errors.ModelError as refusal:
        return Outcome("refused", str(refusal))


def _new(known: Known) -> nn.Module:
    torch.manual_seed(0)
    return known.make().train()


def train(model: nn.Module, x: Tensor) -> None:
    """Two steps that draw every record; all checks are on, and the engine is the default."""
    budgets = epsilons.Budgets(np.resize((4.0, 8.0), RECORDS))
    recipe = epsilons.Recipe(steps=2, batch_size=RECORDS, clip_norm=1.0)
    plan = epsilons.plan(budgets, recipe, accountant="rdp")
    data = torch.utils.data.TensorDataset(x, torch.arange(RECORDS) % CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with epsilons.make_private(model, optimizer, data, plan, budgets=budgets, seed=0) as private:
        for inputs, targets in private.batches:
            out = model(inputs)
            private.backward(F.cross_entropy(getattr(out, "logits", out), targets, reduction="none"))
            private.step()
        if not private.is_finished:
            raise AssertionError("the run did not finish")


# -- transformers ------------------------------------------------------------------------------------------------------

_WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_TEXT = {"vocab_size": TOKENS, "max_position_embeddings": 32, "pad_token_id": 0, "num_labels": CLASSES}
_BERT = _TEXT | _WIDE
_LLAMA = _BERT | {"num_key_value_heads": 1, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
_IMAGE = {"image_size": 32, "num_labels": CLASSES, "num_channels": 3}
_VIT = _IMAGE | _WIDE | {"patch_size": 8}
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}

_TEXTS: dict[str, dict[str, Any]] = {
    "Bert": _BERT,
    "Roberta": _BERT,
    "XLMRoberta": _BERT,
    "Electra": _BERT | {"embedding_size": 16},
    "Albert": _BERT | {"embedding_size": 16},
    "MPNet": _BERT,
    "DebertaV2": _BERT,
    "FNet": _BERT,
    "MobileBert": _BERT | {"embedding_size": 16, "intra_bottleneck_size": 16},
    "SqueezeBert": _BERT | {"embedding_size": 32},
    "BigBird": _BERT | {"attention_type": "original_full"},
    "Nystromformer": _BERT | {"num_landmarks": 4, "segment_means_seq_len": 12},
    "ModernBert": _BERT | {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    "DistilBert": _TEXT | {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "XLNet": {"vocab_size": TOKENS, "pad_token_id": 0, "num_labels": CLASSES}
    | {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
    "GPT2": _TEXT | _GPT | {"n_positions": 32},
    "OPT": _TEXT
    | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": _TEXT | _GPT | {"hidden_size": 32},
    "GPTNeoX": _LLAMA,
    "Llama": _LLAMA,
    "Mistral": _LLAMA,
    "Qwen2": _LLAMA,
    "Gemma": _LLAMA,
}

_IMAGES: dict[str, dict[str, Any]] = {
    "ViT": _VIT,
    "DeiT": _VIT,
    "Beit": _VIT,
    "Dinov2": _VIT,
    "Swin": _IMAGE | {"patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
    "ConvNext": _IMAGE | _STAGES,
    "ConvNextV2": _IMAGE | _STAGES,
    "PoolFormer": _IMAGE | _STAGES,
    "ResNet": _IMAGE | _STAGES | {"embedding_size": 8, "layer_type": "basic"},
    "RegNet": _IMAGE | _STAGES | {"embedding_size": 8, "groups_width": 8},
    "MobileNetV1": _IMAGE | {"depth_multiplier": 0.25},
    "MobileNetV2": _IMAGE | {"depth_multiplier": 0.25},
    "EfficientNet": _IMAGE | {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
}


def transformers() -> Any:
    """The package. It imports torchvision, if there is one, so that goes first."""
    if importlib.util.find_spec("torchvision"):
        vision()
    return import_module("transformers")


def _of_transformers(name: str, head: str, options: dict[str, Any]) -> Make:
    def make() -> nn.Module:
        library: Any = transformers()
        model: nn.Module = getattr(library, f"{name}For{head}")(getattr(library, f"{name}Config")(**options))
        return model

    return make


def _t5() -> nn.Module:
    library = transformers()
    config = library.T5Config(vocab_size=TOKENS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    return Encoder(library.T5EncoderModel(config), 32)


def _wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    settings = _WIDE | convolutions | positions | {"layerdrop": 0.0, "num_labels": CLASSES}
    library = transformers()
    model: nn.Module = library.Wav2Vec2ForSequenceClassification(library.Wav2Vec2Config(**settings))
    return model


# -- torchvision -------------------------------------------------------------------------------------------------------


def vision() -> Any:
    """torchvision.models. A torchvision built for CUDA defines no operators beside a torch for CPUs: they are named."""
    try:
        return import_module("torchvision.models")
    except RuntimeError:
        spec = importlib.util.find_spec("torchvision")
        assert spec is not None
        assert spec.origin is not None
    text = (Path(spec.origin).parent / "_meta_registrations.py").read_text(encoding="utf-8")
    for name in {*re.findall(r'"torchvision::(\w+)"', text), *re.findall(r'register_meta\("(\w+)"', text)}:
        _OPERATORS.define(f"{name}(Tensor x) -> Tensor")
    return import_module("torchvision.models")


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def _vgg() -> nn.Module:
    layers = vision().vgg.make_layers([8, "M", 16, "M", 32, "M"], batch_norm=True)
    return nn.Sequential(layers, nn.Flatten(), nn.Linear(32 * 16, CLASSES))


def _convnext() -> nn.Module:
    setting = vision().convnext.CNBlockConfig
    model: nn.Module = vision().ConvNeXt([setting(8, 16, 1), setting(16, None, 1)], 0.1, num_classes=CLASSES)
    return model


_VISION: dict[str, Make] = {
    "VGG with BatchNorm": _vgg,
    "ResNet-18": lambda: vision().resnet18(num_classes=CLASSES),
    "DenseNet": lambda: vision().DenseNet(8, (2, 2, 2), 16, num_classes=CLASSES),
    "MobileNetV2": lambda: vision().mobilenet_v2(width_mult=0.25, num_classes=CLASSES),
    "MobileNetV3": lambda: vision().mobilenet_v3_small(num_classes=CLASSES, width_mult=0.5),
    "ShuffleNetV2": lambda: vision().shufflenet_v2_x0_5(num_classes=CLASSES),
    "MNASNet": lambda: vision().mnasnet0_5(num_classes=CLASSES),
    "SqueezeNet": lambda: vision().squeezenet1_1(num_classes=CLASSES),
    "ViT": lambda: vision().VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES),
    "Swin": lambda: vision().SwinTransformer([2, 2], 8, [1, 1], [1, 2], [4, 4], num_classes=CLASSES),
    "ConvNeXt": _convnext,
}


# -- timm --------------------------------------------------------------------------------------------------------------

_TIMM = [
    "test_resnet",
    "test_byobnet",
    "test_efficientnet",
    "test_efficientnet_gn",
    "test_efficientnet_evos",
    "test_convnext",
    "test_nfnet",
    "test_vit",
    "test_mambaout",
    "mobilenetv3_small_050",
    "lcnet_050",
    "ghostnet_050",
    "mobilevit_xxs",
    "edgenext_xx_small",
    "dla46_c",
]


def _of_timm(name: str) -> Make:
    def make() -> nn.Module:
        vision()  # timm imports torchvision
        sized = {"img_size": 32} if name == "test_vit" else {}
        model: nn.Module = import_module("timm").create_model(name, num_classes=CLASSES, **sized)
        return model

    return make


KNOWN = [
    *(Known("transformers", n, _of_transformers(n, "SequenceClassification", o), "text") for n, o in _TEXTS.items()),
    Known("transformers", "T5 encoder", _t5, "text"),
    Known("transformers", "Wav2Vec2", _wav2vec2, "signal"),
    *(Known("transformers", n, _of_transformers(n, "ImageClassification", o), "image") for n, o in _IMAGES.items()),
    *(Known("torchvision", name, make, "image") for name, make in _VISION.items()),
    *(Known("timm", name, _of_timm(name), "image") for name in _TIMM),
]
