"""gan_train with the official script's options: presets, dry run, growing, augmentation, precision, fine-tuning, and what is refused."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gan_course import cli, presets, train_run
from gan_course.checkpoint import latest_checkpoint, load_checkpoint, read_meta
from gan_course.core import UserError
from gan_course.faces import FacesDataset
from gan_course.images import save_image
from gan_course.tfrecord import write_tfrecords

SMALL = dict(cbase=128, cmax=8, map_depth=2, device="cpu")


@pytest.fixture(scope="module")
def pics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "pics"
    folder.mkdir()
    faces = FacesDataset(16, resolution=16)
    for i in range(16): save_image(folder / f"{i:02d}.png", faces[i][0].permute(1, 2, 0).numpy())
    return folder


def train(pics, out, **kw):
    cli.gan_train(data=str(pics), outdir=str(out), **{**SMALL, "kimg": 0.016, "batch": 8, "tick": 0.016, **kw})
    return sorted(Path(out).iterdir())[-1]


def options(run): return json.loads((run / "training_options.json").read_text())


# ---- the table of configurations, value by value (StyleGAN2, Table 1 and run_training; StyleGAN2-ADA, train.py)

CONFIGS = {  # networks, width, growing, lazy, path length, gamma, learning rate, batch
    "config-a": ("adain", 16384, True, False, 0, 10, None, None), "config-b": ("modulated", 16384, True, False, 0, 10, None, None),
    "config-c": ("modulated", 16384, True, True, 0, 10, None, None), "config-d": ("modulated", 16384, True, True, 2, 10, None, None),
    "config-e": ("stylegan2", 16384, False, True, 2, 100, 0.002, 32), "config-f": ("stylegan2", 32768, False, True, 2, 10, 0.002, 32),
    "stylegan2": ("stylegan2", 32768, False, True, 2, 10, 0.002, 32), "paper256": ("stylegan2", 16384, False, True, 2, 1, 0.0025, 64),
    "paper512": ("stylegan2", 32768, False, True, 2, 0.5, 0.0025, 64), "paper1024": ("stylegan2", 32768, False, True, 2, 2, 0.002, 32),
    "cifar": ("stylegan2", 32768, False, True, 0, 0.01, 0.0025, 64)}

@pytest.mark.parametrize("name", list(CONFIGS))
def test_configuration(name):
    r = presets.find_preset(name, 256, 8)
    assert (r.networks, r.channel_base, r.growing, r.lazy, r.pl_weight, r.gamma, r.lr, r.batch) == CONFIGS[name]
    assert r.precision == ("fp32" if name.startswith("config") else "official")
    assert r.map_depth == (2 if name == "cifar" else 8) and r.ema_rampup == (0.05 if name == "cifar" else None)

@pytest.mark.parametrize("resolution,gpus,batch,gamma,lr", [(32, 1, 32, 0.0064, 0.0025), (128, 1, 32, 0.1024, 0.0025), (256, 1, 16, 0.8192, 0.0025), (512, 8, 64, 0.8192, 0.0025), (1024, 8, 32, 6.5536, 0.002)])
def test_auto(resolution, gpus, batch, gamma, lr):
    r = presets.find_preset("auto", resolution, gpus)
    assert (r.batch, r.lr) == (batch, lr) and r.gamma == pytest.approx(gamma) and r.ema_kimg == pytest.approx(batch * 10 / 32)


# ---- what works

def test_dry_run_writes_nothing(pics, tmp_path, capsys):
    cli.gan_train(data=str(pics), outdir=str(tmp_path / "runs"), cfg="stylegan2", gpus=8, scale_lr=True, batch=64, dry_run=True, **SMALL)
    text = capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert "step        64 images = 8 in a pass x 8 device(s) x 1 round(s)" in text
    assert "learning rates times sqrt(64/32) = 1.414" in text and "s per kimg here" in text and "synthesis.b16.conv1" in text and "b4.out" in text

@pytest.mark.parametrize("cfg", ["config-a", "config-d"])
def test_growing_runs(cfg, pics, tmp_path):
    cli.gan_train(data=str(pics), outdir=str(tmp_path), cfg=cfg, kimg=0.3, aug="noaug", **SMALL)
    run = tmp_path / "00000-pics"
    line = json.loads((run / "stats.jsonl").read_text().splitlines()[-1])
    assert line["Progress/lod"]["mean"] == 1.0 and line["Progress/resolution"]["mean"] == 8 and line["Progress/batch"]["mean"] == 256
    cli.gan_generate(str(run), seeds="0-1", device="cpu")
    assert (run / "generated" / "grid.png").exists()

def test_ada_moves_and_is_resumed(pics, tmp_path):
    run = train(pics, tmp_path, kimg=0.128)
    state, meta = load_checkpoint(latest_checkpoint(run))
    assert meta["config"]["aug"] == "ada" and state["ada"]["iterations"] == 16
    more = train(pics, tmp_path, kimg=0.144, resume=str(run), cbase=None, cmax=None, map_depth=None)
    assert load_checkpoint(latest_checkpoint(more))[0]["ada"]["iterations"] == 18
    first = json.loads((run / "stats.jsonl").read_text().splitlines()[0])
    assert 0 <= first["Progress/augment"]["mean"] < 0.01                          # ada starts at 0
    assert "Progress/augment" in json.loads((more / "stats.jsonl").read_text().splitlines()[-1])

@pytest.mark.parametrize("kw,precision", [(dict(), "official"), (dict(fp32=True), "fp32"), (dict(amp=True), "amp")])
def test_precision(kw, precision, pics, tmp_path):
    meta = read_meta(latest_checkpoint(train(pics, tmp_path, aug="noaug", **kw)))
    assert meta["config"]["precision"] == precision
    assert meta["G_kwargs"]["num_fp16_res"] == (4 if precision == "official" else 0)

def test_fixed_strength_and_freeze(pics, tmp_path):
    meta = read_meta(latest_checkpoint(train(pics, tmp_path, aug="fixed", p=0.4, augpipe="bg", freezed=2)))
    assert (meta["config"]["aug_p"], meta["config"]["augpipe"], meta["D_kwargs"]["block_kwargs"]) == (0.4, "bg", dict(freeze_layers=2))

def test_transfer_to_labels(pics, tmp_path, capsys):
    run = train(pics, tmp_path / "a", aug="noaug")
    labelled = tmp_path / "labelled"
    labelled.mkdir()
    for p in pics.iterdir(): (labelled / p.name).write_bytes(p.read_bytes())
    (labelled / "dataset.json").write_text(json.dumps({"labels": [[p.name, i % 2] for i, p in enumerate(sorted(pics.iterdir()))]}))
    capsys.readouterr()
    more = train(labelled, tmp_path / "b", aug="ada", cond=True, transfer=str(run))
    assert "re-made" in capsys.readouterr().out
    config = options(more)["config"]
    assert (config["aug_kimg"], config["ema_rampup"]) == (100, None)              # fine-tuning, as officially

def test_records_of_the_tensorflow_code(pics, tmp_path):
    faces = FacesDataset(8, resolution=16)
    write_tfrecords(tmp_path / "records", [faces[i][0] for i in range(8)])
    assert options(train(tmp_path / "records", tmp_path / "runs", aug="noaug"))["dataset"]["size"] == 8

def command(*args, **kw):
    tool = Path(sys.executable).with_name("gan_train")
    return subprocess.Popen([str(tool), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"}, **kw)

def test_hyphens_and_values_as_in_the_official_script(pics, tmp_path):
    p = command(f"--outdir={tmp_path}", f"--data={pics}", "--batch=8", "--batch-gpu=4", "--cond=0", "--mirror=1", "--aug=noaug", "--cbase=128", "--cmax", "8", "--map-depth=2", "--kimg=0.016", "--tick=0.016", "--device=cpu")
    out, err = p.communicate(timeout=120)
    assert p.returncode == 0, err
    o = options(tmp_path / "00000-pics")
    assert (o["config"]["batch_gpu"], o["dataset"]["size"]) == (4, 32)

def test_sigterm_saves_and_stops(pics, tmp_path):
    p = command(f"--outdir={tmp_path}", f"--data={pics}", "--batch=8", "--aug=noaug", "--cbase=128", "--cmax=8", "--map-depth=2", "--kimg=1000", "--device=cpu")
    until = time.time() + 90
    while not list(tmp_path.glob("*/memory.json")) and time.time() < until: time.sleep(0.1)
    p.send_signal(signal.SIGTERM)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 143 and "SIGTERM" in out + err, (p.returncode, err)
    assert load_checkpoint(latest_checkpoint(tmp_path / "00000-pics"))[1]["cur_nimg"] > 0


# ---- what is refused

@pytest.mark.parametrize("kw,text", [
    (dict(cfg="papper256"), "paper256"), (dict(aug="ada", p=0.1), "aug=fixed only"), (dict(aug="fixed", target=0.5), "aug=ada only"), (dict(aug="adda"), "aug"),
    (dict(aug="ada", augpipe="bgg"), "bgc"), (dict(fp32=True, amp=True), "exclude"), (dict(gpus=2), "several devices"),
    (dict(cfg="config-b", amp=True, batch=None, tick=None), "float32 only"), (dict(cfg="config-b"), "by resolution"), (dict(freezed=-1), "negative"), (dict(on_nonfinite="go"), "on_nonfinite"),
    (dict(resume="a", transfer="b"), "exclude"), (dict(transfer="nowhere.pkl"), "nowhere.pkl"), (dict(mbstd_group=3), "mbstd")])
def test_refused(kw, text, pics, tmp_path):
    with pytest.raises(UserError, match=text): train(pics, tmp_path / "runs", **kw)

def test_wrong_switch_value():
    with pytest.raises(UserError, match="on or off"): cli.python_options(["--cond=maybe"], cli.gan_train)

def test_settings_survive_json(pics):
    s = presets.resolve("auto", 16)
    assert presets.Settings(**{**s.to_dict(), "train": s.train}) == s
    assert train_run.given(a=None, b=1) == {"b": 1}

@pytest.mark.parametrize("cfg", ["config-a", "stylegan2"])
def test_export_and_generate(cfg, pics, tmp_path):
    kw = dict(batch=None, tick=None, kimg=0.2) if cfg == "config-a" else {}
    run = train(pics, tmp_path / "runs", cfg=cfg, aug="noaug", **kw)
    cli.gan_export(str(run), str(tmp_path / "small"), dtype="float16")
    cli.gan_generate(str(tmp_path / "small.safetensors"), seeds="0-1", outdir=str(tmp_path / "out"), device="cpu")
    assert (tmp_path / "out" / "grid.png").exists()
