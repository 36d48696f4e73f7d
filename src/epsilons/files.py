"""Files written whole or not at all: through a temporary file beside them, made durable and then renamed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .errors import RunError


def write_json(path: Path, values: Any) -> Path:
    """Write JSON to `path`; no half-written file is ever seen there. Raises RunError if it cannot be written."""
    return write_text(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write text to `path`; no half-written file is ever seen there. Raises RunError if it cannot be written."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return path
