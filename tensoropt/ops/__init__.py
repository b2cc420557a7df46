"""The properties of operators: an :class:`~tensoropt.ops.spec.OpSpec` for each, in one registry."""
