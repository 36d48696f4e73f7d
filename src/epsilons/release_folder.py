"""A release folder: the files that are copied to those who use a model, with their checksums. No torch in here.

    release/
      README.md              the model card, as Hugging Face uses it
      guarantee.txt          the guarantee in words
      model.json             how the model is built, how a record becomes its input, what its outputs mean
      model.safetensors      the weights
      features.safetensors   with fixed features: their name, options and public constants
      encoder/               with an encoder from a local folder: its files
      SHA256SUMS             a checksum of every file above, as `sha256sum -c` reads it

The checksums find damage and careless edits. They are no signature: who can change a file can change them, too.
"""

from __future__ import annotations

import re
from pathlib import Path

from .errors import RunError
from .files import sha256_of, write_bytes

SUMS = "SHA256SUMS"
CARD, GUARANTEE, WEIGHTS = "README.md", "guarantee.txt", "model.safetensors"
FIXED, ENCODER, MODEL = "features.safetensors", "encoder", "model.json"

#: The files that every release has.
NEEDED = (CARD, GUARANTEE, MODEL, WEIGHTS)

_LINE = re.compile(r"([0-9a-f]{64})  ((?:[A-Za-z0-9_][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._-]*)")


def is_release(folder: Path) -> bool:
    """True for a folder with checksums."""
    return (folder / SUMS).is_file()


def write_sums(folder: Path) -> Path:
    """Write the checksums of all files in the folder."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in files if name != SUMS]
    return write_bytes(folder / SUMS, "".join(lines).encode("ascii"), release=True)


def check_sums(folder: Path) -> tuple[str, ...]:
    """The names of the files that are as they were released. Raises RunError if one of them is missing or changed."""
    sums = _read_sums(folder)
    missing = [name for name in (*NEEDED, *sums) if name not in sums or not (folder / name).is_file()]
    if missing:
        raise RunError(f"The release {folder} is not complete: {missing[0]} is missing. Copy the whole folder again.")
    for name, digest in sums.items():
        if sha256_of(folder / name) != digest:
            raise RunError(
                f"{folder / name} is not as it was released: its checksum differs from that in {SUMS}. Copy the whole "
                "folder again."
            )
    return tuple(sums)


def _read_sums(folder: Path) -> dict[str, str]:
    """File name -> SHA-256."""
    try:
        lines = (folder / SUMS).read_bytes().decode("ascii").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError):
        lines = ["?"]
    matches = [_LINE.fullmatch(line) for line in lines[:-1]]
    sums = {match[2]: match[1] for match in matches if match is not None}
    if len(sums) != len(lines) - 1 or lines[-1] or not sums:
        raise RunError(f"{folder / SUMS} is damaged: it is not a list of checksums. Copy the whole folder again.")
    return sums
