"""Shows what stands under `Example:` in a docstring as code, as mkdocstrings does what stands under `Examples:`."""

import re
from typing import Any

import griffe


class DocstringExamples(griffe.Extension):
    """Renames the section before it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """For every module, class, function and attribute that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
