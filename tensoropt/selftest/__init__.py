"""A single command that tries all of this on a machine, above all on a borrowed GPU, and writes a report."""

from tensoropt.selftest.checks import CHECKS
from tensoropt.selftest.report import CheckResult, SelftestReport
from tensoropt.selftest.run import run_selftest

__all__ = ["CHECKS", "CheckResult", "SelftestReport", "run_selftest"]
