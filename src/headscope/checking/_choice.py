"""Which findings a caller wants reported; this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from headscope.checking._catalogue import CATALOGUE
from headscope.checking._findings import Finding


@dataclass(frozen=True)
class Choice:
    """The findings to report, and those that count whatever their severity.

    Attributes:
        ignore: names that are removed after consequences were dropped: what follows from them stays away, too.
        only: the names of which alone are reported, also where they follow from another finding; None = all.
        refuse: names of findings that count.
    """

    ignore: frozenset[str]
    only: frozenset[str] | None
    refuse: frozenset[str]

    @classmethod
    def of(
        cls, ignore: str | Iterable[str], only: str | Iterable[str] | None, refuse: str | Iterable[str] = ()
    ) -> Choice:
        """Return the choice of three arguments of ``check``.

        Raises:
            ValueError: a name is unknown, or ``only`` is empty.
        """
        chosen = None if only is None else check_names("only", only)
        if chosen is not None and not chosen:
            raise ValueError("only: got no name, expected the name of at least one finding, or None for all")
        return cls(check_names("ignore", ignore), chosen, check_names("refuse", refuse))

    def apply(
        self, every: tuple[Finding, ...], explain: Callable[[frozenset[str]], tuple[Finding, ...]]
    ) -> tuple[Finding, ...]:
        """Return the findings to report.

        Args:
            every: the findings without a choice.
            explain: gives the findings among some names that do not follow from another of them.
        """
        chosen = every if self.only is None else explain(self.only)
        return tuple(finding for finding in chosen if finding.name not in self.ignore)


def check_names(argument: str, names: str | Iterable[str]) -> frozenset[str]:
    """Check the names of findings, and return them as a set.

    Args:
        argument: the argument that they were given as, for the message.
        names: one name, or several.

    Raises:
        ValueError: a name is unknown; the message has the nearest one, or all.

    Examples:
        >>> from headscope.checking import check_names
        >>> sorted(check_names("ignore", ["scale-unusual", "mask-ignored"]))
        ['mask-ignored', 'scale-unusual']
        >>> check_names("ignore", "scale-mising")
        Traceback (most recent call last):
        ValueError: ignore: got scale-mising, expected the name of a finding; did you mean scale-missing?
    """
    every = frozenset([names] if isinstance(names, str) else names)
    for name in sorted(every, key=str):
        if name not in CATALOGUE:
            near = get_close_matches(str(name), CATALOGUE, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(CATALOGUE)}"
            raise ValueError(f"{argument}: got {name}, expected the name of a finding; {hint}")
    return every


check_names.__module__ = "headscope.checking"  # its public path
