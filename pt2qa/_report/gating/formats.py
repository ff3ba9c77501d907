"""What a gate found, in the formats that build servers read: JUnit XML, and the workflow commands of GitHub Actions."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

from pt2qa._printable import clean

if TYPE_CHECKING:
    from pt2qa._report.gating.result import GateCheck, GateResult


def junit_xml(result: GateResult) -> str:
    """One suite, in which each check is a test case; warnings and notes are the suite's output.

    Source:
        the schema that Jenkins' JUnit plug-in publishes, of which GitLab, Azure and others read the same parts.
    """
    counts = {"tests": str(len(result.checks)), "failures": str(len(result.missed)), "errors": "0"}
    suites = ElementTree.Element("testsuites", {"name": "pt2qa gate", **counts})
    suite = ElementTree.SubElement(suites, "testsuite", {"name": clean(_subject(result)), **counts, "skipped": "0"})
    for check in result.checks:
        name = {"classname": f"pt2qa.gate.{clean(result.kind)}", "name": clean(check.title)}
        case = ElementTree.SubElement(suite, "testcase", name)
        if not check.passed:
            failure = ElementTree.SubElement(case, "failure", {"type": "missed", "message": clean(check.outcome)})
            failure.text = "\n".join(map(clean, check.where))
    if said := [*(f"warning: {line}" for line in result.warnings), *result.notes]:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(map(clean, said))
    ElementTree.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def github_commands(result: GateResult) -> str:
    """One ``::error`` a missed check and one ``::warning`` a warning, a line each; empty where there are none.

    Source:
        "Workflow commands for GitHub Actions", docs.github.com; what is escaped how, ``actions/toolkit``,
        ``packages/core/src/command.ts``.
    """
    subject = _subject(result)
    lines = [
        _command("error", clean(f"pt2qa gate: {check.title}"), _message(subject, check)) for check in result.missed
    ]
    return "\n".join(
        [*lines, *(_command("warning", "pt2qa gate", clean(f"{subject}: {line}")) for line in result.warnings)]
    )


def _subject(result: GateResult) -> str:
    return " ".join(part for part in (result.model, result.quantizer, result.kind) if part)


def _message(subject: str, check: GateCheck) -> str:
    return "\n".join(map(clean, [f"{subject}: {check.outcome}", *check.places]))


def _command(name: str, title: str, message: str) -> str:
    r"""A workflow command.

    >>> _command("error", "a: 1, 2", "50 %\nand more")
    '::error title=a%3A 1%2C 2::50 %25%0Aand more'
    """
    return f"::{name} title={_escaped(title).replace(':', '%3A').replace(',', '%2C')}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
