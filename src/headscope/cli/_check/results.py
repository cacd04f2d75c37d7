"""The results of a class: of each submission, and how often each finding occurs; as plain data and as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headscope._support.text import visible

SEVERITIES = ("wrong", "fragile", "unusual", "slow")
OPTIONAL = {"dropout of weights", "decoding with a cache", "memory", "float16"}
"""Tests of what a submission may do without: that they did not run shows nothing about it."""
OUTCOMES = ("passed", "incomplete", "failed", "not checked")


@dataclass(frozen=True)
class Result:
    """The result of a submission.

    Attributes:
        label: the file.
        findings: as ``Findings.to_dict`` returns them; None if it could not be checked.
        error: why it could not be checked; "" if it could.
        missing: the tests that did not run, although they ran for another submission or the conventions require them.
        note: a remark on what was checked; "" if there is none.
    """

    label: str
    findings: dict[str, Any] | None
    error: str = ""
    missing: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def of(cls, label: str, findings: dict[str, Any] | None, error: str, note: str) -> Result:
        """Return a result; a submission without attention and without a mistake was not checked."""
        absence = "" if findings is None or findings["fails"] else describe_absence(findings)
        return cls(label, None if absence else findings, absence or error, note=note)

    @property
    def outcome(self) -> str:
        """One of ``OUTCOMES``."""
        if self.findings is None:
            return "not checked"
        return "failed" if self.findings["fails"] else "incomplete" if self.missing else "passed"

    def list_names(self, *severities: str) -> list[str]:
        """Return the names of the findings of these severities, or of all."""
        every: list[dict[str, Any]] = [] if self.findings is None else self.findings["findings"]
        return [visible(each["name"]) for each in every if not severities or each["severity"] in severities]

    def describe(self) -> str:
        """Return the result in one line, without the outcome, which depends on the other submissions, or the error."""
        if self.findings is None:
            return "not checked"
        by_severity = ((kind, self.list_names(kind)) for kind in SEVERITIES)
        return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_severity if names) or "nothing found"

    def count_skipped(self) -> dict[str, int]:
        """Return how many tests each finding prevented."""
        reasons = [] if self.findings is None else self.findings["not_tested"].values()
        names = self.list_names()
        counts = Counter(name for reason in reasons for name in names if reason.endswith(f" ({name})"))
        return dict(counts)

    def list_untested(self) -> set[str]:
        """Return the tests that did not run, without optional ones and those that wait for a finding."""
        if self.findings is None:
            return set()
        names = (*self.list_names(), *self.findings["omitted"])
        waiting = tuple(f" ({name})" for name in names)
        tests: dict[str, str] = self.findings["not_tested"]
        return {test for test, reason in tests.items() if test not in OPTIONAL and not reason.endswith(waiting)}

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain lists, numbers and strings."""
        return {
            "file": self.label, "outcome": self.outcome, "error": self.error,
            "note": self.note, "missing_tests": list(self.missing), "findings": self.findings, "text": self.to_text(),
        }  # fmt: skip

    def list_remarks(self) -> list[str]:
        """Return what was checked instead, how many tests wait for each finding, and which tests did not run."""
        remarks = [self.note] if self.note else []
        for name, count in self.count_skipped().items():
            remarks.append(f"{count} check{'s' if count > 1 else ''} skipped until {name} is fixed")
        if self.missing:
            remarks.append(f"not tested: {', '.join(self.missing)}")
        return remarks

    def list_mask_reasons(self) -> list[str]:
        """Return why no mask was tested, up to the remedy: often an error of the submission."""
        if self.findings is None:
            return []
        reasons: dict[str, str] = self.findings["not_tested"]
        tests = [test for test in reasons if (test == "masks" or test.endswith("=")) and visible(test) in self.missing]
        return [f"{visible(test)}: {visible(reasons[test].partition('; if it takes')[0])}" for test in tests]

    def to_text(self) -> str:
        """Return the result for the author of the submission: outcome, findings and remarks with their reasons."""
        if self.findings is None:
            return f"{self.outcome}: {self.error}"
        findings = [visible(line) for each in self.findings["findings"] for line in ("", *each["text"].split("\n"))]
        reasons: dict[str, str] = self.findings["not_tested"]
        why = [f"{test}: {visible(reason)}" for test, reason in reasons.items() if visible(test) in self.missing]
        return "\n".join([self.outcome, *findings, "", *self.list_remarks(), *why]).strip()


def describe_absence(findings: dict[str, Any]) -> str:
    """Return in words that no attention was observed; "" if it was."""
    reason = findings["not_tested"].get("attention", "")
    return f"no attention was observed: {visible(reason)}" if reason else ""


@dataclass(frozen=True)
class Misconception:
    """A finding and the submissions that have it."""

    name: str
    severity: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class ClassResults:
    """The results of all submissions, in the order of their names."""

    results: tuple[Result, ...]

    @classmethod
    def of(cls, results: Sequence[Result]) -> ClassResults:
        """Return the results, each with the tests that ran for another submission only, or that it requires."""
        untested = [result.list_untested() for result in results]
        checked = [tests for tests, result in zip(untested, results, strict=True) if result.findings is not None]
        everywhere = set[str].intersection(*checked) if checked else set[str]()

        def complete(result: Result, tests: set[str]) -> Result:
            order: list[str] = [] if result.findings is None else list(result.findings["not_tested"])
            required: list[str] = [] if result.findings is None else result.findings["missing"]
            missing = tuple(visible(test) for test in order if test in (tests - everywhere).union(required))
            return replace(result, missing=missing)

        return cls(tuple(complete(result, tests) for result, tests in zip(results, untested, strict=True)))

    @property
    def fails(self) -> bool:
        """Whether a submission failed, or could not be checked."""
        return any(result.outcome in ("failed", "not checked") for result in self.results)

    @property
    def counts(self) -> dict[str, int]:
        """The number of submissions by outcome."""
        counts = Counter(result.outcome for result in self.results)
        return {outcome: counts[outcome] for outcome in OUTCOMES}

    def list_misconceptions(self) -> list[Misconception]:
        """Return the findings of all submissions, the most frequent first; among equals, the most severe."""
        by_name: dict[tuple[str, str], list[str]] = {}
        for result in self.results:
            for severity in SEVERITIES:
                for name in result.list_names(severity):
                    by_name.setdefault((severity, name), []).append(result.label)
        every = [Misconception(name, severity, tuple(labels)) for (severity, name), labels in by_name.items()]
        return sorted(every, key=lambda each: (-len(each.labels), SEVERITIES.index(each.severity), each.name))

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain lists, numbers and strings."""
        misconceptions = [
            {"name": each.name, "severity": each.severity, "count": len(each.labels), "files": list(each.labels)}
            for each in self.list_misconceptions()
        ]
        return {
            "kind": "headscope-class", "version": 1, "fails": self.fails, "counts": self.counts,
            "files": [result.to_dict() for result in self.results], "misconceptions": misconceptions,
        }  # fmt: skip

    def to_csv(self) -> str:
        """Return a line for each submission."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["file", "outcome", *SEVERITIES, "missing tests", "error"])
        for result in self.results:
            names = [", ".join(result.list_names(kind)) for kind in SEVERITIES]
            error = result.error or "; ".join(result.list_mask_reasons())
            cells = [result.label, result.outcome, *names, ", ".join(result.missing), error]
            writer.writerow([_escape_formula(cell) for cell in cells])
        return stream.getvalue()


def _escape_formula(cell: str) -> str:
    """Return a cell that no spreadsheet computes: file names and errors come from others."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@")) else cell
