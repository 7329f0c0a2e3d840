"""Seconds per kimg and peak memory of StyleGAN2 training steps on random pictures: the median of each phase, weighted by how often it runs.

    python benchmarks/stylegan.py --cfg paper256 --resolution 256 --batch 32 --out FOLDER
    GAN_COURSE_COMMIT=... where the copy has no git history

FOLDER (benchmarks/records by default) receives stylegan_CFG_RESOLUTION.json.
"""
import statistics
import tempfile
import time

import torch
from common import write_record
from fastcore.script import call_parse

from gan_course.core import choose_device
from gan_course.gan_trainer import Trainer
from gan_course.presets import build_networks, resolve
from gan_course.training import ema_beta, update_ema

MODULES = ["augment", "gan_loss", "gan_trainer", "layers", "losses", "networks", "ops", "precision", "presets", "stylegan2", "training"]


class RandomPictures(torch.utils.data.Dataset):
    "A few random pictures: what is shown does not change the time of a step."
    label_dim, num_channels = 0, 3

    def __init__(self, resolution, size=64):
        self.resolution, self.name = resolution, f"random{resolution}"
        self.pictures = torch.randint(0, 256, (size, 3, resolution, resolution), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def __len__(self): return len(self.pictures)
    def __getitem__(self, i): return self.pictures[i], torch.zeros(0)
    def digest(self): return "random"


def timed(function, device, repeats):
    "Seconds of each call, after the device has finished."
    out = []
    for _ in range(repeats):
        if device.type == "cuda": torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda": torch.cuda.synchronize()
        out.append(time.perf_counter() - start)
    return out


def phase_times(trainer, repeats):
    "name -> seconds of one run of each phase, and of the moving average."
    real, c = trainer.next_batch()
    beta = ema_beta(trainer.cfg, 10**6, trainer.batch)
    jobs = {p.name: lambda p=p: trainer.run_phase(p, real, c) for p in trainer.phases}
    jobs["ema"] = lambda: update_ema(trainer.G_ema, trainer.G, beta)
    for job in jobs.values(): timed(job, trainer.device, 3)                                   # warm up: algorithms, memory
    return {name: timed(job, trainer.device, repeats) for name, job in jobs.items()}


@call_parse
def main(
    cfg:str="paper256", # preset
    resolution:int=256, # px
    batch:int=32, # images in one step
    batch_gpu:int=0, # images in one pass; 0: all
    aug:str="noaug", # noaug, or fixed with strength 0.2
    tf32:bool=False, # round float32 factors
    repeats:int=9, # timed runs of each phase
    out:str="", # folder of the record
    device:str="auto" # where
):
    "Measure, and write the record."
    train = dict(batch=batch, batch_gpu=batch_gpu or None, r1_gamma=1.0, aug=aug, aug_p=0.2 if aug == "fixed" else 0.0, tf32=tf32, grid=1)
    settings, data = resolve(cfg, resolution, train=train), RandomPictures(resolution)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(*build_networks(settings, data), data, settings.train, folder, choose_device(device))
        times = phase_times(trainer, repeats)
    every = {p.name: p.interval for p in trainer.phases} | {"ema": 1}
    medians = {name: statistics.median(t) for name, t in times.items()}
    seconds = sum(t / every[name] for name, t in medians.items())
    memory = {}
    if trainer.device.type == "cuda": memory = {"peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)}
    result = {"settings": settings.to_dict(), "resolution": resolution, "seconds_per_kimg": round(seconds * 1000 / batch, 3), **memory,
              "phases": {n: {"median_s": round(medians[n], 5), "least_s": round(min(t), 5), "most_s": round(max(t), 5), "every": every[n]} for n, t in times.items()}}
    name = f"stylegan_{cfg}_{resolution}" + ("" if aug == "noaug" else f"_{aug}") + ("_tf32" if tf32 else "")
    write_record(name, MODULES, result, out)
    print(name, f"batch {batch}: {result['seconds_per_kimg']} s per kimg", memory, flush=True)
