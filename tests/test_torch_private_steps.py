"""The private names of torch that replays and diagnoses stand on: each test fails loudly when a new torch changes one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.optim.optimizer as module
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep._torch import foreach_magnitudes, found_infs, has_found_infs, record_found_inf, without_step_hooks


def trained() -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


def tables(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        module._global_optimizer_pre_hooks,
        module._global_optimizer_post_hooks,
    ]


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """The calls of hooks of all optimizers."""
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all after")),
    ]
    yield seen
    for handle in handles:
        handle.remove()


class TestStepHooks:
    def test_the_tables_of_hooks_are_where_they_are_looked_for(self) -> None:
        optimizer = trained()
        for table in tables(optimizer):
            assert isinstance(table, OrderedDict)
            assert dict(table) == {}

        def hook(*_: Any) -> None: ...

        handles = [
            optimizer.register_step_pre_hook(hook),
            optimizer.register_step_post_hook(hook),
            register_optimizer_step_pre_hook(hook),
            register_optimizer_step_post_hook(hook),
        ]
        try:
            assert [list(table.values()) for table in tables(optimizer)] == [[hook]] * 4, "each is registered in a table of its own"
        finally:
            for handle in handles:
                handle.remove()
        assert [len(table) for table in tables(optimizer)] == [0] * 4

    def test_none_is_called_within_and_all_are_afterwards(self, calls: list[str]) -> None:
        optimizer, other = trained(), trained()
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        with without_step_hooks(optimizer):
            optimizer.step()
            other.step()
        assert calls == []
        optimizer.step()
        assert sorted(calls) == ["after", "all after", "all before", "before"]

    def test_they_are_there_again_in_their_order_after_an_exception(self, calls: list[str]) -> None:
        def fail(optimizer: torch.optim.Optimizer) -> None:
            with without_step_hooks(optimizer):
                raise ValueError("stop")

        optimizer = trained()
        for name in "abc":
            optimizer.register_step_pre_hook(lambda *_, name=name: calls.append(name))
        before = [list(table.items()) for table in tables(optimizer)]
        objects = [id(table) for table in tables(optimizer)]
        with pytest.raises(ValueError, match="stop"):
            fail(optimizer)
        assert [list(table.items()) for table in tables(optimizer)] == before
        assert [id(table) for table in tables(optimizer)] == objects
        optimizer.step()
        assert [each for each in calls if each in "abc"] == ["a", "b", "c"]

    def test_a_hook_may_still_be_removed_by_its_handle(self, calls: list[str]) -> None:
        optimizer = trained()
        handle = optimizer.register_step_post_hook(lambda *_: calls.append("mine"))
        with without_step_hooks(optimizer):
            optimizer.step()
        handle.remove()
        optimizer.step()
        assert "mine" not in calls


class TestFoundInfs:
    def scaler(self) -> torch.amp.GradScaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        return scaler

    def test_the_table_is_where_it_is_looked_for(self) -> None:
        scaler = self.scaler()
        state = scaler._per_optimizer_states[0]
        assert set(state) == {"stage", "found_inf_per_device"}
        assert state["found_inf_per_device"] == {}

    @pytest.mark.parametrize(("gradient", "found"), [(1.0, 0.0), (torch.inf, 1.0), (torch.nan, 1.0)])
    def test_it_holds_what_the_scaler_finds_until_its_next_update(self, gradient: float, found: float) -> None:
        scaler, optimizer = self.scaler(), trained()
        assert found_infs(scaler) == []
        optimizer.param_groups[0]["params"][0].grad.fill_(gradient)
        scaler.unscale_(optimizer)
        assert [each.item() for each in found_infs(scaler)] == [found]
        assert has_found_infs(scaler)
        scaler.step(optimizer)
        assert [each.item() for each in found_infs(scaler)] == [found]
        scaler.update()
        assert found_infs(scaler) == []
        assert scaler.get_scale() == (4.0 if found else 8.0)

    def test_there_is_one_for_each_optimizer_or_owner(self) -> None:
        scaler, optimizers = self.scaler(), [trained(), trained()]
        optimizers[1].param_groups[0]["params"][0].grad.fill_(torch.inf)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        record_found_inf(scaler, object(), torch.ones(()))
        assert [each.item() for each in found_infs(scaler)] == [0.0, 1.0, 1.0]


class TestMagnitudes:
    def test_they_are_the_largest_of_each_tensor(self) -> None:
        found = foreach_magnitudes([torch.tensor([3.0, -4.0]), torch.tensor(-2.0), torch.tensor([6e4, -6e4]).half()])
        assert [each.item() for each in found] == [4.0, 2.0, 6e4]
        assert [each.dim() for each in found] == [0, 0, 0]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    @pytest.mark.parametrize("place", [0, 3, 66])
    def test_what_is_not_finite_shows(self, value: float, dtype: torch.dtype, place: int) -> None:
        tensor = torch.ones(67, dtype=dtype)
        tensor[place] = value
        (found,) = foreach_magnitudes([tensor])
        assert not bool(found.isfinite())
