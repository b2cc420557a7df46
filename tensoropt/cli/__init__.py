"""The ``tensoropt`` command: its parser, and one file for each verb."""

from tensoropt.cli.parser import main as main
