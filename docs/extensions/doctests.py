"""Show the examples of docstrings as code: Markdown would take `>>>` for a quotation."""

import re

import griffe

EXAMPLE = re.compile(r"^[ ]*>>> .*?(?=\n[ ]*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """Put a fence around each block that starts with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                lambda example: f"```pycon\n{example.group()}\n```", obj.docstring.value
            )
