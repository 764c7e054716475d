"""What `halfstep lint` found as SARIF 2.1.0, which code hosts and editors show beside the code.

The format is that of https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from halfstep.records import RuleRecord, Severity, Violation
from halfstep.report.lint import place_text

__all__ = ["findings_sarif"]

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS: Final[Mapping[Severity, str]] = MappingProxyType({"error": "error", "warning": "warning", "info": "note"})


def findings_sarif(violations: Sequence[Violation], rules: Sequence[RuleRecord], *, version: str, failures: Sequence[str] = ()) -> str:
    """All findings as SARIF, with what is known about the rules.

    Args:
        violations: The findings.
        rules: All rules; those of the findings are among them.
        version: The version of halfstep that found them.
        failures: What could not be checked, and why.
    """
    places = {rule.code: place for place, rule in enumerate(rules)}
    driver = {
        "name": "halfstep",
        "semanticVersion": version,
        "rules": [_rule(rule) for rule in rules],
    }
    invocation = {
        "executionSuccessful": not failures,
        "toolExecutionNotifications": [{"level": "error", "message": {"text": failure}} for failure in failures],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": [_result(violation, rules[places[violation.code]], places[violation.code]) for violation in violations],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(rule: RuleRecord) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "help": {"text": rule.page, "markdown": rule.page},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(violation: Violation, rule: RuleRecord, place: int) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": {"uri": _uri(violation.path)}}
    message = violation.message
    if violation.cell is None:
        location["region"] = {"startLine": violation.line, "startColumn": violation.column}
    else:
        # Lines of a cell are none of the file.
        location["region"] = {"startLine": 1}
        message = f"{place_text(violation)}: {message}"
    return {
        "ruleId": rule.code,
        "ruleIndex": place,
        "level": _LEVELS[rule.severity],
        "message": {"text": message},
        "locations": [{"physicalLocation": location}],
        "properties": {"fix": violation.fix},
    }


def _uri(path: str) -> str:
    return Path(path).as_uri() if Path(path).is_absolute() else quote(os.fsencode(Path(path).as_posix()))
