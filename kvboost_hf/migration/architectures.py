"""Lists of architectures of `kvboost.compat`, from the table of those that were tried (docs/architectures.md)."""

import json
from pathlib import Path

__all__ = ["SUPPORTED_ARCHITECTURES", "UNSUPPORTED_ARCHITECTURES"]

_TRIED = json.loads((Path(__file__).parents[1] / "architectures.json").read_text(encoding="utf-8"))
SUPPORTED_ARCHITECTURES = {name for name, tried in _TRIED.items() if tried["outcome"] == "exact"}
UNSUPPORTED_ARCHITECTURES = {name: tried["reason"] for name, tried in _TRIED.items() if tried["outcome"] != "exact"}
