"""A block of layers is traced twice, however often the model repeats it.

An export takes some milliseconds for each call of the model's code, of each of a hundred equal layers anew.
Here the model's own code runs as ever, except inside a module whose like was traced before under like calls:
there one opaque operator stands for all of it (``tracing.py``). Once the program is functional and
decomposed, the traced block's nodes are written out in its place, with the parameters of the module that was
called (``writing_out.py``).

Two modules are alike when their trees of submodules, the classes, the shapes of parameters and buffers and
what else they hold are the same (``likeness.py``). Numbers, flags and names may differ (a layer's index) as
long as the traced block did not read them. What the trace of one block cannot stand for is found and ends the
attempt, so that those modules are traced one by one: a block that sets attributes, changes its inputs or
buffers, hands out views of its inputs, reads tensors that it was not given, or has tensors inside that are
read outside. The first two of alike calls are traced both and have to compute the same, which shows what is
counted elsewhere (in a global). The graph is the same either way, only sooner; where a block is given a
tensor that was changed in place before, views of it may come earlier among the operators.
"""

from tensoropt.capture.blocks.likeness import Likeness
from tensoropt.capture.blocks.tracing import Blocks, Unlike
from tensoropt.capture.blocks.writing_out import write_out

__all__ = ["Blocks", "Likeness", "Unlike", "write_out"]
