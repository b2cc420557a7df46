"""The definitions of operators that the ONNX standard defines in terms of others."""

from __future__ import annotations

import onnx


def standard_function(
    node: onnx.NodeProto, domain: str, opset: int, graph: onnx.GraphProto
) -> onnx.FunctionProto | None:
    """The definition of a node's operator with the node's attributes substituted; None if it has none.

    A definition that depends on the operands' types is not used here, because those operators have
    converters.
    """
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
    if not schema.has_function:  # type: ignore[attr-defined]
        return None
    body = onnx.FunctionProto()
    body.CopyFrom(schema.function_body)
    given = {a.name: a for a in node.attribute}
    defaults = {name: a.default_value for name, a in schema.attributes.items()}
    for inner in body.node:
        _bind(inner, given, defaults)
    return body


def _bind(
    node: onnx.NodeProto, given: dict[str, onnx.AttributeProto], defaults: dict[str, onnx.AttributeProto]
) -> None:
    """Replace references to the function's attributes with their values; drop those without a value."""
    kept = []
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            for inner in attribute.g.node:
                _bind(inner, given, defaults)
            kept.append(attribute)
            continue
        value = given.get(attribute.ref_attr_name) or defaults.get(attribute.ref_attr_name)
        if value is None or value.type == onnx.AttributeProto.UNDEFINED:
            continue
        bound = onnx.AttributeProto()
        bound.CopyFrom(value)
        bound.name = attribute.name
        kept.append(bound)
    values = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in kept]
    del node.attribute[:]
    node.attribute.extend(values)
