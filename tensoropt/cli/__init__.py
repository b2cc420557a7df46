"""The ``tensoropt`` command: a parser, and what each verb calls and prints."""

from tensoropt.cli.parser import main as main
