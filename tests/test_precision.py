"""Mixed precision: policies, rounding of the half blocks, gradients made finite, the guard that names a layer, and R1 under a scale.

Error bounds are in units of u, the unit roundoff (2**-11 in float16, 2**-8 in bfloat16). A picture passes through some twenty roundings whose
errors partly cancel; over eight seeds images were measured 1.1 to 2.8 u from float32 and logits 0.3 to 3.6 u. The bound is 10 u: 4.9e-3 and 3.9e-2.
R1 is another matter: the slope of a leaky ReLU jumps at 0, so a value that rounding moves across 0 changes the gradient by far more than u, whatever
the scale. Over eight seeds it was measured 0.06 % to 4.9 % off in float16, 0.5 % to 4.4 % in bfloat16; the bound is 10 %.
"""
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gan_course import ops, precision
from gan_course.core import UserError
from gan_course.faces import FacesDataset
from gan_course.gan_trainer import Trainer
from gan_course.layers import Discriminator
from gan_course.losses import path_lengths, r1_penalty
from gan_course.networks import HALF_DEVICES, HALF_DTYPES, compute_dtype, half_on, trace_layers
from gan_course.ops import modulated_conv2d
from gan_course.precision import (PRECISIONS, FiniteGuard, Fp32Islands, autocast_for, check_gradients, check_r1_scale, first_nonfinite, half_resolutions,
                                  network_kwargs, plot_ranges, r1_in_fp32, ranges, ranges_table, require_precision, sanitize_gradients)
from gan_course.stylegan2 import Generator
from gan_course.training import TrainConfig

SMALL = dict(img_resolution=32, img_channels=3, channel_base=1024, channel_max=32)
HALF = {'official': torch.float16, 'bf16': torch.bfloat16}
NAN, INF = float('nan'), float('inf')


def make(policy, seed=0, **kw):
    torch.manual_seed(seed)
    kw = {**SMALL, **network_kwargs(policy), **kw}
    return Generator(16, 0, 16, mapping_kwargs=dict(num_layers=2), **kw), Discriminator(0, **kw)


def rel(a, b): return ((a-b).norm()/b.norm()).item()


def refusal(call, *words):
    "`call` raises a UserError with all these words, and a next step; its text."
    with pytest.raises(UserError) as e: call()
    text = str(e.value)
    for word in words: assert word in text, text
    assert 'Next:' in text, text
    return text


# ---------------------------------------------------------------- policies

def test_what_each_policy_passes_on():
    assert {p: network_kwargs(p) for p in PRECISIONS} == {
        'official': dict(num_fp16_res=4, conv_clamp=256, half_dtype='float16'),
        'fp32': dict(num_fp16_res=0, conv_clamp=None, half_dtype='float16'),
        'bf16': dict(num_fp16_res=4, conv_clamp=256, half_dtype='bfloat16'),
        'amp': dict(num_fp16_res=0, conv_clamp=None, half_dtype='bfloat16')}
    assert {p: v.autocast for p, v in PRECISIONS.items()} == {'official': None, 'fp32': None, 'bf16': None, 'amp': 'bfloat16'}


@pytest.mark.parametrize('name', ['fp16', 'Official', '', None, 16])
def test_unknown_policy_lists_the_names(name):
    for call in (lambda: network_kwargs(name), lambda: half_resolutions(name, 64), lambda: require_precision(name, 'cpu'),
                 lambda: autocast_for(name, 'cpu').__enter__()):
        refusal(call, 'precision', repr(name), 'official, fp32, bf16, amp')


@pytest.mark.parametrize('resolution,num,half', [(8, 4, [8]), (16, 4, [8, 16]), (32, 4, [8, 16, 32]), (64, 4, [8, 16, 32, 64]), (128, 4, [16, 32, 64, 128]),
                                                 (64, 0, []), (64, 1, [64]), (64, 2, [32, 64]), (64, 9, [8, 16, 32, 64])])
def test_the_highest_resolutions_are_half(resolution, num, half):
    kw = dict(img_resolution=resolution, img_channels=3, channel_base=resolution*4, channel_max=8, num_fp16_res=num)
    G, D = Generator(8, 0, 8, **kw), Discriminator(0, **kw)
    assert [r for r in G.synthesis.block_resolutions if getattr(G.synthesis, f'b{r}').use_fp16] == half
    assert [r for r in sorted(D.block_resolutions) if getattr(D, f'b{r}').use_fp16] == half
    if num == 4: assert half_resolutions('official', resolution) == half_resolutions('bf16', resolution) == half
    seen = {}
    with half_on('cpu'), torch.no_grad(), trace_layers({'G': G, 'D': D}, lambda name, what, call, t: seen.__setitem__((name, what), t.dtype)):
        D(G(torch.randn(1, 8)))
    for r in (2**i for i in range(2, resolution.bit_length())):                       # what is set is what is computed
        want = torch.float16 if r in half else torch.float32
        assert seen[f'G.synthesis.b{r}.conv1', 'output'] == want
        if r > 4: assert seen[f'D.b{r}.conv1', 'output'] == want
    assert seen['G', 'output'] == seen['D', 'output'] == seen['D.b4.conv', 'output'] == seen['G.mapping', 'output'] == torch.float32


def test_half_dtype_is_recorded_and_checked():
    G, D = make('bf16')
    assert G.init_kwargs['half_dtype'] == D.init_kwargs['half_dtype'] == 'bfloat16'
    for build in (lambda: Generator(8, 0, 8, **SMALL, half_dtype='half'), lambda: Discriminator(0, **SMALL, half_dtype='half')):
        refusal(build, 'half_dtype', "'half'", 'float16, bfloat16')


def test_a_cpu_computes_in_full_unless_forced():
    G, D = make('official')
    z = torch.randn(2, 16)
    full = G(z, noise_mode='const', force_fp32=True)
    assert torch.equal(G(z, noise_mode='const'), full) and torch.equal(D(full), D(full, force_fp32=True))
    with half_on('cpu'): assert not torch.equal(G(z, noise_mode='const'), full)
    with pytest.raises(RuntimeError), half_on('cpu'): raise RuntimeError
    assert HALF_DEVICES == {'cuda'} and compute_dtype(torch.zeros(1), 'bfloat16') == torch.float32


def test_old_gpus_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: including_emulation)
    for policy in ('bf16', 'amp'): refusal(lambda: require_precision(policy, 'cuda'), 'bfloat16', policy, 'official')
    for policy in ('official', 'fp32'): assert require_precision(policy, 'cuda') == PRECISIONS[policy]
    for policy in PRECISIONS: assert require_precision(policy, 'cpu') == PRECISIONS[policy]


# ---------------------------------------------------------------- numbers

@pytest.mark.parametrize('policy', ['official', 'bf16'])
@pytest.mark.parametrize('train', [True, False])
@pytest.mark.parametrize('seed', [0, 1])
def test_half_blocks_are_near_full(policy, train, seed):
    G, D = make(policy, seed)
    G.train(train)
    z, u = torch.randn(4, 16), torch.finfo(HALF[policy]).eps/2
    with half_on('cpu'):
        half, full = (G(z, noise_mode='const', force_fp32=f) for f in (False, True))
        logit, exact = (D(full, force_fp32=f) for f in (False, True))
        loss = F.softplus(-D(half)).mean()
    assert half.dtype == logit.dtype == torch.float32
    assert u/10 < rel(half, full) < 10*u and u/10 < rel(logit, exact) < 10*u, (rel(half, full)/u, rel(logit, exact)/u)
    loss.backward()
    for p in (*G.parameters(), *D.parameters()):
        assert p.dtype == torch.float32 and (p.grad is None or (p.grad.dtype == torch.float32 and p.grad.isfinite().all()))
    assert all(t.dtype == torch.float32 for net in (G, D) for t in net.state_dict().values())


def test_forward_bound_of_the_clamp():
    "sqrt(fan-in)*clamp, reached exactly when every product has the same sign; 256 fits into float16 in the widest layer, 1024 does not."
    sign = torch.randint(0, 2, (1, 512, 3, 3))*2. - 1
    for fused in (True, False):
        at = lambda clamp: modulated_conv2d((sign*clamp).half(), 5*sign, torch.full((1, 512), 9.), fused_modconv=fused).item()
        assert abs(at(256) - 4608**.5*256) < 17378*2**-10
        assert at(1024) == INF


@pytest.mark.parametrize('weight,style', [(1., 300.), (1e4, 1.), (1e-6, 1e-3), (3e3, 7e4)])
def test_divided_weights_and_styles(weight, style):
    torch.manual_seed(0)
    x, w, s = (60*torch.randn(2, 64, 8, 8)).clamp(-256, 256), weight*torch.randn(16, 64, 3, 3), style*(1 + torch.randn(2, 64))
    exact = modulated_conv2d(x.double(), w.double()/weight, s.double()/style, padding=1)      # demodulation undoes both scales
    for fused in (True, False): assert rel(modulated_conv2d(x.half(), w, s, padding=1, fused_modconv=fused).double(), exact) < 10*2**-11


def test_islands_keep_autocast_away():
    G, D = make('amp')
    z = torch.randn(4, 16)
    full = G(z, noise_mode='const')
    with half_on('cpu'), autocast_for('amp', 'cpu', 'Dmain'):
        seen = {}
        with trace_layers({'G': G, 'D': D}, lambda name, what, call, t: seen.__setitem__((name, what), t.dtype)):
            img = G(z, noise_mode='const')
            logit = D(img)
    halves = {name for (name, what), t in seen.items() if t == torch.bfloat16 and what == 'output'}
    assert {'G.synthesis.b32.conv1', 'D.b32.conv0'} <= halves
    full_names = [n for n, m in G.named_modules(prefix='G') if n.startswith('G.mapping') or 'affine' in n or 'b4' in n]
    assert not halves & {*full_names, 'D.b4', 'D.b4.conv', 'D.b4.fc', 'D.b4.out', 'G', 'D'}
    assert img.dtype == logit.dtype == torch.float32 and 0 < rel(img, full) < 10*2**-8
    F.softplus(-logit).mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in (*G.parameters(), *D.parameters()) if p.grad is not None)


@pytest.fixture(params=[True, False], ids=['filters as matrices', 'filters as convolutions'])
def as_matrices(request, monkeypatch):
    "Resampling as small pictures on a CPU have it, and as large ones and every GPU have it."
    if not request.param: monkeypatch.setattr(ops, '_bands', lambda *args: None)
    return request.param


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_resampling_keeps_its_type_under_autocast(as_matrices, dtype):
    "A result in another type than the picture's would meet a filter of the picture's type on the way back."
    x = torch.randn(2, 4, 12, 12, dtype=dtype, requires_grad=True)
    with half_on('cpu'), autocast_for('amp', 'cpu', 'Dmain'): y = ops.upfirdn2d(x, ops.setup_filter([1, 3, 3, 1]), up=2, padding=2)
    assert y.dtype == dtype
    g, = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    gg, = torch.autograd.grad(g.float().square().sum(), x)
    assert g.dtype == gg.dtype == dtype and gg.isfinite().all()
    exact = x.detach().double().requires_grad_()
    want, = torch.autograd.grad(ops.upfirdn2d(exact, ops.setup_filter([1, 3, 3, 1]), up=2, padding=2).square().sum(), exact)
    assert rel(g.double(), want) < {torch.float32: 1e-6, torch.bfloat16: 10*2**-8}[dtype]


@pytest.mark.parametrize('policy', list(PRECISIONS))
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_all_phases_train_under_each_policy(as_matrices, policy, layout, tmp_path):
    G, D = (net.to(memory_format=layout) for net in make(policy))
    cfg = TrainConfig(kimg=1, batch=4, r1_interval=2, pl_interval=2, precision=policy, grid=1, aug='fixed', aug_p=0.5)
    with half_on('cpu'):
        t = Trainer(G, D, FacesDataset(8, resolution=32), cfg, tmp_path, 'cpu')
        before = [p.clone() for p in (*t.G.parameters(), *t.D.parameters())]
        for _ in range(2): t.train_iteration()
    now = [*t.G.parameters(), *t.D.parameters()]
    assert all(p.isfinite().all() for p in now) and sum(not torch.equal(a, b) for a, b in zip(before, now)) > 0.9*len(now)


@pytest.mark.parametrize('groups,islands', [(1, False), (2, False), (4, True), (16, True)])
def test_narrow_convolutions_are_islands(groups, islands):
    x, w = torch.randn(1, 16, 9, 9), torch.randn(16, 16//groups, 3, 3)
    for conv, kw in ((F.conv2d, {}), (F.conv_transpose2d, dict(stride=2))):
        with torch.autocast('cpu', torch.bfloat16), Fp32Islands('cpu'): y = conv(x, w, groups=groups, **kw)
        assert (y.dtype == torch.float32) == islands
        if islands: assert torch.equal(y, conv(x, w, groups=groups, **kw))


@pytest.mark.parametrize('policy', ['official', 'fp32', 'bf16'])
def test_policies_without_autocast_leave_it_off(policy):
    with half_on('cpu'), autocast_for(policy, 'cpu'): assert not torch.is_autocast_enabled('cpu')


def test_regularisation_is_never_under_autocast():
    for phase, on in (('Gmain', True), ('Dmain', True), (None, True), ('Greg', False), ('Dreg', False)):
        with half_on('cpu'), autocast_for('amp', 'cpu', phase): assert torch.is_autocast_enabled('cpu') == on
    with autocast_for('amp', 'cpu', 'Gmain'): assert not torch.is_autocast_enabled('cpu')     # a CPU that was not forced
    refusal(lambda: autocast_for('amp', 'cpu', 'R1').__enter__(), 'phase', 'Gmain, Greg, Dmain, Dreg')


# ---------------------------------------------------------------- gradients made finite

def with_grad(*values, dtype=torch.float32):
    p = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    p.grad = torch.tensor(values, dtype=dtype)
    return p


def test_sanitised_values():
    p, q, none = with_grad(1., NAN, INF, -INF, 3e38, -0.), with_grad(NAN), nn.Parameter(torch.zeros(3))
    kept = p.grad
    changed = sanitize_gradients(iter([p, none, q]))
    assert isinstance(changed, torch.Tensor) and changed.shape == () and changed.item() == 4
    assert p.grad is kept and p.grad.tolist() == [1, 0, 1e5, -1e5, torch.tensor(3e38).item(), 0] and q.grad.tolist() == [0] and none.grad is None
    assert sanitize_gradients([p, q]).item() == 0 and sanitize_gradients([none]).item() == 0


def test_sanitise_with_another_limit_and_types():
    p = with_grad(INF, -INF, 2., dtype=torch.float64)
    assert sanitize_gradients([p], limit=7).item() == 2 and p.grad.tolist() == [7, -7, 2]
    p = with_grad(INF, dtype=torch.bfloat16)
    assert sanitize_gradients([p]).item() == 1 and p.grad.isfinite().all()
    refusal(lambda: sanitize_gradients([with_grad(INF, dtype=torch.float16)]), 'limit', '65504', 'float32')


def test_gradient_check_names_the_first_parameter():
    _, D = make('fp32')
    D(torch.randn(4, 3, 32, 32)).sum().backward()
    norm = check_gradients({'D': D}, 1)
    torch.testing.assert_close(norm, torch.cat([p.grad.flatten() for p in D.parameters() if p.grad is not None]).norm())
    D.b8.conv1.weight.grad[0, 1, 2, 0] = NAN
    D.b4.fc.bias.grad[3] = INF
    text = refusal(lambda: check_gradients({'D': D}, 12), 'step 12', '1 nan, 0 inf', 'FiniteGuard')
    assert text.startswith('D.b8.conv1.weight: ')
    assert 'step' not in refusal(lambda: check_gradients({'D': D})).split('Next')[0]


# ---------------------------------------------------------------- the guard

class Poison(torch.autograd.Function):
    "The identity, which spoils one value on the way forwards or backwards."
    @staticmethod
    def forward(ctx, x, forwards, backwards):
        ctx.backwards = backwards
        y = x.clone()
        if forwards is not None: y.view(-1)[1] = forwards
        return y

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if ctx.backwards is not None: g.view(-1)[2] = ctx.backwards
        return g, None, None


def poison(layer, forwards=None, backwards=None):
    "From now on this layer's own arithmetic spoils one value of its output, or of the gradient on its way through."
    inner = layer.forward
    layer.forward = lambda x, *a, **k: inner(x if backwards is None else Poison.apply(x, None, backwards), *a, **k) if forwards is None \
        else Poison.apply(inner(x, *a, **k), forwards, None)


def main_step(G, D, z):
    def closure():
        for net in (G, D): net.zero_grad()
        loss = F.softplus(-D(G(z)))
        loss.mean().backward()
        return loss
    return closure


@pytest.mark.parametrize('layer', ['G.synthesis.b32.conv1', 'G.synthesis.b8.conv0', 'G.mapping.fc1', 'D.b16.conv0', 'D.b32.fromrgb', 'D.b8.skip', 'D.b4.fc'])
@pytest.mark.parametrize('value,word', [(NAN, '1 nan, 0 inf'), (INF, '0 nan, 1 inf'), (-INF, '0 nan, 1 inf')])
def test_guard_names_the_layer_forwards(layer, value, word):
    G, D = make('fp32')
    guard, nets = FiniteGuard({'G': G, 'D': D}), nn.ModuleDict({'G': G, 'D': D})
    step = main_step(G, D, torch.randn(4, 16))
    assert guard.run(step, 1).shape == (4, 1)
    poison(nets.get_submodule(layer), forwards=value)
    text = refusal(lambda: guard.run(step, 57, 'Gmain'), 'output is not finite in step 57 Gmain', word, 'float32', 'layer call')
    assert text.startswith(f'{layer}: ')


@pytest.mark.parametrize('layer', ['G.synthesis.b32.conv1', 'G.synthesis.b8.conv0', 'G.mapping.fc1', 'D.b16.conv0', 'D.b8.skip', 'D.b4.out', 'D.b4.mbstd'])
@pytest.mark.parametrize('value', [NAN, INF])
def test_guard_names_the_layer_backwards(layer, value):
    G, D = make('fp32')
    guard, nets = FiniteGuard({'G': G, 'D': D}), nn.ModuleDict({'G': G, 'D': D})
    poison(nets.get_submodule(layer), backwards=value)
    step = main_step(G, D, torch.randn(4, 16))
    text = refusal(lambda: guard.run(step, 3, 'Gmain'), 'in step 3 Gmain', '1 nan' if value != value else '1 inf')
    assert text.startswith(f'{layer}: gradient of its input is not finite'), text


def test_guard_tells_branches_apart():
    "Two layers read one tensor; only the gradient through one of them is bad."
    _, D = make('fp32')
    for name in ('skip', 'conv0'):
        twin = copy.deepcopy(D)
        poison(getattr(twin.b16, name), backwards=NAN)
        found = first_nonfinite({'D': twin}, lambda: twin(torch.randn(4, 3, 32, 32)).sum().backward())
        assert (found.layer, found.what) == (f'D.b16.{name}', 'gradient of its input')


def test_guard_in_double_backward():
    "R1 and path length take gradients of gradients; the layer is found there too, and a sound step passes untouched."
    G, D = make('fp32')
    img, ws = torch.randn(2, 3, 32, 32).requires_grad_(), G.mapping(torch.randn(2, 16)).detach().requires_grad_()
    r1 = lambda: r1_penalty(D(img), img).mean()
    pl = lambda: path_lengths(G.synthesis(ws, noise_mode='const'), ws, noise=torch.ones(2, 3, 32, 32)).mean()
    assert first_nonfinite({'G': G, 'D': D}, lambda: (r1().backward(), pl().backward())) is None
    plain = r1().item()
    with trace_layers({'D': D}, lambda *a: None): assert r1().item() == plain
    poison(D.b8.conv0, backwards=INF)
    found = first_nonfinite({'D': D}, lambda: r1().backward())
    assert (found.layer, found.what) == ('D.b8.conv0', 'gradient of its input')


def test_guard_names_a_weight_gradient():
    "The sum over positions overflows in float16, though the gradients of inputs and outputs fit."
    class Half(nn.Module):
        def __init__(self): super().__init__(); self.weight = nn.Parameter(torch.ones(1, 1, 1, 1))
        def forward(self, x): return F.conv2d(x.half(), self.weight.half()).float()
    D = nn.Sequential(nn.Identity(), Half())
    x = torch.full((1, 1, 64, 64), 20.)
    found = first_nonfinite({'D': D}, lambda: D(x).sum().backward())
    assert (found.layer, found.what) == ('D.1', 'gradient of its parameter weight')


def test_guard_sees_data_and_broken_parameters():
    _, D = make('fp32')
    guard, img = FiniteGuard({'D': D}), torch.randn(4, 3, 32, 32)
    bad = img.clone()
    bad[2, 0, 3, 3] = NAN
    text = refusal(lambda: guard.run(lambda: D(bad), 1), 'input is not finite in step 1, layer call 1', 'fed in')
    assert text.startswith('D: ')
    D.b16.conv1.weight.data[0, 0, 0, 0] = NAN
    text = refusal(lambda: guard.run(lambda: D(img), 2), 'output is not finite', 'last snapshot', 'parameter weight was broken by an earlier step')
    assert text.startswith('D.b16.conv1: ')


@pytest.mark.parametrize('policy', ['official', 'bf16'])
def test_guard_on_an_overflow_in_half(policy):
    "Weights that are 10^5 too large: float16 overflows and is told so; bfloat16 carries on."
    _, D = make(policy, conv_clamp=None)
    D.b32.conv0.weight.data.mul_(1e5)
    guard, img = FiniteGuard({'D': D}), torch.randn(4, 3, 32, 32)
    def step(): D.zero_grad(); loss = D(img); loss.mean().backward(); return loss
    with half_on('cpu'):
        if policy == 'bf16': assert guard.run(step, 1).isfinite().all()
        else:
            text = refusal(lambda: guard.run(step, 1), 'output is not finite', 'float16', 'num_fp16_res', 'bfloat16', 'conv_clamp=256', 'before it: D.b32.conv0, input')
            assert text.startswith('D.b32.conv0: ')
    assert guard.run(step, 2).isfinite().all()


def test_guard_repeats_with_the_same_random_numbers():
    _, D = make('fp32')
    guard, drawn = FiniteGuard({'D': D}), []
    def step():
        drawn.append(torch.randn(4, 3, 32, 32))
        return D(drawn[-1]) * (INF if len(drawn) > 2 else 1)
    guard.run(step, 1), guard.run(step, 2)
    refusal(lambda: guard.run(step, 3), 'loss: the loss is not finite in step 3, though every layer is')
    assert len(drawn) == 4 and torch.equal(drawn[2], drawn[3]) and not torch.equal(drawn[1], drawn[2])


def test_guard_losses_by_name_and_left_over_gradients():
    _, D = make('fp32')
    img, guard = torch.randn(4, 3, 32, 32), FiniteGuard({'D': D})
    text = refusal(lambda: guard.run(lambda: {'main': D(img), 'reg': D(img)*NAN}, 1), 'loss is not finite')
    assert text.startswith('reg: ')
    D.b4.out.bias.grad = torch.tensor([INF])
    refusal(lambda: guard.run(lambda: D(img), 2), 'not finite in step 2, but the repeat is finite', 'zero_grad')
    assert FiniteGuard({'D': D}, gradients=False).run(lambda: D(img), 3).shape == (4, 1)
    D.zero_grad()
    assert guard.run(lambda: D(img), 4).shape == (4, 1)                               # a refusal leaves nothing behind


def test_guard_looks_every_so_many_steps():
    _, D = make('fp32')
    img, guard, bad = torch.randn(4, 3, 32, 32), FiniteGuard({'D': D}, every=3), [False, True, False]
    losses = iter([D(img)*(NAN if b else 1) for b in bad])
    guard.run(lambda: next(losses), 1), guard.run(lambda: next(losses), 2)
    losses = iter([D(img), D(img)])
    refusal(lambda: guard.run(lambda: next(losses), 3), 'in step 3 or in the 2 before it', 'every=1')
    for every in (0, -1): refusal(lambda: FiniteGuard({}, every=every), 'every')


def test_a_sound_step_is_not_changed_by_the_guard():
    _, D = make('fp32')
    twin, img = copy.deepcopy(D), torch.randn(4, 3, 32, 32)
    for net in (D, twin):
        torch.manual_seed(5)
        def step(): loss = net(img + torch.randn_like(img)); loss.mean().backward(); return loss
        loss = FiniteGuard({'D': net}).run(step, 1) if net is D else step()
        after = torch.randn(3)
        if net is D: first, draws = loss, after
    assert torch.equal(first, loss) and torch.equal(draws, after)
    for p, q in zip(D.parameters(), twin.parameters()): assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in D.modules())


# ---------------------------------------------------------------- R1 and scales

def test_r1_does_not_depend_on_a_scale():
    "Case 13 of the needs: 65536^2 times too large if the scaler reaches the inner gradient, infinite in pure half, right here."
    _, D = make('fp32')
    img, S = torch.randn(4, 3, 32, 32).requires_grad_(), 65536.
    right = r1_penalty(D(img), img)
    inner, = torch.autograd.grad((S*D(img)).sum(), img)
    wrong = inner.square().flatten(1).sum(1)
    torch.testing.assert_close(wrong/right.detach(), torch.full((4,), S*S), rtol=1e-5, atol=0)
    assert inner.half().square().sum().item() == INF
    assert check_r1_scale(D, img, scales=(1., 2.**-8, 2.**8, S), tolerance=0).shape == (4,)
    torch.testing.assert_close(r1_in_fp32(D, img), right, rtol=1e-6, atol=0)


def test_r1_gradient_scales_with_the_loss_and_nothing_else():
    "A scaler around the finished penalty scales the gradients of D's parameters exactly, so it may be undone exactly."
    _, D = make('fp32')
    img = torch.randn(4, 3, 32, 32)
    grads = [torch.autograd.grad(r1_in_fp32(D, img).mean()*s, D.b16.conv0.weight)[0]/s for s in (1., 2.**16)]
    assert torch.equal(*grads)


@pytest.mark.parametrize('policy', ['official', 'bf16'])
def test_r1_is_in_full_whatever_surrounds_it(policy):
    _, D = make(policy)
    img = torch.randn(4, 3, 32, 32)
    exact = r1_in_fp32(D, img)
    with half_on('cpu'), torch.autocast('cpu', torch.bfloat16), Fp32Islands('cpu'):
        assert exact.dtype == torch.float32 and torch.equal(r1_in_fp32(D, img), exact)
        leaf = img.clone().requires_grad_()
        assert not torch.equal(r1_penalty(D(leaf), leaf), exact)
    with half_on('cpu'): assert 0 < rel(r1_penalty(D(leaf), leaf), exact) < 0.1


def test_small_logits_fall_under_the_floor_of_float16():
    _, D = make('official')
    D.b4.out.weight.data.mul_(1e-6)
    img = torch.randn(4, 3, 32, 32)
    with half_on('cpu'): refusal(lambda: check_r1_scale(D, img), 'R1', 'scale', 'at 1', 'at 65536', 'r1_in_fp32')
    assert check_r1_scale(D, img, tolerance=0).isfinite().all()


def test_an_overflow_is_no_agreement():
    _, D = make('official')
    D.b4.out.weight.data.mul_(1e6)
    with half_on('cpu'): refusal(lambda: check_r1_scale(D, torch.randn(4, 3, 32, 32), scales=(2.**16, 2.**17)), 'R1')


# ---------------------------------------------------------------- ranges

def test_ranges_measure_each_layer():
    G, D = make('official')
    img = torch.randn(4, 3, 32, 32)
    def step(): D.zero_grad(); F.softplus(-D(img)).mean().backward()
    with half_on('cpu'): rows = ranges(D, step)
    named = {r.name: r for r in rows}
    assert list(named)[0] == 'b32.fromrgb' and list(named)[-1] == 'b4.out' and len(named) == 13
    with half_on('cpu'): top = D.b32.fromrgb(img.half()).abs().max().item()
    assert named['b32.fromrgb'].activation == top and named['b32.fromrgb'].dtype == torch.float16
    assert named['b4.out'].dtype == torch.float32 and named['b4.out'].gradient <= 1/4
    assert all(r.headroom == 65504/max(r.activation, r.gradient) and 0 <= r.lost <= 1 for r in rows)
    lines = ranges_table(rows).splitlines()
    assert len(lines) == 14 and lines[1].startswith('b32.fromrgb') and 'float16' in lines[1]
    assert [t.get_text() for t in plot_ranges(rows).axes[0].get_yticklabels()] == list(named)
    refusal(lambda: plot_ranges([]), 'rows')


def test_ranges_count_what_float16_would_lose():
    net = nn.Sequential(nn.Linear(1, 4, bias=False), nn.Tanh())
    weights = torch.tensor([1., 2.**-25, 2.**-24, 0.])                                 # kept, rounded to 0, kept, 0 already
    row, = ranges(net[:1], lambda: (net[0](torch.ones(1, 1))*weights).sum().backward())
    assert row.name == '0' and row.gradient == 1 and abs(row.lost - 1/3) < 1e-6


def test_nothing_public_is_left_out():
    assert {'PRECISIONS', 'network_kwargs', 'autocast_for', 'sanitize_gradients', 'FiniteGuard', 'ranges', 'r1_in_fp32'} <= set(precision.__all__)
    assert set(HALF_DTYPES) == {'float16', 'bfloat16'}
