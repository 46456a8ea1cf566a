"""The templates of the page."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(name: str) -> Template:
    """Return a template of this package, which escapes all text that is put into it.

    Args:
        name: Its file name.

    Returns:
        The template.
    """
    environment = Environment(
        loader=PackageLoader("equilibrate.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {}  # keys keep their order
    return environment.get_template(name)
