"""The properties of operators: an :class:`~tensoropt.ops.calls.OpSpec` for each, in one registry."""
