"""The augmentation pipe against numbers made by the official code, every draw fixed to a percentile (tests/fixtures/stylegan/augment.json).
Tolerances are relative norms: 1e-5 for images, 1e-6 for filter taps."""
import json
from pathlib import Path
import pytest
import torch
from safetensors.torch import load_file
from gan_course.augment import AugmentPipe, build_augment

HERE = Path(__file__).parent/'fixtures'/'stylegan'
INFO = json.loads((HERE/'augment.json').read_text())
CASES, TENSORS = INFO['cases'], load_file(HERE/'augment.safetensors')
GREY = ['bgc_gray.0.7']
FILTERS = {'sym6_upfirdn_filter': 'Hz_geom', 'imgfilter_bank': 'Hz_fbank'}


def rel(a, b):
    assert a.shape == b.shape
    return ((a.double()-b.double()).norm()/b.double().norm()).item()


def test_all_tensors_are_compared():
    assert len(CASES) == 32
    assert set(TENSORS) == {'img', 'gray', *CASES, *GREY, *FILTERS}


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=['float32', 'float64'])
@pytest.mark.parametrize('name', list(CASES))
def test_parity(name, dtype):
    pipe = AugmentPipe(**{op: 1 for op in CASES[name]['ops']})
    y = pipe(TENSORS['img'].to(dtype), debug_percentile=CASES[name]['percentile'])
    assert y.dtype == dtype
    assert rel(y, TENSORS[name]) <= 1e-5


@pytest.mark.parametrize('name', list(CASES))
def test_closed_gates_do_not_matter(name):
    "A fixed percentile opens every gate, whatever p is."
    pipe = AugmentPipe(**{op: 1 for op in CASES[name]['ops']}).set_p(0.)
    assert rel(pipe(TENSORS['img'], debug_percentile=CASES[name]['percentile']), TENSORS[name]) <= 1e-5


@pytest.mark.parametrize('name', ['bgc.0.2', 'bgc.0.7'])
def test_preset(name):
    assert rel(build_augment('bgc')(TENSORS['img'], CASES[name]['percentile']), TENSORS[name]) <= 1e-5


def test_grey():
    assert rel(build_augment('bgc')(TENSORS['gray'], 0.7), TENSORS['bgc_gray.0.7']) <= 1e-5


@pytest.mark.parametrize('name', list(FILTERS))
def test_filter_taps(name):
    f = getattr(AugmentPipe(), FILTERS[name])
    assert f.dtype == torch.float32
    assert rel(f, TENSORS[name]) <= 1e-6
