"""Checks of runs as documents that continuous integration reads: JUnit's XML, and JSON in the shape that
pytest-json-report writes. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

from paceline.monitor.run_checks import RunCheck

# Characters that XML 1.0 cannot hold, however they are written.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(checks: Sequence[RunCheck], *, created: float, host: str = "") -> bytes:
    """Return one <testsuite> per run, below <testsuites>."""
    root = ElementTree.Element("testsuites", _counts(checks), name="paceline")
    for run in dict.fromkeys(check.run for check in checks):
        own = [check for check in checks if check.run == run]
        when = datetime.fromtimestamp(created, UTC).isoformat(timespec="seconds")
        about = {"name": _xml_text(run), "timestamp": when, "hostname": _xml_text(host)}
        suite = ElementTree.SubElement(root, "testsuite", {**about, **_counts(own)})
        for check in own:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                {"classname": _xml_text(run), "name": check.name, "time": f"{check.seconds:.3f}"},
            )
            text = _xml_text(check.text)
            if check.outcome == "passed":
                ElementTree.SubElement(case, "system-out").text = text
            else:
                kind = "failure" if check.outcome == "failed" else "skipped"
                ElementTree.SubElement(case, kind, {"message": text.partition("\n")[0]}).text = text
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def pytest_json(
    checks: Sequence[RunCheck], *, created: float, duration: float, root: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the document as plain data."""
    outcomes = Counter(check.outcome for check in checks)
    return {
        "created": created,
        "duration": duration,
        "exitcode": 1 if outcomes["failed"] else 0,
        "root": root,
        "environment": dict(environment),
        "summary": {**outcomes, "total": len(checks), "collected": len(checks)},
        "collectors": [],
        "tests": [_test(check, root) for check in checks],
    }


def _test(check: RunCheck, root: str) -> dict[str, Any]:
    call: dict[str, Any] = {"duration": check.seconds, "outcome": check.outcome}
    if check.outcome == "passed":
        call["stdout"] = check.text
    else:
        call["longrepr"] = check.text
    if check.outcome == "failed":
        call["crash"] = {"path": f"{root}/{check.run}", "lineno": 0, "message": check.text.partition("\n")[0]}
    around = {"duration": 0.0, "outcome": "passed"}
    return {
        "nodeid": check.nodeid,
        "lineno": 0,
        "outcome": check.outcome,
        "keywords": [check.name.partition("[")[0], check.run],
        "setup": around,
        "call": call,
        "teardown": dict(around),
    }


def _counts(checks: Sequence[RunCheck]) -> dict[str, str]:
    outcomes = Counter(check.outcome for check in checks)
    return {
        "tests": str(len(checks)),
        "failures": str(outcomes["failed"]),
        "errors": "0",
        "skipped": str(outcomes["skipped"]),
        "time": f"{sum(check.seconds for check in checks):.3f}",
    }


def _xml_text(text: str) -> str:
    return _NOT_XML.sub("?", text)
