"""Train StyleGAN2 or StyleGAN3 on the drawn faces for a given time; keep the curves, the grid, the settings, EQ-T and EQ-R, and the generator as safetensors.

    python benchmarks/quality_faces.py --resolution 64 --minutes 10 FOLDER
    python benchmarks/quality_faces.py --cfg stylegan3-t --cbase 2048 --cmax 64 --name _t --minutes 10 FOLDER
    GAN_COURSE_COMMIT=... where the copy has no git history, --resume SNAPSHOT to train on

FOLDER receives quality_facesN.json (the record), quality_facesN.png (samples above, drawn faces below), and facesN.safetensors with its .json.
"""
import shutil
from pathlib import Path

import torch
from common import moves, write_record
from fastcore.script import call_parse

from gan_course.core import choose_device
from gan_course.faces import FacesDataset
from gan_course.gan_trainer import Trainer
from gan_course.images import image_grid, save_image, to_float
from gan_course.presets import build_networks, resolve
from gan_course.report import read_stats
from gan_course.transfer import export_safetensors

MODULES = ["equivariance", "fast_ops", "gan_loss", "gan_trainer", "layers", "losses", "networks", "ops", "presets", "stylegan2", "stylegan3", "training"]
CURVES = ["Loss/G/loss", "Loss/D/loss", "Loss/scores/real", "Loss/scores/fake", "Loss/r1_penalty", "Timing/sec_per_kimg"]


def curves(run_dir):
    "name -> [[kimg, mean], ...] of every tick."
    series, _ = read_stats(run_dir)
    return {name: [[kimg, round(mean, 5)] for kimg, mean in series[name]] for name in CURVES if name in series}


def go_on(trainer, snapshot):
    "From a snapshot, with its curves, for as many minutes more."
    trainer.cfg.max_seconds += trainer.resume(snapshot).seconds
    shutil.copy(snapshot.with_name("stats.jsonl"), trainer.run_dir)


@call_parse
def main(
    out:str, # folder for what is kept
    cfg:str="auto", # preset: auto (StyleGAN2), stylegan3-t or stylegan3-r
    resolution:int=64, # px
    minutes:float=10, # wall time of training
    batch:int=64, # images in one step
    lr:float=0.003, # learning rate of G; of D too, but with StyleGAN3, where D has 0.8 of it as officially
    layers:int=14, # of StyleGAN3's generator before to-RGB
    blur_kimg:float=50, # with stylegan3-r: how long D sees blurred pictures
    gamma:float=1.0, # weight of R1
    cbase:int=4096, # channels times resolution
    cmax:int=128, # most channels of G
    d_cmax:int=256, # most channels of D
    z_dim:int=128, # length of z and w
    architecture:str="", # orig, skip or resnet for both; empty: as published
    precision:str="fp32", # a policy
    eq:int=1000, # pictures for each of EQ-T, EQ-T fractional and EQ-R; 0: do not measure
    size:int=50000, # drawn faces in the data set
    workers:int=0, # processes that draw
    resume:str="", # snapshot to go on with
    name:str="", # added to the names of the files
    device:str="auto" # where to train
):
    "Train, and write the record."
    three = cfg.startswith("stylegan3")
    row = dict(channel_base=cbase, channel_max=cmax, map_depth=2, precision=precision, mixing_prob=0.0 if three else 0.5, pl_weight=0.0)
    train = dict(batch=batch, g_lr=lr, d_lr=0.8 * lr if three else lr, r1_gamma=gamma, kimg=1e6, max_seconds=minutes * 60, ema_kimg=20.0, ema_rampup=0.05, tick_kimg=16, snapshot_ticks=8, image_ticks=8, keep=1, tf32=True, workers=workers)
    if cfg == "stylegan3-r": train |= dict(blur_fade_kimg=blur_kimg)
    settings = resolve(cfg, resolution, row=row, train=train)
    settings.G_kwargs.update(z_dim=z_dim, w_dim=z_dim)
    settings.G_kwargs |= dict(num_layers=layers) if three else dict(use_noise=False)
    settings.D_kwargs["channel_max"] = d_cmax
    if architecture:
        settings.D_kwargs["architecture"] = architecture
        if not three: settings.G_kwargs["architecture"] = architecture
    faces = FacesDataset(size, resolution=resolution)
    torch.manual_seed(0)
    out, stem = Path(out), f"quality_faces{resolution}{name}"
    trainer = Trainer(*build_networks(settings, faces), faces, settings.train, out / "run", choose_device(device))
    if resume: go_on(trainer, Path(resume))
    snapshot = trainer.fit(progress=False)
    real = to_float(torch.stack([faces[i * 277 % size][0] for i in range(len(trainer.grid_z))]))
    save_image(out / f"{stem}.png", image_grid(torch.cat([trainer.sample_grid(), real]), cols=12))
    export_safetensors(snapshot, out / f"faces{resolution}{name}", dtype="float16")
    write_record(stem, MODULES, {"resolution": resolution, "kimg": trainer.nimg / 1000, "seconds": round(trainer.seconds, 1),
                                 "settings": settings.to_dict(), "equivariance": moves(trainer.G_ema, eq) if eq else {}, "curves": curves(out / "run")}, out)
    print(stem, f"{trainer.nimg / 1000:.0f} kimg in {trainer.seconds:.0f} s, {trainer.seconds * 1000 / trainer.nimg:.2f} s per kimg", flush=True)
