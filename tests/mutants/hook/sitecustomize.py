"""Loads one module from another file, in every process that has this folder on its path.

``TENSOROPT_MUTANT=MODULE=FILE`` says which. Ranks are separate interpreters that inherit the path and the
environment, so they run the changed module too.
"""

import importlib.machinery
import importlib.util
import os
import sys


class _OneModule:
    """A finder that knows one module."""

    def __init__(self, name, path):
        self.name, self.path = name, path

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        loader = importlib.machinery.SourceFileLoader(name, self.path)
        package = os.path.basename(self.path) == "__init__.py"
        places = [os.path.dirname(self.path)] if package else None
        return importlib.util.spec_from_file_location(
            name, self.path, loader=loader, submodule_search_locations=places
        )


def install():
    """Take the module from the file that the environment names, if it names one."""
    name, _, path = os.environ.get("TENSOROPT_MUTANT", "").partition("=")
    if name:
        sys.meta_path.insert(0, _OneModule(name, path))


install()
