"""The private names of torch that checkpoints of spread tensors stand on: each test fails loudly when a new torch changes one."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this build of torch has no torch.distributed", allow_module_level=True)

from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from halfstep._torch import SavedExtent, held_gradients, hold_gradients, read_saved_index
from halfstep._torch.sharding import _DTYPES, _KINDS


def index_of(tensors: dict[str, torch.Tensor], folder: Path) -> bytes:
    """The index that torch itself writes for tensors, but for the path in it."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with pytest.warns(UserWarning, match="single process"):
        save(tensors, storage_writer=filesystem.FileSystemWriter(folder), planner=planner, no_dist=True)
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.storage_meta.checkpoint_id = None
    return pickle.dumps(index)


class TestIndex:
    def test_what_stands_for_something_of_torch_has_a_counterpart(self) -> None:
        for module, name in _KINDS:
            owner: Any = {"torch": torch, "torch.serialization": torch.serialization, metadata.__name__: metadata}.get(module, filesystem)
            assert owner.__name__ == module
            assert hasattr(owner, name)

    def test_the_fields_that_are_read_are_there(self) -> None:
        def names(kind: Any) -> set[str]:
            return {field.name for field in fields(kind)}

        assert names(metadata.Metadata) >= {"state_dict_metadata", "storage_data"}
        assert names(metadata.TensorStorageMetadata) >= {"properties", "size", "chunks"}
        assert names(metadata.ChunkStorageMetadata) >= {"offsets", "sizes"}
        assert names(metadata.MetadataIndex) >= {"fqn", "offset"}
        assert names(filesystem._StorageInfo) == {"relative_path", "offset", "length", "transform_descriptors"}

    @pytest.mark.parametrize("dtype", sorted(_DTYPES.values(), key=str), ids=str)
    def test_every_type_of_tensor_is_understood(self, dtype: torch.dtype) -> None:
        properties = metadata.TensorProperties(dtype=dtype)
        size = torch.Size([2])
        tensor = metadata.TensorStorageMetadata(properties, size, [metadata.ChunkStorageMetadata(torch.Size([0]), size)])
        place = {metadata.MetadataIndex("x", [0]): filesystem._StorageInfo("__0_0.distcp", 1 << 40, 3)}
        found = read_saved_index(pickle.dumps(metadata.Metadata({"x": tensor}, storage_data=place)))
        assert found.shapes["x"].dtype is dtype
        assert found.extents == {("x", (0,)): SavedExtent(file="__0_0.distcp", offset=1 << 40, length=3)}

    @pytest.mark.parametrize("protocol", range(4, pickle.HIGHEST_PROTOCOL + 1))
    def test_what_torch_writes_is_read(self, protocol: int, tmp_path: Path) -> None:
        tensors = {"x": torch.ones(2, 3), "y": torch.tensor(1), "z": torch.zeros(0, dtype=torch.bfloat16)}
        data = pickle.dumps(pickle.loads(index_of(tensors, tmp_path)), protocol=protocol)
        found = read_saved_index(data)
        assert {name: (shape.dtype, torch.Size(shape.size)) for name, shape in found.shapes.items()} == {
            name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()
        }
        assert found.shapes["x"].chunks == (((0, 0), (2, 3)),)
        end = 0
        for name, dimensions in {"x": 2, "y": 0, "z": 1}.items():
            extent = found.extents[name, (0,) * dimensions]
            assert (extent.file, extent.offset) == ("__0_0.distcp", end)
            end = extent.offset + extent.length
        assert end == (tmp_path / "__0_0.distcp").stat().st_size

    @pytest.mark.parametrize("count", [300, 70_000])
    def test_large_ones_are_read(self, count: int) -> None:
        """Whose pickles have other opcodes for the places in their memo."""
        size = torch.Size([1])
        tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(), size, [metadata.ChunkStorageMetadata(size, size)])
        names = [f"name {number}" for number in range(count)]
        places = {
            metadata.MetadataIndex(name, [1]): filesystem._StorageInfo("__0_0.distcp", number, 1) for number, name in enumerate(names)
        }
        found = read_saved_index(pickle.dumps(metadata.Metadata(dict.fromkeys(names, tensor), storage_data=places)))
        assert list(found.shapes) == names
        assert found.extents[names[-1], (1,)].offset == count - 1

    @pytest.mark.parametrize(
        ("data", "text"),
        [
            (b"", "it ends too early"),
            (b"\x80\x04", "it ends too early"),
            (b"\x80\x63.", "unsupported pickle protocol: 99"),
            (b"\x80\x04N.", "there is a NoneType where none can be"),
            (b"\x80\x04\x94.", r"it is no index of tensors \(IndexError: list index out of range\)"),
        ],
    )
    def test_other_data_are_told(self, data: bytes, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            read_saved_index(data)

    @pytest.mark.parametrize(
        ("part", "text"),
        [
            ({"state_dict_metadata": {"x": metadata.BytesStorageMetadata()}}, "it names .*BytesStorageMetadata, which no index of tensors"),
            ({"state_dict_metadata": {"x": 1}}, "there is a int where none can be"),
            ({"state_dict_metadata": {1: 1}}, "there is a int where none can be"),
            ({"state_dict_metadata": [1]}, "there is a list where none can be"),
            ({"storage_data": None}, "there is a NoneType where none can be"),
            ({"storage_data": {"x": 1}}, "there is a str where none can be"),
        ],
    )
    def test_other_contents_are_told(self, part: dict[str, Any], text: str) -> None:
        index = metadata.Metadata(**{"state_dict_metadata": {}, "storage_data": {}, **part})
        with pytest.raises(ValueError, match=text):
            read_saved_index(pickle.dumps(index))

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"dtype": torch.strided}, "there is a Layout where none can be"),
            ({"layout": torch.sparse_coo}, "there is a Layout where none can be"),
            ({"layout": torch.float32}, "there is a dtype where none can be"),
        ],
    )
    def test_other_tensors_are_told(self, change: dict[str, Any], text: str) -> None:
        tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(**change), torch.Size([1]), [])
        with pytest.raises(ValueError, match=text):
            read_saved_index(pickle.dumps(metadata.Metadata({"x": tensor}, storage_data={})))

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"size": (1,)}, "there is a tuple where none can be"),
            ({"size": torch.Size([-1])}, "there is a int where none can be"),
            ({"size": torch.Size([1]), "chunks": ()}, "there is a tuple where none can be"),
            ({"size": torch.Size([1]), "properties": None}, "there is a NoneType where none can be"),
        ],
    )
    def test_other_shapes_are_told(self, change: dict[str, Any], text: str) -> None:
        tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([1]), [])
        vars(tensor).update(change)
        with pytest.raises(ValueError, match=text):
            read_saved_index(pickle.dumps(metadata.Metadata({"x": tensor}, storage_data={})))

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"relative_path": 1}, "there is a int where none can be"),
            ({"offset": True}, "there is a bool where none can be"),
            ({"offset": -1}, "there is a int where none can be"),
            ({"length": 1.5}, r"it is no index of tensors \(KeyError: 71\)"),
            ({"length": None}, "StorageInfo has no length"),
            ({"transform_descriptors": ["zstd"]}, "its files were transformed by an extension, such as compression"),
        ],
    )
    def test_other_places_are_told(self, change: dict[str, Any], text: str) -> None:
        place = filesystem._StorageInfo("__0_0.distcp", 0, 1)
        vars(place).update(change)
        with pytest.raises(ValueError, match=text):
            read_saved_index(pickle.dumps(metadata.Metadata({}, storage_data={metadata.MetadataIndex("x", [0]): place})))

    def test_a_part_in_two_places_is_told(self) -> None:
        one, other = metadata.MetadataIndex("x", [0]), metadata.MetadataIndex("y", [0])
        places = {one: filesystem._StorageInfo("__0_0.distcp", 0, 1), other: filesystem._StorageInfo("__0_0.distcp", 1, 1)}
        data = pickle.dumps(metadata.Metadata({}, storage_data=places))
        with pytest.raises(ValueError, match="it has two places for one part of x"):
            read_saved_index(data.replace(b"\x8c\x01y", b"\x8c\x01x"))


class TestHeldGradients:
    """That a run goes on from them bit for bit is tested on several ranks, in tests/distributed/test_held_back.py."""

    @pytest.fixture(autouse=True)
    def alone(self, tmp_path: Path) -> Any:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    def model(self, reduce_dtype: torch.dtype | None = None) -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
        fully_shard(net, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        net.set_requires_gradient_sync(False)  # type: ignore[operator]
        return net

    def kept(self, net: Any) -> Any:
        state = net._get_fsdp_state()
        (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        (parameter,) = group.fsdp_params
        return parameter

    def test_the_names_are_there(self) -> None:
        assert callable(FSDPModule._get_fsdp_state)
        net = self.model()
        parameter = self.kept(net)
        assert (parameter._module_info.module, parameter._module_info.param_name) == (net[0], "weight")
        assert parameter._orig_size == (1, 2)
        assert parameter._unsharded_dtensor_spec is None
        assert parameter.unsharded_accumulated_grad is None
        assert not hasattr(parameter, "_unsharded_param")
        assert net._get_fsdp_state()._is_root is None
        net(torch.ones(1, 2))
        assert net._get_fsdp_state()._is_root is True
        assert parameter.reduce_dtype is None
        assert parameter._unsharded_param.grad is None

    @pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
    def test_they_are_where_they_are_looked_for(self, reduce_dtype: torch.dtype | None) -> None:
        net = self.model(reduce_dtype)
        assert held_gradients(net) == {}
        net(torch.tensor([[3.0, 4.0]])).sum().backward()
        (found,) = held_gradients(net).values()
        assert found.tolist() == [[3, 4]]
        parameter = self.kept(net)
        assert (parameter.unsharded_accumulated_grad is found) == (reduce_dtype is not None)
        assert (parameter._unsharded_param.grad is found) == (reduce_dtype is None)
        fresh = self.model(reduce_dtype)
        hold_gradients(fresh, held_gradients(net))
        other = self.kept(fresh)
        assert (other.unsharded_accumulated_grad is None) == (reduce_dtype is None)
        assert (other._unsharded_param.grad is None) == (reduce_dtype is not None)
        assert torch.equal(held_gradients(fresh)["0.weight"], found)
        assert all(parameter.to_local().untyped_storage().nbytes() for parameter in fresh.parameters()), "sharded again"
        assert fresh._get_fsdp_state()._is_root is True
