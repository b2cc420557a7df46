"""The models of the papers, by name, at the papers' sizes and at laptop sizes.

In: a name. Out: a :class:`ZooModel`, a module whose forward returns a scalar loss, with example inputs.
"""

from __future__ import annotations

# They register models.
from tensoropt.zoo import branching, convolution, decoder, hugging_face, recurrent  # noqa: F401
from tensoropt.zoo.registry import ZooError as ZooError
from tensoropt.zoo.registry import ZooModel as ZooModel
from tensoropt.zoo.registry import build as build
from tensoropt.zoo.registry import entry as entry
from tensoropt.zoo.registry import list_models as list_models
from tensoropt.zoo.registry import read_name as read_name
from tensoropt.zoo.registry import read_options as read_options
