"""Docstrings as Markdown, which mkdocstrings reads: roles such as ``:func:`pt2qa.load``` and doctests become code."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrites each docstring when griffe has read it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object in place."""
        if obj.docstring is not None:
            plain = _ROLE.sub(r"`\1`", obj.docstring.value).replace("::\n", ":\n")
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", plain)
