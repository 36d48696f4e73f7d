"""Checkpoint files: the whole state of a run in two files, without pickle; frozen weights in a third.

    checkpoints/000002.safetensors        every tensor that training may change, once
    checkpoints/000002.json               everything else, and the hash of the tensors; written last, it makes the pair
                                          valid
    checkpoints/frozen-1f….safetensors    weights that no update writes to, named by their hash: for all checkpoints
    checkpoints/000002.shards/            with `fully_shard` alone: each rank's rows of sharded tensors

Coins and noise need no state, because they are functions of (key, phase, step). Besides model and optimizer, a
checkpoint holds what may change the next sum: buffers, generators, and the schedulers and averages that the caller
registered.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..core.checksums import is_small, storage_of, tree_hash
from ..core.files import sync_folder, write_text
from ..core.modules import local, tensors_of
from ..draws.batches import parts, rebuilt
from ..errors import EpsilonsError, RunError, json_text, parsed_json

SCHEMA = 1
KEPT = 2  # the last one, and one in reserve


class Stateful(Protocol):
    """A scheduler, an average of weights, or anything else that training changes."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def save(folder: Path, state: Mapping[str, Any], frozen: Sequence[Tensor] = ()) -> Path:
    """Write the state durably, and remove older ones. Raises RunError if it cannot be written without pickle.

    frozen   tensors in it that no update writes to: they are written if they differ from those of the checkpoint before
    """
    packing = _Packing({_address(tensor) for tensor in frozen})
    packed = packing.pack(dict(state))
    file = folder / f"{next_number(folder):06d}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = {"schema": SCHEMA, "tensors": _write(file.with_suffix(".safetensors"), packing.tensors)}
        if packing.frozen:
            name = _name_of(packing.frozen)
            digest = _saved_before(folder, name) or _write(folder / name, packing.frozen)
            facts["frozen"] = [name, digest]
        sync_folder(folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"The checkpoint {file} cannot be written: {error}. Make room; what was charged stays charged."
        ) from None
    write_text(file, json_text(facts | {"state": packed}, indent=None) + "\n")  # in one line, which is faster
    for older in sorted(folder.glob("*.json"))[:-KEPT]:
        older.unlink(missing_ok=True)
        older.with_suffix(".safetensors").unlink(missing_ok=True)
        shutil.rmtree(older.with_suffix(".shards"), ignore_errors=True)
    return file


def next_number(folder: Path) -> int:
    """The number of the next checkpoint."""
    return 1 + max((int(file.stem) for file in folder.glob("*.json") if file.stem.isdigit()), default=0)


def _write(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write these tensors, durably once the folder is. Gives the file's hash."""
    temporary = file.with_suffix(".new")
    save_file(dict(tensors), temporary)
    digest = sync_and_hash(temporary)
    os.replace(temporary, file)
    return digest


def _saved_before(folder: Path, name: str) -> str | None:
    """The hash of this file of frozen weights, if it is in the last checkpoint and undamaged."""
    for file in sorted(folder.glob("*.json"))[-1:]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            last, digest = parsed_json(file.read_text(encoding="utf-8"))["frozen"]
            if last == name and _hash_of(folder / name) == digest:
                return str(digest)
    return None


class _DamagedError(Exception):
    """Of a file, with its name."""


def latest(folder: Path, at_hand: Callable[[], dict[str, Tensor]] = dict) -> dict[str, Any] | None:
    """The last undamaged state; None if there is no checkpoint. Raises RunError if all are damaged.

    at_hand   `frozen_of` the model: if the file of frozen weights is damaged, and these have its hash, they are used
    """
    damaged: list[str] = []
    for file in sorted(folder.glob("*.json"), reverse=True):
        try:
            return _read(file, at_hand)
        except _DamagedError as error:
            damaged.append(str(error))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
            damaged.append(file.name)
    if damaged:
        raise RunError(
            f"No checkpoint in {folder} can be read. Damaged, missing, or of another version: "
            f"{', '.join(dict.fromkeys(damaged))}. Restore these files from a backup, or begin a new run in another "
            "folder; what was charged stays charged. Without any checkpoint, this run begins again from its first "
            "weights, with the steps that are not charged."
        )
    return None


def _read(file: Path, at_hand: Callable[[], dict[str, Tensor]]) -> dict[str, Any]:
    """A checkpoint's state. Raises _DamagedError, or one of the errors of readers."""
    values = parsed_json(file.read_text(encoding="utf-8"))
    data = file.with_suffix(".safetensors")
    _check(data, values["tensors"])
    state: dict[str, Any] = _unpacked(
        values["state"], load_file(data) | _load_frozen(file.parent, values.get("frozen"), at_hand)
    )
    shards = state.get("shards", {"files": {}})
    for name, digest in shards["files"].items():
        _check(file.parent / shards["folder"] / name, digest)
    if values["schema"] != SCHEMA or not isinstance(state.get("fingerprint", {}), dict):
        raise ValueError(file.name)
    return state


def _check(file: Path, digest: str) -> None:
    """Raise _DamagedError if a file is missing, or has another hash."""
    if not file.is_file() or _hash_of(file) != digest:
        raise _DamagedError(file.name)


#: Hashes of files that this process has read, by what changes if they are written to.
_HASHES: dict[tuple[int, ...], str] = {}


def _hash_of(file: Path) -> str:
    """A hash of its bytes, which are read once: frozen weights may be most of a model."""
    at = file.stat()
    mark = at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns
    if mark not in _HASHES:
        _HASHES[mark] = sync_and_hash(file)
    return _HASHES[mark]


def _load_frozen(folder: Path, named: Any, at_hand: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    if named is None:
        return {}
    name, digest = named
    if Path(name).name != name:
        raise ValueError(name)
    try:
        _check(folder / name, digest)
    except _DamagedError:
        own = at_hand()
        if name != _name_of(own):
            raise
        return own
    return load_file(folder / name)


def _name_of(frozen: Mapping[str, Tensor]) -> str:
    """Of their file."""
    return f"frozen-{tree_hash(frozen.values())}.safetensors"


def remove(folder: Path) -> None:
    """Remove every checkpoint."""
    if folder.is_dir():
        for file in folder.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        folder.rmdir()


# -- states ---------------------------------------------------------------------------------------------------------


def of_model(model: nn.Module) -> dict[str, Any]:
    """Parameters, buffers (those that are not persistent, too) and extra state."""
    return {"state": dict(model.state_dict()), "buffers": dict(model.named_buffers())}


def unwritten(model: nn.Module, parameters: Iterable[Tensor]) -> list[Tensor]:
    """What no update of these parameters writes to, but for small tensors: it is saved once, and not copied."""
    trained = {storage_of(p) for p in parameters}
    return [t for t in tensors_of(model) if storage_of(t) not in trained and not is_small(t)]


def frozen_of(model: nn.Module, parameters: Iterable[Tensor]) -> dict[str, Tensor]:
    """The same, as it is in the file of frozen weights."""
    packing = _Packing({_address(tensor) for tensor in unwritten(model, parameters)})
    packing.pack(of_model(model))
    return packing.frozen


def into_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore them in place, so that optimizer and engine still hold the same tensors."""
    buffers = dict(model.named_buffers())
    model.load_state_dict(state["state"])
    with torch.no_grad():
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)


@contextmanager
def restoring(what: str) -> Iterator[None]:
    """Raise RunError for any error of the body: of damaged files, readers and load_state_dict may raise anything.

    what  what failed, for the message
    """
    try:
        yield
    except EpsilonsError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise RunError(f"{what} ({reason}). It is damaged, or of another model; restore it, or the model.") from error


def of_generators() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators."""
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    state = {**numpy, "state": {**numpy["state"], "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64))}}
    return {"python": random.getstate(), "numpy": state, "torch": torch.get_rng_state(), "cuda": list(on_gpu)}


def into_generators(state: Mapping[str, Any]) -> None:
    """Set the generators to these states."""
    random.setstate(state["python"])
    numpy = state["numpy"]
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].numpy().astype(np.uint32)}})
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, on_gpu in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(on_gpu, device)


@contextmanager
def same_generators() -> Iterator[None]:
    """Run the body, and set the generators to the states that they had before."""
    before = of_generators()
    try:
        yield
    finally:
        into_generators(before)


_PLAIN = {str, int, float, bool, type(None)}


def tensors_in(state: Any) -> list[Tensor]:
    """Every tensor in a state, in order."""
    return [leaf for leaf in _leaves(state) if isinstance(leaf, Tensor)]


def marks(state: Any) -> list[Any]:
    """Marks that differ after a write to the state: addresses and versions of tensors, everything else as text."""
    return [
        (local(leaf).data_ptr(), leaf._version) if isinstance(leaf, Tensor) else repr(leaf) for leaf in _leaves(state)
    ]


class Copies:
    """Copies of states, one after the other, in the same memory: a copy is valid until the next one is made."""

    def __init__(self) -> None:
        self._memory: dict[Address, Tensor] = {}  # by what was copied

    def of(self, state: Any, left_out: Collection[int] = ()) -> Any:
        """The state with copied tensors; tensors that share values share a copy.

        left_out  addresses of tensors that are not copied
        """
        known: dict[Address, Tensor] = {}
        copy = self._copied(state, known, left_out)
        self._memory = known
        return copy

    def _copied(self, node: Any, known: dict[Address, Tensor], left_out: Collection[int]) -> Any:
        """known: copies of this state by what they are copies of"""
        kind = type(node)
        if kind in _PLAIN:  # first, because there are many
            return node
        if kind is dict:
            return {key: self._copied(part, known, left_out) for key, part in node.items()}
        if kind is list:
            return [self._copied(part, known, left_out) for part in node]
        if not isinstance(node, Tensor):
            inner = parts(node)
            if inner is None:
                return node
            return rebuilt(node, {key: self._copied(part, known, left_out) for key, part in inner.items()})
        if local(node).data_ptr() in left_out:
            return node
        address = _address(node)
        if address not in known:
            memory = self._memory.get(address)
            known[address] = node.detach().clone() if memory is None else memory.copy_(node.detach())
        return known[address]


#: Of a tensor's values: where they are, and how they are read.
Address = tuple[Any, ...]


def _address(tensor: Tensor) -> Address:
    return local(tensor).data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _leaves(state: Any) -> list[Any]:
    found: list[Any] = []
    _add_leaves(state, found)
    return found


def _add_leaves(state: Any, found: list[Any]) -> None:
    if type(state) in _PLAIN:  # first, because there are many
        found.append(state)
    elif isinstance(state, Mapping):
        for key, item in state.items():
            found.append(key)
            _add_leaves(item, found)
    elif isinstance(state, list | tuple):
        for item in state:
            _add_leaves(item, found)
    else:
        found.append(state)


# -- packing ----------------------------------------------------------------------------------------------------------


class _Packing:
    """Turns a state into JSON. Each tensor becomes a number, and is kept under it: tensors with the same values once.

    tensors, frozen   by number; frozen are those with the given addresses
    """

    def __init__(self, frozen: Collection[Address]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.frozen: dict[str, Tensor] = {}
        self._is_frozen = frozen
        self._names: dict[Address, str] = {}
        self._storages: set[int] = set()

    def pack(self, value: Any) -> Any:
        """The value as JSON; types that JSON lacks get a key with $."""
        if isinstance(value, Tensor):
            return {"$tensor": self._name(value.detach())}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return {"$float": value.hex()}
        if isinstance(value, np.generic):
            return self.pack(value.item())
        if isinstance(value, tuple):
            return {"$tuple": [self.pack(item) for item in value]}
        if isinstance(value, list):
            return [self.pack(item) for item in value]
        if isinstance(value, Mapping):
            return {"$items": [[self.pack(part) for part in pair] for pair in value.items()]}
        raise RunError(
            f"A state holds a {type(value).__name__}, which cannot be saved without pickle. Save numbers, texts, "
            "tensors, and lists and dicts of them."
        )

    def _name(self, tensor: Tensor) -> str:
        address = _address(tensor)
        if address not in self._names or not tensor.numel():  # all without numbers may have one address
            is_frozen = address in self._is_frozen
            name = f"frozen {len(self.frozen)}" if is_frozen else str(len(self.tensors))
            # safetensors writes what lies in one piece, and no two tensors in one memory.
            storage = tensor.untyped_storage().data_ptr()
            saved = tensor.cpu().contiguous()
            if storage in self._storages:
                saved = saved.clone()
            self._storages.add(storage)
            (self.frozen if is_frozen else self.tensors)[name] = saved
            self._names[address] = name
        return self._names[address]


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((mark, content),) = value.items()
    if mark == "$tensor":
        return tensors[content]
    if mark == "$float":
        return float.fromhex(content)
    if mark == "$tuple":
        return tuple(_unpacked(item, tensors) for item in content)
    if mark == "$items":
        return {_unpacked(key, tensors): _unpacked(item, tensors) for key, item in content}
    raise ValueError(mark)


def sync_and_hash(path: Path) -> str:
    """A hash of its bytes, once they are on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
