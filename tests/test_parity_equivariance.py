"The operators of EQ-T and EQ-R against the official ones (fixture `equivariance`), with their masks."
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gan_course import equivariance as eq

FIX = load_file(Path(__file__).parent / "fixtures" / "stylegan" / "equivariance.safetensors")
CASES = [k for k in FIX if k != "img" and not k.endswith(".mask")]


def run(case, x):
    kind, numbers = case.split(".")[0], [float(n) for n in re.findall(r"-?\d+\.\d+", case)]
    if kind == "int": return eq.translate_integer(x, *(round(n * 48) for n in numbers))
    if kind == "frac": return eq.translate_fraction(x, *(n * 48 for n in numbers))
    return {"rot": eq.rotate, "pseudorot": eq.pseudo_rotate}[kind](x, *numbers)


def test_all_cases_are_there():
    assert sorted({c.split(".")[0] for c in CASES}) == ["frac", "int", "pseudorot", "rot"] and len(CASES) == 8


@pytest.mark.parametrize("case", CASES)
def test_operator(case):
    got, mask = run(case, FIX["img"])
    want, known = FIX[case], FIX[f"{case}.mask"]
    assert torch.equal(mask, known)
    error = ((got - want) * known).norm() / (want * known).norm()
    assert error < 1e-5, f"{case}: {error:.2e}"
    assert float((got - want).norm() / want.norm()) < 1e-5
