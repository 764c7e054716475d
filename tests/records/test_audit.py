"""What an audit found, as a record."""

from __future__ import annotations

import math

import pytest

from halfstep.records import Audit, UnderflowSite
from tests.audit import samples


@pytest.mark.parametrize(
    ("origin", "loss", "finding"), [(False, 1.0, False), (True, 1.0, True), (False, math.nan, True), (False, math.inf, True)]
)
def test_what_no_loss_scale_would_mend_is_a_finding(origin: bool, loss: float, finding: bool) -> None:
    assert samples.audit(origin=samples.overflow() if origin else None, loss=loss).has_findings is finding


def test_gradients_that_overflow_at_the_initial_scale_are_none() -> None:
    assert not samples.audit(scaled_origin=samples.overflow(phase="backward"), scale=4096.0).has_findings


def test_an_underflow_knows_its_share() -> None:
    place = UnderflowSite(op="aten.mm.default", phase="backward", site=samples.site(), flushed=3, elements=12)
    assert place.share == 0.25
    assert UnderflowSite(op="aten.mm.default", phase="backward", site=samples.site(), flushed=0, elements=0).share == 0.0


def test_an_audit_holds_all_that_is_in_it() -> None:
    audit = samples.audit(origin=samples.overflow(), scaled_origin=samples.overflow(phase="backward"))
    again = Audit.from_json(audit.to_json())
    assert again == audit
    assert again.origin == samples.overflow()
    assert again.kept[0].modules == ("attn",)
