"""The ``tensoropt`` command: its parser, and one file for each verb (``explore``, ``choose``, ...)."""

from tensoropt.cli.parser import main as main
