"""Random chains imported: equal to the module, at two sizes of the batch."""

from __future__ import annotations

import pytest

from esper_ir.importers.torch_export import from_torch
from tests.esper_ir.random_chains import module_of
from tests.esper_ir.test_import_torch import inputs, same


def imported(seed: int, wide: bool = False) -> int:
    """Tensors that were compared at the smaller of two sizes. `wide`: in float64, where a difference is the
    importer's and not the rounding of a sum's order."""
    module, given = module_of(seed)
    if wide:
        module, given = module.double(), tuple(t.double() if t.is_floating_point() else t for t in given)
    blueprint = from_torch(module, given, dynamic=0)
    compared = same(module, blueprint, given)
    larger = same(
        module, blueprint, tuple(t.to(given[0].dtype) for t in inputs([(5, *t.shape[1:]) for t in given]))
    )
    return min(compared, larger)


@pytest.mark.parametrize("seed", range(12))
def test_random_chain(seed: int) -> None:
    assert imported(seed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 300))
def test_more_random_chains(seed: int) -> None:
    assert imported(seed, wide=True) > 0
