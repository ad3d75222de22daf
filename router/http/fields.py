"""What requests of both APIs are made of."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError

UInt32: TypeAlias = Annotated[int, Field(ge=0, le=2**32 - 1)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=2**32 - 1)]
Int32: TypeAlias = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Schema: TypeAlias = dict[str, Any]
# What a client may send and no answer depends on.
Ignored: TypeAlias = Any


class Strict(BaseModel):
    """JSON as it is meant: no other types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


def set_given(message: inference_pb2.SamplingOptions, **values: float | None) -> None:
    """Set those fields of `message` that have a value."""
    for name, value in values.items():
        if value is not None:
            setattr(message, name, value)


def json_text(field: str, value: Any) -> str:
    """`value` as JSON. Raises InvalidArgumentError: it has a number that JSON has not."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidArgumentError(field, "has NaN or an infinity, which JSON has not") from None
