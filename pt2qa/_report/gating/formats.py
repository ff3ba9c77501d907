"""Gate results in the formats that build servers read: JUnit XML, and the workflow commands of GitHub Actions."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from pt2qa._printable import clean
from pt2qa._report.gating.checks import GateCheck


def junit_xml(subject: str, kind: str, checks: Sequence[GateCheck], said: Sequence[str]) -> str:
    """One suite, in which each check is a test case.

    Args:
        subject: name of the suite.
        kind: of the report.
        checks: the test cases.
        said: lines of the suite's output.

    Source:
        the schema of Jenkins' JUnit plug-in; GitLab, Azure and others read the same parts.
    """
    missed = sum(not check.passed for check in checks)
    counts = {"tests": str(len(checks)), "failures": str(missed), "errors": "0"}
    suites = ElementTree.Element("testsuites", {"name": "pt2qa gate", **counts})
    suite = ElementTree.SubElement(suites, "testsuite", {"name": clean(subject), **counts, "skipped": "0"})
    for check in checks:
        name = {"classname": f"pt2qa.gate.{clean(kind)}", "name": clean(check.title)}
        case = ElementTree.SubElement(suite, "testcase", name)
        if not check.passed:
            failure = ElementTree.SubElement(case, "failure", {"type": "missed", "message": clean(check.outcome)})
            failure.text = "\n".join(map(clean, check.where))
    if said:
        ElementTree.SubElement(suite, "system-out").text = "\n".join(map(clean, said))
    ElementTree.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def github_commands(subject: str, missed: Sequence[GateCheck], warnings: Sequence[str]) -> str:
    """One ``::error`` line per missed check and one ``::warning`` line per warning; empty if there are none.

    Source:
        "Workflow commands for GitHub Actions", docs.github.com; for escaping, ``actions/toolkit``,
        ``packages/core/src/command.ts``.
    """
    lines = [_command("error", clean(f"pt2qa gate: {check.title}"), _message(subject, check)) for check in missed]
    return "\n".join([*lines, *(_command("warning", "pt2qa gate", clean(f"{subject}: {line}")) for line in warnings)])


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
