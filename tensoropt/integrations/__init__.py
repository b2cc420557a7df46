"""Plans in the training loops of other libraries: one module for each library, imported only when it is used.

In: a model and a plan. Out: the library's own trainer, running the model by the plan.
"""
