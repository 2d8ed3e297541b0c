"""tf.train.Example as Google's own protobuf library reads and writes it, without TensorFlow.

The library has two parsers: the pure-Python one (`PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python` before the first
import) and a compiled one. The message is described here, so neither needs TensorFlow to be installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError

from tests.oracles.wire import FLOAT_KEYS

_FIELD = descriptor_pb2.FieldDescriptorProto
_LISTS = {
    "bytes_list": ("BytesList", _FIELD.TYPE_BYTES),
    "float_list": ("FloatList", _FIELD.TYPE_FLOAT),
    "int64_list": ("Int64List", _FIELD.TYPE_INT64),
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    """The descriptor: lists in a oneof, in a map by name, in `Features`, in `Example`."""
    file = descriptor_pb2.FileDescriptorProto(name="oracle_example.proto", package="oracle", syntax="proto3")
    for _, (name, kind) in _LISTS.items():
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=_FIELD.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (field, (name, _)) in enumerate(_LISTS.items(), start=1):
        feature.field.add(name=field, number=number, type=_FIELD.TYPE_MESSAGE, type_name=f".oracle.{name}", oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_FIELD.TYPE_STRING)
    entry.field.add(name="value", number=2, type=_FIELD.TYPE_MESSAGE, type_name=".oracle.Feature")
    repeated = {"type": _FIELD.TYPE_MESSAGE, "label": _FIELD.LABEL_REPEATED}
    features.field.add(name="feature", number=1, type_name=".oracle.Features.FeatureEntry", **repeated)
    example = file.message_type.add(name="Example")
    example.field.add(name="features", number=1, type=_FIELD.TYPE_MESSAGE, type_name=".oracle.Features")
    return file


def _message_class() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("oracle.Example"))


_EXAMPLE = _message_class()
IMPLEMENTATION = api_implementation.Type()
"""`python`, or the compiled parser that is used: `upb` or `cpp`."""


def parse(payload: bytes) -> dict[str, tuple[str, list]] | None:
    """Kind and values of each feature (kind "" for an empty one), or None where the library refuses the bytes."""
    try:
        features = _EXAMPLE.FromString(payload).features.feature
    except (DecodeError, UnicodeDecodeError):  # the pure-Python parser lets the latter through
        return None
    found = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind") or ""
        found[name] = (kind, list(getattr(feature, kind).value) if kind else [])
    return found


def serialize(features: Mapping[str, Sequence[float]]) -> bytes:
    """The deterministic serialisation of features: lists of floats, or of integers."""
    message = _EXAMPLE()
    for name, values in features.items():
        feature = message.features.feature[name]
        is_float = name in FLOAT_KEYS or any(isinstance(value, float) for value in values)
        (feature.float_list if is_float else feature.int64_list).value.extend(values)
    return message.SerializeToString(deterministic=True)
