"""Seconds and peak memory of filtered_lrelu, plain (`ops.filtered_lrelu`: autograd keeps every enlarged picture) against lean (`fast_ops.lean_filtered_lrelu`: recomputes in chunks).

    python benchmarks/filtered_lrelu.py --out FOLDER
    GAN_COURSE_COMMIT=... where the copy has no git history

Both sides run in turn in one process; medians. On a CPU the shapes are small, and memory is what autograd keeps.
FOLDER receives filtered_lrelu_cpu.json or filtered_lrelu_cuda.json.
"""
import statistics
import time

import torch
from common import RECORDS, write_record
from fastcore.script import call_parse

from gan_course import stylegan3
from gan_course.core import choose_device
from gan_course.fast_ops import lean_filtered_lrelu
from gan_course.ops import design_lowpass_filter, filtered_lrelu

MODULES = ["fast_ops", "networks", "ops", "stylegan3"]
SIDES = {"plain": filtered_lrelu, "lean": lean_filtered_lrelu}


class LiveBytes:
    "The bytes that autograd keeps for backward passes: the measure of the CPU, which has no counter of its own."
    def __enter__(self):
        self.seen = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        self.hooks.__enter__()
        return self
    def pack(self, t):
        self.seen[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t)   # held, or its address would be used again
        return t
    def __exit__(self, *a): self.hooks.__exit__(*a)


def once(step, device):
    "Seconds and bytes of one call: on CUDA the peak of the allocator above what was there, else the bytes kept for backward."
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
    start = time.perf_counter()
    with LiveBytes() as live: step()
    return time.perf_counter() - start, sum(n for n, _ in live.seen.values())


def compare(steps, device, runs):
    "name -> seconds, MiB: medians over runs, the sides in turn."
    found = {name: [] for name in steps}
    for i in range(runs + 1):
        for name, step in steps.items():
            measured = once(step, device)
            if i: found[name].append(measured)                           # the first round warms up
    out = {name: {"seconds": round(statistics.median(s for s, _ in v), 5), "MiB": round(statistics.median(b for _, b in v) / 2**20, 2)} for name, v in found.items()}
    out["ratios"] = {k: round(out["plain"][k] / out["lean"][k], 2) for k in ("seconds", "MiB")}
    return out


def layer_steps(shape, radial, second, device):
    "One layer's activation, forward and backward, or with a second backward as in a gradient penalty."
    fu = design_lowpass_filter(12, 8, 8, 64).to(device)
    fd = design_lowpass_filter(12, 8, 8, 64, radial=radial).to(device)
    x = torch.randn(shape, device=device, requires_grad=True)
    def run(f):
        y = f(x, fu, fd, up=2, down=2, padding=11, clamp=256)
        if not second: return torch.autograd.grad(y.square().sum(), x)
        g, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)
    return {name: lambda f=f: run(f) for name, f in SIDES.items()}


def network_steps(resolution, batch, cbase, cmax, precision, device):
    "The generator of StyleGAN3-T, forward and backward, with either activation."
    torch.manual_seed(0)
    half = dict(num_fp16_res=4) if precision == "fp16" else dict(num_fp16_res=0)
    G = stylegan3.StyleGAN3Generator(512, 0, 512, resolution, 3, mapping_kwargs=dict(num_layers=2), channel_base=cbase, channel_max=cmax, **half).to(device)
    z = torch.randn(batch, 512, device=device)
    def run(f):
        stylegan3.lean_filtered_lrelu = f
        try: G(z).square().mean().backward()
        finally:
            stylegan3.lean_filtered_lrelu = lean_filtered_lrelu
            for p in G.parameters(): p.grad = None
    return {name: lambda f=f: run(f) for name, f in SIDES.items()}


@call_parse
def main(
    out:str=str(RECORDS), # folder for the record
    device:str="auto", # where to measure
    runs:int=5 # of each side; medians count
):
    "Measure and write the record."
    where = choose_device(device)
    cuda = where.type == "cuda"
    shape = [16, 512, 148, 148] if cuda else [2, 16, 52, 52]
    rows = {}
    for name, radial, second in (("separable filters", False, False), ("separable filters, second backward", False, True), ("radial filter, as in R", True, False)):
        rows[f"layer {shape}, {name}"] = compare(layer_steps(shape, radial, second, where), where, runs)
        print(name, rows[f"layer {shape}, {name}"], flush=True)
    sizes = [(256, 16, 32768, 512, "fp16"), (256, 8, 32768, 512, "fp32")] if cuda else [(64, 2, 1024, 32, "fp32")]
    for resolution, batch, cbase, cmax, precision in sizes:
        key = f"generator T, {resolution} px, batch {batch}, channel_base {cbase}, {precision}"
        rows[key] = compare(network_steps(resolution, batch, cbase, cmax, precision, where), where, max(runs // 2, 1))
        print(key, rows[key], flush=True)
    write_record(f"filtered_lrelu_{where.type}", MODULES, {"runs": runs, "memory": "peak of the allocator above its start" if cuda else "bytes kept for the backward pass", "rows": rows}, out)
