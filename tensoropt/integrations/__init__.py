"""Plans in other libraries' training loops: one module per library, imported on use.

In: a model and a plan. Out: the library's own trainer, with the model parallelized as the plan says.
"""
