"""Models of published papers, by name, at the papers' sizes and at laptop sizes.

In: a name. Out: a :class:`ZooModel`, a module whose forward returns a scalar loss, with example inputs.
"""

from __future__ import annotations

# They register models.
from tensoropt.zoo import branching, convolution, decoder, hugging_face, recurrent  # noqa: F401
from tensoropt.zoo.registry import ZooError, ZooModel, build, entry, list_models, read_name, read_options

__all__ = ["ZooError", "ZooModel", "build", "entry", "list_models", "read_name", "read_options"]
