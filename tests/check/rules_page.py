"""Writes the page of the rules, ``build/rules.md``: ``python -m tests.check.rules_page``, or ``make rules``."""

from __future__ import annotations

from pathlib import Path

from pt2qa.plugins import Rule
from tests.check.rule_examples import FOLDER, every_rule

PAGE = Path(__file__).resolve().parents[2] / "build" / "rules.md"

HEAD = """\
# Rules of the structure check

What `pt2qa.check` and `pt2qa check` look for: what each rule means, an example in which it finds something, what is
then printed, and how the example is fixed. How to run the check, silence a rule or add one is in
[check.md](../docs/check.md).

| rule | severity | what it finds |
| --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    rules = every_rule().values()
    table = "".join(f"| [{rule.id}](#{rule.id}) | {rule.severity} | {rule.title} |\n" for rule in rules)
    return "\n".join([HEAD + table, *map(section, rules)])


def section(rule: Rule) -> str:
    """What the page says about one rule."""
    example = (FOLDER / f"{rule.id}.md").read_text(encoding="utf-8")
    return f"## {rule.id}\n\n**{rule.severity}**: {rule.title}. {rule.why}\n\n{example}"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
