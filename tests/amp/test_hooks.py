from __future__ import annotations

import copy
import io
import pickle
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import amp
from halfstep.amp.hooks import ArgumentsCast
from tests.amp.nets import assert_same, make_batches, make_net, sgd, tensors_of

LEVELS = ("O0", "O1", "O2", "O3")

Pair = namedtuple("Pair", ["x", "note"])


@dataclass(frozen=True)
class Batch:
    x: Tensor
    size: int


def floating_dtypes(state: dict[str, Tensor]) -> set[torch.dtype]:
    return {value.dtype for value in state.values() if value.is_floating_point()}


@pytest.mark.parametrize(
    ("level", "arguments"),
    [
        *((level, {}) for level in LEVELS),
        ("O2", {"master_weights": False}),
        ("O3", {"master_weights": True}),
        ("O3", {"keep_batchnorm_fp32": True}),
        ("O3", {"cast_model_type": torch.bfloat16}),
    ],
)
def test_the_state_dict_is_in_fp32_as_apexs_is(level: str, arguments: dict[str, Any]) -> None:
    model = amp.initialize(make_net(), opt_level=level, **arguments)
    plain = make_net().state_dict()
    state = model.state_dict()
    assert list(state) == list(plain)
    assert floating_dtypes(state) == {torch.float32}
    assert state["norm.num_batches_tracked"].dtype is torch.int64
    stored = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in state.items():
        assert torch.equal(value, stored[name].to(value.dtype))
    for part in ("first", "norm", "last"):  # As a script does that saves a backbone.
        inner = model.get_submodule(part).state_dict()
        assert floating_dtypes(inner) == {torch.float32}
        assert_same([*inner.values()], [value for name, value in state.items() if name.startswith(f"{part}.")])


def test_it_is_in_fp32_for_the_parts_of_a_model_only_where_they_were_passed() -> None:
    outer = nn.Sequential(make_net(), nn.Linear(3, 3).half())
    amp.initialize(outer[0], opt_level="O3")
    assert outer.state_dict()["0.first.weight"].dtype is torch.float32
    assert outer.state_dict(prefix="model.")["model.0.last.bias"].dtype is torch.float32
    assert outer.state_dict()["1.weight"].dtype is torch.float16


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_that_of_copies_and_pickles_as_well(make: Callable[[nn.Module], Any]) -> None:
    model = amp.initialize(make_net(), opt_level="O3")
    other = make(model)
    assert other.first.weight.dtype is torch.float16
    assert_same([*other.state_dict().values()], [*model.state_dict().values()])
    assert floating_dtypes(other.state_dict()) == floating_dtypes(make(other).first.state_dict()) == {torch.float32}


def test_it_loads_into_half_and_into_a_model_without_amp() -> None:
    model = amp.initialize(make_net(), opt_level="O3")
    with torch.no_grad():
        model.first.weight.fill_(0.1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    other = amp.initialize(make_net(seed=1), opt_level="O3")
    weight = other.first.weight
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert other.first.weight is weight
    assert weight.dtype is torch.float16
    assert_same(tensors_of(other), tensors_of(model))
    plain = make_net(seed=2)
    plain.load_state_dict(state)
    assert plain.first.weight[0, 0].item() == torch.tensor(0.1).half().item()


def test_a_module_without_a_parameter_and_with_a_buffer_that_is_not_saved() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)
            self.register_buffer("table", torch.ones(2), persistent=False)

        def get_extra_state(self) -> dict[str, Tensor]:
            return {"note": torch.ones(1, dtype=torch.float16)}

        def set_extra_state(self, state: object) -> None:
            pass

    model = amp.initialize(Odd(), opt_level="O3")
    state = model.state_dict()
    assert set(state) == {"layer.weight", "_extra_state"}
    assert state["_extra_state"]["note"].dtype is torch.float16
    model.load_state_dict(state)


@pytest.mark.parametrize("level", LEVELS)
def test_batches_in_float64_train_as_those_in_fp32(level: str) -> None:
    trained = []
    for dtype in (torch.float32, torch.float64):
        model = make_net()
        model, optimizer = amp.initialize(model, sgd(model), opt_level=level, loss_scale=128.0)
        for x, y in make_batches(2):
            optimizer.zero_grad()
            output = model(x.to(dtype))
            assert output.dtype is torch.float32
            with amp.scale_loss(F.cross_entropy(output, y), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        trained.append(tensors_of(model))
    assert_same(*trained)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, *nests: Any, last: Any) -> list[Tensor]:
        (pair, (one, two)), batch, packed, most = nests
        tensors = [pair.x, one, two, batch.x, packed.data, most.values, last["x"]]
        assert one is two
        assert pair.note == "note"
        assert batch.size == last["n"] == 4
        return [self.layer(tensor) for tensor in tensors]


@pytest.mark.parametrize("level", LEVELS)
def test_float64_in_nests(level: str) -> None:
    model = amp.initialize(Reader(), opt_level=level)
    x = torch.ones(4, 3, dtype=torch.float64)
    given = [(Pair(x, "note"), [x, x]), Batch(x, 4), nn.utils.rnn.pack_sequence([x]), x.unsqueeze(0).max(0)]
    last = {"x": x, "n": 4}
    found = model(*given, last=last)
    assert [tensor.dtype for tensor in found] == [torch.float32] * 7
    assert last["x"] is x  # What was passed stays as it is.
    assert given[0][1][0] is given[1].x is x  # type: ignore[index, attr-defined]
    one = x.float()
    narrow = [(Pair(one, "note"), [one, one]), Batch(one, 4), nn.utils.rnn.pack_sequence([one]), one.unsqueeze(0).max(0)]
    expected = model(*narrow, last={"x": one, "n": 4})
    assert_same(found, expected)


def test_gradients_flow_back_to_inputs_in_float64() -> None:
    model = amp.initialize(make_net(), opt_level="O2")
    x = make_batches(1)[0][0].double().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float64
    assert x.grad.abs().sum() > 0


def test_a_model_in_float64_computes_in_it() -> None:
    for level in ("O0", "O1"):
        model = amp.initialize(make_net().double(), opt_level=level)
        found = model.eval()(torch.ones(2, 6, dtype=torch.float64))
        torch.testing.assert_close(found, make_net().double().eval()(torch.ones(2, 6, dtype=torch.float64)))


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_batches_of_the_users_own_class_are_asked_wherever_they_are(level: str) -> None:
    class Own:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, dtype: torch.dtype) -> Own:
            return Own(self.x.to(dtype))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, own: Own, *, more: list[Own]) -> Tensor:
            result: Tensor = self.layer(own.x) + self.layer(more[0].x)
            return result

    own = Own(torch.ones(2, 3, dtype=torch.float64))
    assert amp.initialize(Sum(), opt_level=level)(own, more=[own]).dtype is torch.float32


def test_copies_of_the_hook_cast_nothing() -> None:
    hook = ArgumentsCast(batches=torch.float16, doubles=True)
    x = torch.ones(1, dtype=torch.float64)
    for other in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert other(nn.Identity(), (x,), {})[0][0] is x
    assert hook(nn.Identity(), (x,), {})[0][0].dtype is torch.float32


def test_what_needs_no_cast_is_passed_on_itself() -> None:
    layer = nn.Linear(1, 1)
    nests = ([torch.ones(1)], {"x": torch.ones(1)}, Pair(torch.ones(1), "note"), Batch(torch.ones(1), 1), layer, Tensor, None)
    args, kwargs = ArgumentsCast(batches=torch.float16, doubles=True)(nn.Identity(), nests, {"last": nests})
    assert all(found is given for found, given in zip(args, nests, strict=True))
    assert kwargs["last"] is nests
    assert layer.weight.dtype is torch.float32  # Its `to` would change it in place.


@pytest.mark.parametrize("level", LEVELS)
def test_models_still_compile_as_a_whole(level: str) -> None:
    torch._dynamo.reset()
    model = amp.initialize(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), opt_level=level)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(2, 4, dtype=dtype)
        assert torch.equal(compiled(x), model(x))
