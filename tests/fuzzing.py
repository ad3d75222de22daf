"""How fuzz tests draw their examples: few and always the same in `make test`, many and new ones in `make fuzz`."""

from __future__ import annotations

import os
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import settings
from hypothesis import strategies as st

# How many times more examples than in `make test`.
_FACTOR = int(os.environ.get("GLM_FUZZ_FACTOR", "1"))

_EDGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def fuzz(examples: int) -> settings:
    """Settings for `examples` examples a run of `make test`."""
    return settings(max_examples=examples * _FACTOR, deadline=None, derandomize=_FACTOR == 1)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    """A message of that type: any subset of its fields, with plain values and the extremes of their types."""
    message = message_factory.GetMessageClass(descriptor)()
    fields = list(descriptor.fields)
    for number in draw(st.lists(st.integers(0, len(fields) - 1), unique=True, max_size=8)) if fields else ():
        field = fields[number]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key_field, value = field.message_type.fields
            for key in draw(st.lists(_values(key_field), max_size=4)):
                getattr(message, field.name)[key] = draw(_values(value))
        elif field.is_repeated:
            items = draw(st.lists(_values(field), max_size=6))
            getattr(message, field.name).extend(items)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(_values(field)))
        else:
            setattr(message, field.name, draw(_values(field)))
    return message


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that were right before some of them were replaced."""
    data = draw(whole)
    at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 8))
    return data[:at] + draw(st.binary(max_size=8)) + data[at + length :]


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if field.message_type is not None:
        return messages(field.message_type)
    if field.enum_type is not None:
        return st.integers(-1, len(field.enum_type.values) + 1)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.sampled_from([0.0, 0.5, 1.0]) | st.floats(width=32)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return st.text(max_size=20)
    low, high = _EDGES[kind]
    return st.integers(0, 20) | st.sampled_from([low, high]) | st.integers(low, high)
