"""Imports of what Apex removed."""

from __future__ import annotations

import pytest

from halfstep import amp
from halfstep.lint.rules.apex_amp import ApexAmp
from tests.lint.judging import findings, fixed

RULES = [ApexAmp()]


@pytest.mark.parametrize("name", amp.__all__)
def test_all_that_halfstep_has_is_taken_from_there(name: str) -> None:
    assert fixed(f"from apex.amp import {name}\n", RULES) == f"from halfstep.amp import {name}\n"
    code = f"from apex import amp\n\namp.{name}(x)\n"
    assert fixed(code, RULES) == code.replace("apex", "halfstep")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from apex import amp, optimizers\n", "from apex import optimizers\nfrom halfstep import amp\n"),
        ("from apex import amp as mixed\nmixed.initialize(m)\n", "from halfstep import amp as mixed\nmixed.initialize(m)\n"),
        ("import apex.amp as amp\namp.initialize(m)\n", "import halfstep.amp as amp\namp.initialize(m)\n"),
        ("from apex import amp\namp._amp_state.loss_scalers\n", None),
        ("from apex.amp import opt\n", None),
        ("from apex.amp.frontend import initialize\n", None),
        ("from apex.fp16_utils import network_to_half\n", None),
        ("from apex import fp16_utils\n", None),
        ("import apex.amp\napex.amp.initialize(m)\n", None),
        ("import apex\nwith apex.amp.scale_loss(loss, o) as scaled:\n    scaled.backward()\n", None),
        ("try:\n    from apex import amp\nexcept ImportError as error:\n    raise SystemExit from error\n", "halfstep"),
        ("try:\n    from apex import amp\nexcept ImportError:\n    sys.exit('no apex')\n", "halfstep"),
        ("if args.fp16:\n    from apex import amp\n", "halfstep"),
    ],
)
def test_each_import_is_found_once(old: str, new: str | None) -> None:
    assert len(findings(old, RULES)) == 1
    assert fixed(old, RULES) == (old.replace("apex import", "halfstep import") if new == "halfstep" else new or old)


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    from apex import amp\n    has_apex = True\nexcept ImportError:\n    has_apex = False\n",
        "try:\n    import apex\nexcept ImportError:\n    apex = None\nif apex:\n    apex.amp.initialize(m)\n",
        "if has_apex:\n    from apex import amp\n",
        "try:\n    from torch.amp import autocast\nexcept ImportError:\n    from apex import amp\n",
        "from apex.normalization import FusedLayerNorm\n",
        "from apex.parallel import DistributedDataParallel\nfrom apex.optimizers import FusedAdam\n",
        "import apex\napex.parallel.convert_syncbn_model(m)\n",
        "from .apex import amp\n",
    ],
)
def test_what_a_file_can_do_without_and_the_rest_of_apex_are_left_alone(code: str) -> None:
    assert findings(code, RULES) == []
