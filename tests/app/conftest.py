"""The dashboard under its installed name, from this checkout."""

import sys
import tempfile
from pathlib import Path

import pytest

APP = Path(__file__).resolve().parents[2] / "app"

# `tensoropt_app` may not be installed, or from another checkout. A folder with a link of that name comes
# first on the path, which processes that are spawned inherit.
_folder = tempfile.TemporaryDirectory(prefix="tensoropt-app-")
(Path(_folder.name) / "tensoropt_app").symlink_to(APP)
sys.path.insert(0, _folder.name)

pytest.register_assert_rewrite("samples_app")
sys.path.insert(1, str(Path(__file__).parent / "support"))
