"""The text example: its network, its data and the promise that the seed decides everything."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from halfstep.task import Task, load_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "char_transformer.py"


@pytest.fixture(scope="module")
def factory() -> Callable[[int], Task]:
    return load_task(f"{EXAMPLE}:task")


@pytest.fixture
def module(factory: Callable[[int], Task]) -> ModuleType:
    return sys.modules[factory.__module__]


def first_batch(task: Task) -> tuple[Tensor, Tensor]:
    characters, following = next(iter(task.batches))
    return characters, following


def few(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    characters, following = batch
    return characters[:2], following[:2]


def test_the_text_is_the_whole_of_pythons_help_topics(module: ModuleType) -> None:
    assert len(module.TEXT) > 100_000
    assert "Assert statements are a convenient way to insert debugging assertions" in module.TEXT
    assert "".join(module.VOCABULARY) == "".join(sorted(set(module.TEXT)))
    assert all(module.VOCABULARY[index] == character for character, index in module.INDEX.items())


def test_a_batch_holds_pieces_of_the_text_and_the_characters_that_follow(factory: Callable[[int], Task], module: ModuleType) -> None:
    characters, following = first_batch(factory(0))
    assert characters.shape == following.shape == (32, 128)
    assert characters.dtype == following.dtype == torch.int64
    assert torch.equal(characters[:, 1:], following[:, :-1])
    for start, end in zip(characters.tolist(), following[:, -1].tolist(), strict=True):
        assert "".join(module.VOCABULARY[index] for index in [*start, end]) in module.TEXT


def test_the_batches_do_not_end_and_do_not_repeat(factory: Callable[[int], Task]) -> None:
    one, other = islice(factory(0).batches, 2)
    assert not torch.equal(one[0], other[0])


def test_a_position_sees_only_itself_and_what_stands_before(factory: Callable[[int], Task]) -> None:
    task = factory(0)
    characters, _ = few(first_batch(task))
    changed = characters.clone()
    changed[:, 60] = (changed[:, 60] + 1) % 50
    with torch.no_grad():
        before, after = task.model(characters), task.model(changed)
    torch.testing.assert_close(before[:, :60], after[:, :60])
    assert not torch.allclose(before[:, 60:], after[:, 60:])


def test_the_same_character_means_something_else_at_another_position(factory: Callable[[int], Task]) -> None:
    logits = factory(0).model(torch.zeros(1, 128, dtype=torch.int64))
    assert not torch.allclose(logits[:, 0], logits[:, 64])


def test_the_same_seed_gives_the_same_bits(factory: Callable[[int], Task]) -> None:
    one = factory(3)
    torch.rand(5)  # What else draws from torch's global generator must not matter.
    other = factory(3)
    for (name, left), right in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
    for left, right in zip(first_batch(one), first_batch(other), strict=True):
        assert torch.equal(left, right)


def test_another_seed_gives_other_weights_and_other_batches(factory: Callable[[int], Task]) -> None:
    one, other = factory(0), factory(1)
    assert not torch.equal(one.model.state_dict()["head.weight"], other.model.state_dict()["head.weight"])
    assert not torch.equal(first_batch(one)[0], first_batch(other)[0])


def test_the_optimizer_is_adamw_over_all_parameters(factory: Callable[[int], Task]) -> None:
    task = factory(0)
    assert isinstance(task.optimizer, torch.optim.AdamW)
    (group,) = task.optimizer.param_groups
    assert {id(parameter) for parameter in group["params"]} == {id(parameter) for parameter in task.model.parameters()}


def test_an_untrained_model_knows_nothing_and_one_step_teaches_it_something(factory: Callable[[int], Task], module: ModuleType) -> None:
    task = factory(0)
    batch = few(first_batch(task))
    assert task.model(batch[0]).shape == (2, 128, len(module.VOCABULARY))
    before = task.loss(task.model, batch)
    assert before.shape == ()
    assert before.item() == pytest.approx(math.log(len(module.VOCABULARY)), abs=0.3)
    before.backward()  # type: ignore[no-untyped-call]
    task.optimizer.step()
    assert task.loss(task.model, batch).item() < before.item()


def test_what_the_model_writes_begins_with_the_prompt_and_may_outgrow_the_context(
    factory: Callable[[int], Task], module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONTEXT", 6)
    text = module.write(factory(0).model, "The ", length=10, device=torch.device("cpu"))
    assert text.startswith("The ")
    assert len(text) == 14
    assert set(text) <= set(module.VOCABULARY)
