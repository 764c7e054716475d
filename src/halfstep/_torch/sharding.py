"""What halfstep uses of torch for tensors that are spread over ranks: the index of their checkpoints, and gradients that are held back."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, final

import torch

__all__ = ["SavedExtent", "SavedIndex", "SavedShape", "held_gradients", "hold_gradients", "read_saved_index"]

Offsets = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedShape:
    """A tensor of a distributed checkpoint: its type, its whole shape, and the boxes that it was cut into, each as offsets and sizes."""

    dtype: torch.dtype
    size: Offsets
    chunks: tuple[tuple[Offsets, Offsets], ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedExtent:
    """Where a box of a tensor of a distributed checkpoint lies: in which file, and from which byte on how many."""

    file: str
    offset: int
    length: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedIndex:
    """What the index of a distributed checkpoint says: the tensors by name, and the place of each box by name and offsets."""

    shapes: dict[str, SavedShape]
    extents: dict[tuple[str, Offsets], SavedExtent]


class _Part:
    """Stands for an object in an index, so that none of torch's classes is made, called or changed by what stands in a file."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Size(tuple[Any, ...]):
    """Stands for `torch.Size`."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:  # Without it, pickle would set attributes of this very class where it is told to.
        raise pickle.UnpicklingError("it gives a size a state")


_METADATA = "torch.distributed.checkpoint.metadata"

# The classes and functions that the index of a checkpoint of tensors names, by what stands for them.
_KINDS = {
    (_METADATA, "Metadata"): type("Metadata", (_Part,), {"__slots__": ()}),
    (_METADATA, "TensorStorageMetadata"): type("TensorStorageMetadata", (_Part,), {"__slots__": ()}),
    (_METADATA, "TensorProperties"): type("TensorProperties", (_Part,), {"__slots__": ()}),
    (_METADATA, "ChunkStorageMetadata"): type("ChunkStorageMetadata", (_Part,), {"__slots__": ()}),
    (_METADATA, "MetadataIndex"): type("MetadataIndex", (_Part,), {"__slots__": ()}),
    (_METADATA, "StorageMeta"): type("StorageMeta", (_Part,), {"__slots__": ()}),
    (_METADATA, "_MEM_FORMAT_ENCODING"): type("MemoryFormat", (_Part,), {"__slots__": ()}),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("StorageInfo", (_Part,), {"__slots__": ()}),
    ("torch.serialization", "_get_layout"): type("Layout", (_Part,), {"__slots__": ()}),
    ("torch", "Size"): _Size,
}

# By what `vars` holds: `getattr` could import a part of torch on demand.
_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

# Those that pickle writes an index with. Others could take up memory at will: LONG_BINPUT and BYTEARRAY8 allocate what a number says.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET, pickle.STACK_GLOBAL, pickle.MARK, pickle.STOP),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)


class _Unpickler(pickle._Unpickler):
    """Reads an index, and nothing but an index.

    Private: `pickle._Unpickler`, Python's own in Python, because the one in C knows no way to refuse an opcode. Seen on Python 3.11.
    """

    dispatch: ClassVar = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a class or function of torch, or a type of tensors."""
        found: Any = _KINDS.get((module, name)) or _DTYPES.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs")
        return found


def read_saved_index(data: bytes) -> SavedIndex:
    """Reads the index of a distributed checkpoint that holds only tensors, without making an object of torch's or calling anything.

    Private: the pickle in `.metadata` names `torch.distributed.checkpoint.filesystem._StorageInfo`, `_MEM_FORMAT_ENCODING` of the module
    `metadata` there, and `torch.serialization._get_layout`, and holds the fields of those classes. torch itself reads it with
    `pickle.load`, which calls whatever the file names. Seen on torch 2.13.

    Args:
        data: What is in the file.

    Raises:
        ValueError: It is no such index; the message says what is wrong.
    """
    try:
        whole = _Unpickler(io.BytesIO(data)).load()
        fields = _fields(whole, "Metadata", {"state_dict_metadata", "storage_data"})
        shapes = {_text(name): _shape(value) for name, value in _items(fields["state_dict_metadata"])}
        extents: dict[tuple[str, Offsets], SavedExtent] = {}
        for key, extent in map(_extent, _items(fields["storage_data"])):
            if extents.setdefault(key, extent) is not extent:
                raise ValueError(f"it has two places for one part of {key[0]}")
    except (ValueError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(str(error) or "it ends too early") from error
    except Exception as error:  # A pickle that was damaged fails in as many ways as there are opcodes.
        raise ValueError(f"it is no index of tensors ({type(error).__name__}: {error})") from error
    return SavedIndex(shapes=shapes, extents=extents)


def _shape(value: Any) -> SavedShape:
    fields = _fields(value, "TensorStorageMetadata", {"properties", "size", "chunks"})
    dtype, layout, *_ = _state(fields["properties"], "TensorProperties", tuple)
    if not isinstance(dtype, torch.dtype):
        _refuse(dtype)
    if not isinstance(layout, _Part) or layout.args != ("torch.strided",):
        _refuse(layout)
    if type(fields["chunks"]) is not list:
        _refuse(fields["chunks"])
    return SavedShape(dtype=dtype, size=_numbers(fields["size"]), chunks=tuple(map(_chunk, fields["chunks"])))


def _chunk(value: Any) -> tuple[Offsets, Offsets]:
    fields = _fields(value, "ChunkStorageMetadata", {"offsets", "sizes"})
    return _numbers(fields["offsets"]), _numbers(fields["sizes"])


def _extent(item: tuple[Any, Any]) -> tuple[tuple[str, Offsets], SavedExtent]:
    key = _fields(item[0], "MetadataIndex", {"fqn", "offset"})
    place = _fields(item[1], "StorageInfo", {"relative_path", "offset", "length"})
    if "transform_descriptors" in place:
        raise ValueError("its files were transformed by an extension, such as compression")
    extent = SavedExtent(file=_text(place["relative_path"]), offset=_number(place["offset"]), length=_number(place["length"]))
    return (_text(key["fqn"]), _numbers(key["offset"])), extent


def _fields(value: Any, kind: str, names: set[str]) -> dict[str, Any]:
    state: dict[str, Any] = _state(value, kind, dict)
    missing = names - state.keys()
    if missing:
        raise ValueError(f"{kind} has no {', '.join(sorted(missing))}")
    return state


def _state(value: Any, kind: str, form: type) -> Any:
    if not isinstance(value, _Part) or type(value).__name__ != kind or type(value.state) is not form:
        _refuse(value)
    return value.state


def _items(value: Any) -> Any:
    if type(value) is not dict:
        _refuse(value)
    return value.items()


def _text(value: Any) -> str:
    if type(value) is not str:
        _refuse(value)
    return value


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        _refuse(value)
    return value


def _numbers(value: Any) -> Offsets:
    if type(value) is not _Size:
        _refuse(value)
    return tuple(map(_number, value))


def _refuse(value: Any) -> NoReturn:
    raise ValueError(f"there is a {type(value).__name__} where none can be")


def held_gradients(module: Any) -> dict[str, torch.Tensor]:
    """The gradients that `fully_shard` holds back in a module and those inside of it, by the names of their parameters.

    Each is that of the whole parameter, as this rank computed it: not a copy, and not reduced.

    Private: of what `_sharded_parameters` finds, the two places where gradients accumulate, `unsharded_accumulated_grad` (in the type in
    which they are reduced) and `_unsharded_param.grad` (where that is the type in which they are computed). Seen on torch 2.13.

    Raises:
        ValueError: One is a DTensor with other placements than its parameter's; the message is its name.
    """
    found = {}
    for name, parameter in _sharded_parameters(module):
        gradient = parameter.unsharded_accumulated_grad
        if gradient is None:
            gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
        if gradient is not None:
            found[name] = _local(gradient, parameter, name=name)
    return found


def hold_gradients(module: Any, gradients: Mapping[str, torch.Tensor]) -> None:
    """Has `fully_shard` hold gradients back as if earlier backward passes had left them; the next one that reduces adds its own.

    A collective operation where a part of the module has never run: its parameters are gathered once, because torch makes the places for
    their gradients only there.

    Private: of what `_sharded_parameters` finds, the places named in `held_gradients`, `_orig_size`, `reduce_dtype` and
    `_unsharded_dtensor_spec`; and `_is_root` and `_lazy_init` of `FSDPModule._get_fsdp_state`, because torch reduces nothing in a module
    that it does not know to be the outermost, and learns that only when it runs. Seen on torch 2.13.

    Args:
        module: The module; nothing is held back in it now.
        gradients: What `held_gradients` found in the same module; copied. They may lie on another device.

    Raises:
        ValueError: One belongs to no such parameter of the module, or has another shape; the message says which.
    """
    shapes = {name: parameter._orig_size for name, parameter in _sharded_parameters(module)}
    for name, gradient in gradients.items():
        if name not in shapes:
            raise ValueError(f"it has no parameter {name} that fully_shard spreads")
        if gradient.shape != shapes[name]:
            raise ValueError(f"that of {name} has the shape {list(gradient.shape)}, and here it has {list(shapes[name])}")
    for outermost in _outermost(module):
        if outermost._get_fsdp_state()._is_root is None:
            outermost._get_fsdp_state()._lazy_init()
    for sharded, parameters in _by_module(module):
        if not all(hasattr(parameter, "_unsharded_param") for parameter in parameters):
            sharded.unshard()
            sharded.reshard()
    for name, parameter in _sharded_parameters(module):
        if name in gradients:
            _hold(gradients[name], parameter)


def _hold(gradient: torch.Tensor, parameter: Any) -> None:
    """Puts a gradient where torch would have left it.

    Private: of torch's `FSDPParam` what `hold_gradients` names.
    """
    whole = parameter._unsharded_param
    dtype = parameter.reduce_dtype or whole.dtype
    copied = gradient.detach().to(device=whole.device, dtype=dtype, copy=True)
    spec = parameter._unsharded_dtensor_spec
    if spec is not None:
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import, and loaded where there is one

        copied = DTensor.from_local(copied, spec.mesh, spec.placements, run_check=False, shape=whole.shape, stride=whole.stride())
    if dtype is whole.dtype:
        whole.grad = copied
    else:
        parameter.unsharded_accumulated_grad = copied


def _local(gradient: Any, parameter: Any, *, name: str) -> torch.Tensor:
    """The part of a gradient that lies on this rank.

    Private: `_unsharded_dtensor_spec` of torch's `FSDPParam`, which says how a parameter is spread beside `fully_shard`.
    """
    spec = parameter._unsharded_dtensor_spec
    if spec is not None and gradient.placements != spec.placements:
        raise ValueError(name)
    local: torch.Tensor = gradient if spec is None else gradient.to_local()
    return local


def _sharded_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """What `fully_shard` keeps about each parameter of a module and those inside of it, by its name in the module.

    Private: `_module_info` of torch's `FSDPParam`: the module and the name under which it puts the parameter. Seen on torch 2.13.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for _, parameters in _by_module(module):
        for parameter in parameters:
            own = getattr(parameter._module_info.module, parameter._module_info.param_name)
            yield names[id(own)], parameter


def _by_module(module: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Each `fully_shard` module in a module, with what torch keeps about its parameters; several that share that count as one.

    Private: `FSDPModule._get_fsdp_state`, and of that state `_fsdp_param_groups`, one `_fsdp_param_group` before torch 2.13. Seen on torch
    2.13.
    """
    seen = set()
    for each in module.modules():
        state = each._get_fsdp_state() if hasattr(each, "_get_fsdp_state") else None
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            yield each, [parameter for group in groups for parameter in getattr(group, "fsdp_params", ())]


def _outermost(module: Any) -> Iterator[Any]:
    """The `fully_shard` modules in a module that lie in no other.

    Private: `FSDPModule._get_fsdp_state`.
    """
    inside: set[int] = set()
    for each in module.modules():
        if id(each) not in inside and hasattr(each, "_get_fsdp_state"):
            inside.update(map(id, each.modules()))
            yield each
