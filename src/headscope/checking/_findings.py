"""Findings, the result of a check; this module does not import torch."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from headscope.checking._catalogue import Severity
from headscope.checking._render import FindingsTable, render_html, render_text

ATTENTION = "attention"
"""The key of ``Findings.not_tested`` of a module in which no attention was observed."""


@dataclass(frozen=True)
class Finding:
    """One mistake, or one possible mistake.

    Attributes:
        name: its name, such as "softmax-over-queries"; docs/guides/check.md lists all.
        severity: "wrong"; "fragile", which is right here and breaks under a condition; "unusual", which may be
            intended; or "slow".
        seen: the evidence, with numbers and positions.
        why: why it matters.
        fix: how to fix it, in a sentence or two.
        code: a line of code that fixes it.
        condition: when a fragile module breaks, as a clause behind "if"; "" for all other severities.

    Examples:
        >>> from headscope import check
        >>> finding = check(lambda x: (x @ x.mT).softmax(-2) @ x, embed_dim=8)["softmax-over-queries"]
        >>> finding.severity, finding.fix
        ('wrong', 'Take the softmax over the last axis, the keys.')
    """

    name: str
    severity: Severity
    seen: str
    why: str
    fix: str
    code: str
    condition: str = ""


SEVERITIES: tuple[Severity, ...] = ("wrong", "fragile", "unusual", "slow")


@dataclass(frozen=True, eq=False, repr=False)
class Findings:
    """The result of a check, causes before their consequences; true in a boolean context where a finding counts.

    A wrong finding counts; a fragile one only with ``check(strict=True)``; any other one only if it is refused.

    Attributes:
        subject: the name of the checked module or function.
        found: the findings.
        understood: how it was called, and what it computes.
        not_tested: test that could not be run -> reason; the reason ends with the finding it follows from, if any.
        strict: whether fragile findings count.
        omitted: the names of findings that ``check(ignore=...)`` or ``check(only=...)`` removed.
        refused: the names of findings that count whatever their severity, by ``check(refuse=...)``.
        missing: the tests of masks that did not run, although ``check(mask_means=...)`` requires a mask.

    Examples:
        >>> from headscope import check
        >>> findings = check(lambda x: (x @ x.mT).softmax(-2) @ x, embed_dim=8)
        >>> bool(findings), findings.names, findings.summary
        (True, ('softmax-over-queries',), '<lambda>: 1 wrong')
    """

    subject: str
    found: tuple[Finding, ...]
    understood: tuple[str, ...]
    not_tested: dict[str, str]
    strict: bool = False
    omitted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of a name.

        Raises:
            KeyError: no finding has this name; the message lists the names.
        """
        for finding in self:
            if finding.name == name:
                return finding
        raise KeyError(f"name: got {name!r}, expected one of: {', '.join(self.names) or '(no findings)'}")

    def __bool__(self) -> bool:
        return any(map(self._counts, self))

    def _counts(self, finding: Finding) -> bool:
        counting = ("wrong", "fragile") if self.strict else ("wrong",)
        return finding.severity in counting or finding.name in self.refused

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the findings, in order."""
        return tuple(finding.name for finding in self)

    @property
    def summary(self) -> str:
        """The number of findings of each severity, in one line, and whether attention or required masks are missing."""
        counts = [(sum(f.severity == kind for f in self), kind) for kind in SEVERITIES]
        text = ", ".join(f"{count} {kind}" for count, kind in counts if count)
        untested = "; masks were not tested, although mask_means (--mask-means) is specified" if self.missing else ""
        absent = "; no attention was observed" if ATTENTION in self.not_tested else ""
        return f"{self.subject}: {text or 'nothing found'}{absent}{untested}"

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as plain lists, numbers and strings."""
        wrong = any(finding.severity == "wrong" for finding in self)
        head = {"kind": "headscope-findings", "version": 1, "subject": self.subject, "wrong": wrong}
        rest = {
            "understood": list(self.understood), "not_tested": dict(self.not_tested),
            "fails": bool(self), "strict": self.strict, "omitted": list(self.omitted),
            "refused": list(self.refused), "missing": list(self.missing),
        }  # fmt: skip
        findings = [
            {**asdict(each), "fails": self._counts(each), "text": render_text(each, refused=each.name in self.refused)}
            for each in self
        ]
        return {**head, "findings": findings, **rest}

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return ``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=indent)

    def table(self) -> RenderableType:
        """Return the findings for ``rich.print``, which fits them to the width of the console."""
        return FindingsTable(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None, legacy_windows=False)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __repr__(self) -> str:
        return f"<Findings of {self.summary}{': ' + ', '.join(self.names) if self.names else ''}>"

    def _repr_html_(self) -> str:
        return render_html(self)


for _class in (Finding, Findings):
    _class.__module__ = "headscope.checking"  # their public path
