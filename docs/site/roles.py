"""Docstrings as Markdown, which mkdocstrings reads: doctests become code, roles of public names become links."""

import re
from typing import Any

import griffe
from reference import TOP

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrites each docstring when griffe has read it, and the types of columns."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Leave out of a column's type how tables show it."""
        said = attr.annotation
        if isinstance(said, griffe.ExprSubscript) and str(said.left) == "Annotated":
            attr.annotation = said.slice.elements[0]

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object in place."""
        if obj.docstring is not None:
            plain = _ROLE.sub(_link, obj.docstring.value).replace("::\n", ":\n")
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", plain)


def _link(role: re.Match[str]) -> str:
    """A name that has its place in the reference links there."""
    name = role[1]
    return f"[`{name}`][{name}]" if name.removeprefix("pt2qa.") in TOP and name.startswith("pt2qa.") else f"`{name}`"
