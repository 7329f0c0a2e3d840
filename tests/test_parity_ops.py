"""Every operator against numbers made by the peers' reference code: 93 cases (tests/fixtures/stylegan/ops.json).
Tolerances are relative norms: 1e-10 in float64, 2e-6 in float32, 1e-6 for filter taps."""
import json
from pathlib import Path
import pytest
import torch
from safetensors.torch import load_file
from gan_course import layers, ops

HERE = Path(__file__).parent/'fixtures'/'stylegan'
INFO = json.loads((HERE/'ops.json').read_text())['cases']
TENSORS = load_file(HERE/'ops.safetensors')
FILTER_CASES = [n for n in INFO if n.split('.')[0] in ('setup_filter', 'lowpass')]
LAYER_CASES = [n for n in INFO if n not in FILTER_CASES]
F1331 = ops.setup_filter([1, 3, 3, 1])


def run(kind, a, x, t):
    "The operator `kind` with arguments `a`, image `x` and the case's other tensors `t`"
    if kind == 'upfirdn2d':
        return ops.upfirdn2d(x, TENSORS['upfirdn2d.'+a['filter']], a['up'], a['down'], a['padding'], a['flip_filter'], a['gain'])
    if kind in ('filter2d', 'upsample2d', 'downsample2d'): return getattr(ops, kind)(x, TENSORS['upfirdn2d.'+a['filter']])
    if kind == 'bias_act': return ops.bias_act(x, t['b'], act=a['act'], alpha=a['alpha'], gain=a['gain'], clamp=a['clamp'])
    if kind == 'filtered_lrelu':
        return ops.filtered_lrelu(x, t.get('fu'), t.get('fd'), t['b'], **{k: a[k] for k in ('up', 'down', 'padding', 'gain', 'slope', 'clamp')})
    if kind == 'conv2d_resample': return ops.conv2d_resample(x, t['w'], F1331, a['up'], a['down'], a['padding'], flip_weight=a['flip_weight'])
    if kind == 'modconv_sg2':
        return ops.modulated_conv2d(x, t['w'], t['s'], t['noise'], up=a['up'], padding=a['padding'], resample_filter=F1331,
                                    demodulate=a['demodulate'], flip_weight=a['flip_weight'], fused_modconv=a['fused'])
    if kind == 'modconv_sg3':
        return ops.modulated_conv2d_sg3(x, t['w'], t['s'], demodulate=a['demodulate'], padding=a['padding'], input_gain=torch.tensor(a['input_gain'], dtype=x.dtype))
    if kind == 'minibatch_std': return layers.minibatch_std(x, a['group'], a['channels'])
    raise ValueError(kind)


def rel(a, b):
    assert a.shape == b.shape
    return ((a.double()-b.double()).norm()/b.double().norm()).item()


def test_all_cases_are_here():
    assert len(INFO) == 93 and len(FILTER_CASES)+len(LAYER_CASES) == 93


@pytest.mark.parametrize('name', LAYER_CASES)
def test_parity(name):
    t = {k[len(name)+1:]: v for k, v in TENSORS.items() if k.startswith(name+'.')}
    for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 2e-6)):
        c = {k: v.to(dtype) if k not in ('fu', 'fd') else v for k, v in t.items()}
        x = c['x'].clone().requires_grad_()
        y = run(name.split('.')[0], INFO[name]['args'], x, c)
        dx, = torch.autograd.grad((y*c['dy']).sum(), x)
        assert y.dtype == dtype
        assert rel(y, t['y']) <= tol, f'y in {dtype}'
        assert rel(dx, t['dx']) <= tol, f'dx in {dtype}'


@pytest.mark.parametrize('name', FILTER_CASES)
def test_filter_taps(name):
    a = INFO[name]['args']
    f = ops.setup_filter(a['f']) if name.startswith('setup') else ops.design_lowpass_filter(**a)
    assert f.dtype == torch.float32
    assert rel(f, TENSORS[name]) <= 1e-6
