"""Well-known architectures with random weights, made small, and what happens when they are trained: docs/models.md.

    python tests/known_models.py [LIBRARY|NAME …]

prints for each: trained or refused, what clipped it, and how far its first sum is from that of the engine `loop`. The
last line says how many were proven by the engine `ghost`.

Widths and depths are small where the library that defines a model lets one choose. Images have 3 x 32 x 32 pixels,
texts 12 tokens of 99, signals 400 numbers. The architectures of the library torch are in known_by_hand.py.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import sys
import warnings
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
import known_by_hand
from fuzzing.trials import captured
from known_by_hand import Losses
from options import make_flat

RECORDS, CLASSES, TOKENS = 12, 3, 99
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Known:
    """A model from a library, what it takes (`inputs_of`), and its losses; None for cross-entropies of classes."""

    library: str
    name: str
    make: Make
    takes: str
    losses: Losses | None = None


@dataclass(frozen=True)
class Outcome:
    """How two steps ended: "trained", "mended and trained" or "refused", with what was mended or the message.

    vmap      what the default engine logged if it left the model, or a part of it, to vmap; "" if it proved everything
    distance  of the first sum to that of the engine loop, relative to it; infinite if refused
    """

    how: str
    detail: str = ""
    vmap: str = ""
    distance: float = math.inf

    @property
    def is_proven(self) -> bool:
        return self.how != "refused" and not self.vmap


class Encoder(nn.Module):
    """The mean over positions of what an encoder returns, and a linear layer."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x).last_hidden_state.mean(1))
        return out


def inputs_of(takes: str) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(1)
    if takes == "text":
        return (torch.randint(3, TOKENS, (RECORDS, 12), generator=make),)
    if takes in ("image", "signal"):
        return (torch.randn(RECORDS, *((3, 32, 32) if takes == "image" else (400,)), generator=make),)
    return known_by_hand.inputs_of(takes, RECORDS)


class _Listener(logging.Handler):
    """Keeps what the default engine logs: the operators that send a model to the slower engine."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage().replace("This model, or a part of it, is clipped", "Clipped"))


def try_out(known: Known) -> Outcome:
    """Train two steps: what was mended, or why it was refused, what clipped it, and whether the engine loop agrees."""
    listener, log = _Listener(), logging.getLogger("epsilons.clipping")
    log.addHandler(listener)
    try:
        how, detail, sums = _trained_or_mended(known)
    finally:
        log.removeHandler(listener)
    distance = math.inf if how == "refused" else _from_loop(known, how, sums)
    return Outcome(how, detail, " ".join(listener.said), distance)


def _trained_or_mended(known: Known) -> tuple[str, str, Tensor]:
    """Train; if that is refused, mend a new copy and train it. (how, detail, the first sum)"""
    nothing = torch.zeros(0)
    try:
        return "trained", "", train(_new(known), known.takes, known.losses)
    except epsilons.errors.ModelError as refusal:
        first = str(refusal)
    try:
        lines = epsilons.mend(model := _new(known))
        if not lines:
            return "refused", first, nothing
        detail = f"{len(lines)} layers, e.g. {lines[0]}"
        return "mended and trained", detail, train(model, known.takes, known.losses)
    except epsilons.errors.ModelError as refusal:
        return "refused", str(refusal), nothing


def _from_loop(known: Known, how: str, ours: Tensor) -> float:
    model = _new(known)
    if how != "trained":
        epsilons.mend(model)
    theirs = train(model, known.takes, known.losses, engine="loop", steps=1)
    return float((ours - theirs).norm() / theirs.norm())


def _new(known: Known) -> nn.Module:
    torch.manual_seed(0)
    return known.make().train()


def train(model: nn.Module, takes: str, losses: Losses | None = None, engine: str = "auto", steps: int = 2) -> Tensor:
    """Steps that draw every record; all checks are on. The first sum, without noise, as one vector."""
    budgets = epsilons.Budgets(np.resize((4.0, 8.0), RECORDS))
    recipe = epsilons.Recipe(steps=2, batch_size=RECORDS, clip_norm=1.0)
    plan = epsilons.plan(budgets, recipe, accountant="rdp")
    data = torch.utils.data.TensorDataset(*inputs_of(takes), torch.arange(RECORDS) % CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    performance = epsilons.Performance(engine=engine)
    options: dict[str, Any] = {"budgets": budgets, "seed": 0, "performance": performance}
    with captured() as sums, make_flat(model, optimizer, data, plan, **options) as private:
        for *inputs, targets in private.batches:
            private.backward((losses or _of_classes)(model, tuple(inputs), targets))
            private.step()
            if len(sums) == steps:
                break
        if steps == recipe.steps and not private.is_finished:
            raise AssertionError("the run did not finish")
    return torch.cat([part.flatten() for part in sums[0]])


def _of_classes(model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    out = model(*inputs)
    return F.cross_entropy(getattr(out, "logits", out), targets, reduction="none")


def _next_tokens(model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    return known_by_hand.next_tokens(model(*inputs).logits, inputs[0])


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

#: Models of the next token, most of them with tied weights.
_LANGUAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2", _TEXT | _GPT | {"n_positions": 32}),
    "LlamaForCausalLM": ("Llama", _LLAMA),
    "MistralForCausalLM": ("Mistral", _LLAMA | {"sliding_window": 4}),
    "Qwen3ForCausalLM": ("Qwen3", _LLAMA),
    "Gemma2ForCausalLM": ("Gemma2", _LLAMA),
    "PhiForCausalLM": ("Phi", _BERT | {"bos_token_id": 1, "eos_token_id": 2}),
    "FalconForCausalLM": ("Falcon", _BERT | {"bos_token_id": 1, "eos_token_id": 2}),
    "GPTNeoForCausalLM": ("GPTNeo", _TEXT | {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "window_size": 4,
        "attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2}),
    "MixtralForCausalLM": ("Mixtral", _LLAMA | {"num_local_experts": 4}),
    "MambaForCausalLM": ("Mamba", _TEXT | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "RwkvForCausalLM": ("Rwkv", _TEXT | {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 32}),
    "BertForMaskedLM": ("Bert", _BERT),
    "BartForConditionalGeneration": ("Bart", _TEXT | {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}),
}  # fmt: skip

_IMAGES: dict[str, dict[str, Any]] = {
    "ViT": _VIT,
    "DeiT": _VIT,
    "Beit": _VIT,
    "Siglip": {"vision_config": _WIDE | {"image_size": 32, "patch_size": 8}, "num_labels": CLASSES},
    "CLIP": {"vision_config": _WIDE | {"image_size": 32, "patch_size": 8}, "num_labels": CLASSES},
    "Segformer": _IMAGE | _STAGES | {"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
    "PvtV2": _IMAGE | _STAGES | {"num_attention_heads": [1, 1, 2, 2]},
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


def _of_language(name: str) -> Make:
    def make() -> nn.Module:
        config, options = _LANGUAGES[name]
        library: Any = transformers()
        model: nn.Module = getattr(library, name)(getattr(library, f"{config}Config")(**options))
        return model

    return make


class _Whisper(nn.Module):
    """Whisper's encoder on features of a signal, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        settings = {"num_mel_bins": 8, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2}
        library = transformers()
        config = library.WhisperConfig(encoder_ffn_dim=64, max_source_positions=25, **settings)
        self.encoder, self.head = library.models.whisper.modeling_whisper.WhisperEncoder(config), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x.view(-1, 8, 50)).last_hidden_state.mean(1))
        return out


def _t5_both() -> nn.Module:
    library = transformers()
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model: nn.Module = library.T5ForConditionalGeneration(library.T5Config(vocab_size=TOKENS, **sizes))
    return model


def _sequence_to_sequence(model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """From the first six tokens to the last six."""
    (x,) = inputs
    logits = model(input_ids=x[:, :6], decoder_input_ids=x[:, 6:]).logits
    return known_by_hand.next_tokens(logits, x[:, 6:])


def _adapted(kind: str, options: dict[str, Any]) -> Make:
    """A small BERT with an adapter of peft."""

    def make() -> nn.Module:
        peft: Any = import_module("peft")
        bert = _of_transformers("Bert", "SequenceClassification", _BERT)()
        model: nn.Module = peft.get_peft_model(bert, getattr(peft, f"{kind}Config")(task_type="SEQ_CLS", **options))
        return model

    return make


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


_PEFT: dict[str, dict[str, Any]] = {
    "Lora": {"r": 2, "target_modules": ["query", "value"]},
    "AdaLora": {"init_r": 4, "target_r": 2, "total_step": 10, "target_modules": ["query", "value"]},
    "IA3": {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]},
    "PromptTuning": {"num_virtual_tokens": 4},
    "PromptEncoder": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
}


def _by_hand(name: str) -> Make:
    return lambda: known_by_hand.make(name)


KNOWN = [
    *(
        Known("torch", name, _by_hand(name), takes, known_by_hand.LOSSES.get(name))
        for name, (takes, *_) in known_by_hand.ARCHITECTURES.items()
    ),
    *(Known("transformers", n, _of_transformers(n, "SequenceClassification", o), "text") for n, o in _TEXTS.items()),
    *(Known("transformers", name, _of_language(name), "text", _next_tokens) for name in _LANGUAGES),
    Known("transformers", "T5 encoder", _t5, "text"),
    Known("transformers", "T5", _t5_both, "text", _sequence_to_sequence),
    Known("transformers", "Wav2Vec2", _wav2vec2, "signal"),
    Known("transformers", "Whisper encoder", _Whisper, "signal"),
    *(Known("transformers", n, _of_transformers(n, "ImageClassification", o), "image") for n, o in _IMAGES.items()),
    *(Known("peft", kind, _adapted(kind, options), "text") for kind, options in _PEFT.items()),
    *(Known("torchvision", name, make, "image") for name, make in _VISION.items()),
    *(Known("timm", name, _of_timm(name), "image") for name in _TIMM),
]


def main(wanted: list[str]) -> None:
    """Print a line for each model that is wanted and can be made here, and a summary."""
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    for known in KNOWN:
        if not importlib.util.find_spec(known.library) or (wanted and not {known.library, known.name} & {*wanted}):
            continue
        try:
            outcome = try_out(known)
        except Exception as error:
            outcome = Outcome("refused", f"BARE {type(error).__name__}: {error}")
        outcomes.append(outcome)
        engine = "" if outcome.how == "refused" else "ghost" if outcome.is_proven else "vmap"
        said = " ".join(f"{outcome.detail} {outcome.vmap}".split())[:200]
        print(
            f"{known.library:13} {known.name:35} {outcome.how:18} {engine:6} {outcome.distance:8.1e} {said}", flush=True
        )
    trained = [outcome for outcome in outcomes if outcome.how != "refused"]
    print(
        f"proven by ghost {sum(o.is_proven for o in trained)} of {len(outcomes)}; left to vmap "
        f"{sum(not o.is_proven for o in trained)}, refused {len(outcomes) - len(trained)}, of these "
        f"{sum(o.detail.startswith('BARE') for o in outcomes)} with a bare error; largest distance to the engine loop "
        f"{max((o.distance for o in trained), default=0.0):.1e}"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("epsilons").addHandler(logging.NullHandler())
    main(sys.argv[1:])
