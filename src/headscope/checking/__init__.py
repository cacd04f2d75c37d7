"""check: find mistakes in an attention module from outside, by what it computes."""

from headscope.checking._check import check
from headscope.checking._check_model import check_model
from headscope.checking._choice import check_names
from headscope.checking._findings import Finding, Findings
from headscope.checking._subject import CheckError

__all__ = ["CheckError", "Finding", "Findings", "check", "check_model", "check_names"]
