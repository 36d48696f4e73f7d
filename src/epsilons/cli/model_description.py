"""What a config states about a trained model, for its model.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..data import DATASETS, sources
from ..data.images import IMAGE_SETS, PLAIN_MEAN, PLAIN_STD, UNCHANGED_MEAN, UNCHANGED_STD, is_image_table
from ..data.tables import Features
from ..data.tensors import is_folder_of_tensors
from ..model_file import ArrayInputs, ImageInputs, ModelFile, Named, Origin, Outputs, TableInputs
from .config import Config, DataSection
from .prepare import Prepared


def describe(prepared: Prepared, folder: Path) -> ModelFile:
    """The description of the model that a config trains; paths are taken from `folder`."""
    config = prepared.config
    return ModelFile(
        model=_named(config, prepared),
        inputs=_inputs(config.data, folder),
        outputs=_outputs(config.data, prepared.classes),
        fixed_features=prepared.features is not None,
        provenance=tuple(Origin(**entry.to_dict()) for entry in config.data.provenance),  # type: ignore[arg-type]
    )


def _named(config: Config, prepared: Prepared) -> Named | None:
    """The model of the table; None for the caller's own."""
    if ":" in config.model.name:
        return None
    shape = prepared.train.inputs.shape[1:]
    return Named(name=config.model.name, options=config.model_options, shape=shape, outputs=prepared.outputs)


def _inputs(data: DataSection, folder: Path) -> TableInputs | ImageInputs | ArrayInputs:
    """How the records of data.train become inputs, by the kinds of `data.sources`."""
    path = folder / data.train
    if data.train in IMAGE_SETS and data.features is None:
        return ImageInputs(mean=IMAGE_SETS[data.train].mean, std=IMAGE_SETS[data.train].std)
    is_on_the_hub = data.train not in DATASETS and sources.is_named(data.train, folder)
    if data.train in IMAGE_SETS or is_image_table(path) or is_on_the_hub:
        mean, std = (PLAIN_MEAN, PLAIN_STD) if data.features is None else (UNCHANGED_MEAN, UNCHANGED_STD)
        return ImageInputs(mean=mean, std=std)
    if data.train in DATASETS or is_folder_of_tensors(path):
        return ArrayInputs()
    return TableInputs(features=inputs_alone(data.columns, data.target))


def inputs_alone(features: Features, target: str) -> Features:
    """The rules of the inputs, without the target and the columns that are left out or set aside."""
    numeric = {name: bounds for name, bounds in features.numeric.items() if name != target}
    alone = replace(features, numeric=numeric, drop=())
    return replace(alone, texts=tuple(sorted({*features.texts} & {*alone.names})))


def _outputs(data: DataSection, classes: tuple[str, ...] | None) -> Outputs:
    if classes is not None:
        return Outputs(kind="classes", target=data.target, classes=classes)
    return Outputs(kind="number", target=data.target, bounds=data.columns.numeric.get(data.target))
