"""Strategies -> what a rank computes.

In: a strategy, the model's values, this rank's place in the job. Out: an
:class:`~tensoropt.engine.engine.Engine` that runs steps, and a
:class:`~tensoropt.engine.parallel_model.ParallelModel` that connects a user's model to it.
"""
