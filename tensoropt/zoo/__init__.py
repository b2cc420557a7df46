"""The models of the papers, by name, at the papers' sizes and at laptop sizes.

In: a name. Out: a :class:`ZooModel`, a module whose forward returns a scalar loss, with example inputs.
"""

from __future__ import annotations

from tensoropt.errors import MissingExtraError
from tensoropt.zoo import (  # noqa: F401 - they register models
    branching,
    convolution,
    decoder,
    hugging_face,
    recurrent,
)
from tensoropt.zoo.registry import (
    ZooEntry,
    ZooError,
    ZooModel,
    build,
    entry,
    list_models,
    read_name,
    read_options,
    register,
)

__all__ = [
    "MissingExtraError",
    "ZooEntry",
    "ZooError",
    "ZooModel",
    "build",
    "entry",
    "list_models",
    "read_name",
    "read_options",
    "register",
]
