"""The ``tensoropt`` command: its parser, and one file per verb with its call and its answer."""

from tensoropt.cli.parser import main as main
