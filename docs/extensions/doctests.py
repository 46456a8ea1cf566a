"""Render doctest examples as code. Markdown would otherwise render `>>>` as a block quote."""

import re

import griffe

EXAMPLE = re.compile(r"^[ ]*>>> .*?(?=\n[ ]*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """Griffe extension that puts each block starting with `>>>` into a fenced code block."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring of an object.

        Args:
            obj: The object that griffe has loaded.
        """
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                lambda example: f"```pycon\n{example.group()}\n```", obj.docstring.value
            )
