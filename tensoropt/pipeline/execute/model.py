"""A user's model run by a pipelined plan (being written)."""

from tensoropt.engine.parallel_model import ParallelModel
class PipelinedModel(ParallelModel):
    pass
