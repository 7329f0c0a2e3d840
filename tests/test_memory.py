"""The memory ledger against bytes counted by hand and against torch's own profiler."""
import copy
import threading

import pytest
import torch

from gan_course.core import UserError
from gan_course.losses import path_length_penalty, path_lengths, r1_penalty
from gan_course.memory import StorageTracker, group_tensors, measure_memory, tensors_in


def mlp(*sizes):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[l for a, b in zip(sizes, sizes[1:]) for l in (torch.nn.Linear(a, b), torch.nn.Tanh())][:-1])


def count(net): return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("batch", [1, 33])
def test_parameters_gradients_and_adam_are_exact(batch, foreach):
    net = mlp(20, 30, 5)
    opt, x = torch.optim.Adam(net.parameters(), foreach=foreach), torch.randn(batch, 20)

    def step():
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
    led = measure_memory(step, dict(parameters=net, optimizer=opt, data=x))
    P, n = count(net), len(list(net.parameters()))
    if batch == 1:                                        # with few activations the peak is inside the optimiser
        assert led.by_category["gradients"] == 4 * P
    assert led.by_category["parameters"] == 4 * P and led.by_category["optimizer"] == 8 * P + 4 * n and led.by_category["data"] == 80 * batch
    assert led.peak == sum(led.by_category.values()) == max(b for _, b in led.timeline) and led.start == led.end == 4 * P * 2 + 8 * P + 4 * n + 80 * batch
    assert sum(b.size for b in led.blocks) == led.peak


def test_first_step_lacks_the_optimizer_state_and_warmup_brings_it():
    def peak(warmup):
        net = mlp(50, 50)
        opt = torch.optim.Adam(net.parameters())
        x = torch.randn(400, 50)

        def step():
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
        return measure_memory(step, dict(parameters=net, optimizer=opt, data=x), warmup=warmup)
    first, later = peak(0), peak(1)
    assert first.start < later.start and first.peak < later.peak
    assert first.end == later.end                          # the state made during the first step is found afterwards
    assert first.events and any(c == "optimizer" for _, c, _ in first.events)


def test_activations_of_a_chain_are_exact():
    x = torch.randn(1000, requires_grad=True)

    def step():
        y = x
        for _ in range(8): y = y.tanh()
        y.sum().backward()
        x.grad = None
    led = measure_memory(step, dict(data=x))
    # eight kept results (y holds the last one), the gradient that comes in and the one that goes out, the sum and its gradient
    assert led.by_category["activations"] == (8 + 2) * 4000 + 2 * 4 and led.by_category["data"] == 4000


def test_matches_the_profiler_on_the_cpu():
    net, x = mlp(64, 128, 128, 8), torch.randn(256, 64)

    def step():
        net(x).square().mean().backward()
        net.zero_grad()
    led = measure_memory(step, dict(parameters=net, data=x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof: step()
    total = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for e in sorted(events, key=lambda e: e.start_ns()):
        total += e.nbytes()
        peak = max(peak, total)
    assert led.peak - led.start == peak                   # a second witness, to the byte


def test_views_in_place_and_resizing():
    with StorageTracker() as tr:
        x = torch.zeros(100)
        y = x.view(10, 10).t()[2:5]
        y.add_(1)
        torch.add(x, 1, out=x)
        z = torch.empty(0)
        torch.add(x, x, out=z)
    assert sum(n for *_, n in tr.events) == 800 and len(tr.live) == 2


def test_gradients_dropped_within_the_step_and_frozen_networks():
    G, D = mlp(4, 6, 4), mlp(4, 5, 1)
    z, held = torch.randn(3, 4), torch.zeros(0)

    def step():
        D.requires_grad_(False)
        D(G(z)).sum().backward()
        nonlocal held
        held = torch.zeros(10_000)                        # the peak is here, while gradients of G exist
        held = torch.zeros(0)
        G.zero_grad()
        D.requires_grad_(True)
        D(G(z).detach()).sum().backward()
        D.zero_grad()
        D.requires_grad_(False)
    D.requires_grad_(False)
    led = measure_memory(step, dict(parameters=[G, D], data=z))
    assert led.by_category["gradients"] == 4 * count(G) and led.by_category["parameters"] == 4 * (count(G) + count(D))
    assert sum(n for _, c, n in led.events if c == "gradients" and n > 0) == 4 * (count(G) + count(D))
    assert not any(p.requires_grad for p in D.parameters()) and not any(p._post_accumulate_grad_hooks for p in [*G.parameters(), *D.parameters()])


def test_ema_buffers_and_data_made_within_the_step():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    ema, batch = copy.deepcopy(net), {}

    def step():
        batch["x"] = torch.randn(16, 4)
        net(batch["x"]).sum().backward()
        net.zero_grad()
        for a, b in zip(ema.parameters(), net.parameters()): a.data.lerp_(b.data, .1)
    led = measure_memory(step, dict(parameters=net, ema=ema, data=lambda: batch))
    whole = 4 * (20 + 8 + 8) + 8
    assert led.by_category["parameters"] == whole == led.by_category["ema"]
    assert led.end == 2 * whole + 256 and any(c == "data" for _, c, _ in led.events)


def test_double_backward_steps():
    D, real = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Softplus(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 1)), torch.randn(4, 3, 8, 8)
    G = mlp(6, 12, 48)

    def r1_step(weight):
        x = real.detach().requires_grad_(weight > 0)
        logits = D(x)
        (logits.sum() + (weight * r1_penalty(logits, x).mean() if weight else 0)).backward()
        D.zero_grad()

    def pl_step():
        ws = torch.randn(4, 2, 6, requires_grad=True)
        penalty, _ = path_length_penalty(path_lengths(G(ws.mean(1)).view(4, 3, 4, 4), ws), torch.zeros(()))
        penalty.mean().backward()
        G.zero_grad()
    plain, r1 = [measure_memory(lambda: r1_step(w), dict(parameters=D, data=real)) for w in (0, 5)]
    assert r1.peak > 1.2 * plain.peak and r1.start == r1.end == plain.start
    led = measure_memory(pl_step, dict(parameters=G))
    assert led.start == led.end == 4 * count(G) and led.by_category["activations"] > 0


def test_memory_in_no_group_is_called_other():
    net, stray = mlp(4, 4), torch.ones(4, 4)
    led = measure_memory(lambda: net(stray).sum().backward() or net.zero_grad(), dict(parameters=net))
    assert led.by_category["other"] == 64 and led.timeline[0][0] == 0.


def test_half_precision_counts_half():
    x = torch.randn(1000, dtype=torch.bfloat16)
    kept = []
    led = measure_memory(lambda: kept.append(x * 2) or kept.clear(), dict(data=x))
    assert led.by_category == dict(parameters=0, optimizer=0, gradients=0, data=2000, activations=2000)


def test_a_failing_step_carries_the_ledger_and_leaves_nothing_behind():
    net = mlp(4, 4)

    def step():
        net(torch.ones(2, 4)).sum().backward()
        raise RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom") as e: measure_memory(step, dict(parameters=net), warmup=0)
    assert "memory when the step failed: peak" in e.value.__notes__[0] and "gradients" in e.value.__notes__[0]
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    x = torch.ones(3) + 1                                 # the mode is off again
    assert x.sum() == 6


def test_deaths_in_another_thread_are_counted():
    box = []

    def step():
        box.append(torch.zeros(1000))
        t = threading.Thread(target=box.clear)
        t.start()
        t.join()
        box.append(torch.zeros(500))
        box.clear()
    led = measure_memory(step, {})
    assert led.peak == 4000 and led.end == 0


def test_stack_keeps_the_peak_and_text_names_the_blocks():
    net, x = mlp(30, 30), torch.randn(64, 30)
    led = measure_memory(lambda: net(x).square().sum().backward() or net.zero_grad(), dict(parameters=net, data=x))
    for points in (1, 7, 500):
        times, parts = led.stack(points=points)
        assert len(times) <= points + 1 and all(len(v) == len(times) for v in parts.values())
        assert max(map(sum, zip(*parts.values()))) == led.peak and times == sorted(times)
    text = led.to_text(top=3)
    assert "activations" in text and text.count(" from ") == 3


def test_json_form(tmp_path):
    import json
    net, x = mlp(30, 30), torch.randn(64, 30)
    groups = dict(gradients=net, parameters=net, data=x)      # a group of that name does not steal the weights
    led = measure_memory(lambda: net(x).square().sum().backward() or net.zero_grad(), groups)
    assert led.by_category["parameters"] == 4 * count(net)
    d = json.loads(json.dumps(led.to_dict(points=10, top=2)))
    assert d["peak"] == led.peak == sum(d["by_category"].values()) and len(d["blocks"]) == 2 and len(d["times"]) <= 11
    assert max(map(sum, zip(*d["bands"].values()))) == led.peak


def test_an_empty_step_is_legal():
    led = measure_memory(lambda: None, {})
    assert led.peak == led.end == 0 and led.stack()[0] == [] and "peak 0 B" in led.to_text()


def test_groups_and_errors():
    a = torch.ones(1)
    assert [t is a for t in tensors_in({"x": [a, (a,)], "y": 3})] == [True, True]
    assert len(group_tensors([None, a, {"k": a}, (lambda: [a])])) == 3
    for call, words in ((lambda: measure_memory(None, {}), "step_fn"), (lambda: measure_memory(lambda: 0, []), "groups have no names"), (lambda: measure_memory(lambda: 0, {"data": 3}), "cannot be counted")):
        with pytest.raises(UserError, match=words): call()
    led = measure_memory(lambda: None, dict(data=iter([a])))
    assert led.by_category["data"] == 4
