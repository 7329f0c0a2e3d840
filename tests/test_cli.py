"""The console commands as a newcomer meets them: what works, and what each fault of the input ends in."""
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gan_course import cli, core
from gan_course.checkpoint import latest_checkpoint, load_checkpoint
from gan_course.images import decode_image

SMALL = dict(batch=8, cbase=128, cmax=8, map_depth=2, tick=0.008, device="cpu", aug="noaug")


def picture(path, size=(16, 16), mode="RGB", seed=0):
    rng = np.random.RandomState(seed)
    Image.fromarray(rng.randint(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode).save(path)
    return path


@pytest.fixture
def pics(tmp_path):
    folder = tmp_path / "pics"
    folder.mkdir()
    for i in range(8): picture(folder / f"{i}.png", seed=i)
    return folder


@pytest.fixture
def run(pics, tmp_path):
    cli.gan_train(data=str(pics), outdir=str(tmp_path / "runs"), kimg=0.008, **SMALL)
    return tmp_path / "runs" / "00000-pics"


def refused(capsys, code, *parts, call, **kwargs):
    "The command must end with `code` and one message on stderr, without a traceback, that holds every part."
    capsys.readouterr()                                               # what a fixture printed, progress bars for one
    with pytest.raises(SystemExit) as stop, cli.clear_errors(): call(**kwargs)
    err = capsys.readouterr().err
    assert stop.value.code == code
    assert err.startswith("error: ") and err.count("error: ") == 1 and "Traceback" not in err and "Next: " in err, err
    for part in parts: assert part in err, f"{part!r} is not in {err!r}"


def train_refused(capsys, *parts, data, tmp_path, **kwargs):
    refused(capsys, 2, *parts, call=cli.gan_train, data=str(data), outdir=str(tmp_path / "bad"), kimg=0.008, **{**SMALL, **kwargs})


# ---- bad data

def test_missing_folder(capsys, tmp_path):
    train_refused(capsys, "nowhere", data=tmp_path / "nowhere", tmp_path=tmp_path)

def test_empty_folder(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    train_refused(capsys, "empty", data=tmp_path / "empty", tmp_path=tmp_path)

def test_truncated_picture_is_named_before_training(capsys, pics, tmp_path):
    data = (pics / "5.png").read_bytes()
    (pics / "5.png").write_bytes(data[:len(data) // 2])
    with pytest.raises(SystemExit) as stop: cli.gan_audit(str(pics))
    assert stop.value.code == 1 and "5.png" in capsys.readouterr().out
    refused(capsys, 2, "5.png", call=cli.gan_pack, source=str(pics), dest=str(tmp_path / "p.zip"), resolution=16)
    assert not (tmp_path / "p.zip").exists()

def test_text_named_png(capsys, pics, tmp_path):
    (pics / "8.png").write_text("no picture")
    train_refused(capsys, "8.png", data=pics, tmp_path=tmp_path)

def test_another_size(capsys, pics, tmp_path):
    picture(pics / "7.png", size=(32, 32))
    train_refused(capsys, "7.png", "32", "16", data=pics, tmp_path=tmp_path)

def test_resolution_not_a_power_of_two(capsys, tmp_path):
    (tmp_path / "odd").mkdir()
    picture(tmp_path / "odd" / "a.png", size=(24, 24))
    train_refused(capsys, "24", data=tmp_path / "odd", tmp_path=tmp_path)
    refused(capsys, 2, "24", call=cli.gan_pack, source=str(tmp_path / "odd"), dest=str(tmp_path / "p.zip"), resolution=24)

def test_labels_miss_one_file(capsys, pics, tmp_path):
    (pics / "dataset.json").write_text(json.dumps({"labels": [[f"{i}.png", i % 2] for i in range(7)]}))
    train_refused(capsys, "7.png", data=pics, tmp_path=tmp_path, cond=True)

def test_conditional_without_labels(capsys, pics, tmp_path):
    train_refused(capsys, "label", data=pics, tmp_path=tmp_path, cond=True)

def test_zip_from_a_mac_trains(pics, tmp_path):
    with zipfile.ZipFile(tmp_path / "mac.zip", "w") as z:
        for i, p in enumerate(sorted(pics.iterdir())): z.write(p, f"pics/{i}{'.PNG' if i else '.png'}")
        z.writestr("__MACOSX/pics/._0.png", b"\0")
        z.writestr("pics/.DS_Store", b"\0")
        z.writestr("pics/sub/", b"")
    cli.gan_train(data=str(tmp_path / "mac.zip"), outdir=str(tmp_path / "runs"), kimg=0.008, **SMALL)
    options = json.loads((tmp_path / "runs" / "00000-mac" / "training_options.json").read_text())
    assert options["dataset"]["size"] == 8

@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "LA", "RGBA", "I;16"])
def test_every_mode_packs_to_rgb(mode, tmp_path):
    (tmp_path / "in").mkdir()
    if mode == "I;16": Image.fromarray(np.arange(256, dtype=np.uint16).reshape(16, 16) * 257).save(tmp_path / "in" / "a.png")
    else: picture(tmp_path / "in" / ("a.jpg" if mode == "CMYK" else "a.png"), mode=mode)
    cli.gan_pack(str(tmp_path / "in"), str(tmp_path / "p.zip"), 16)
    with zipfile.ZipFile(tmp_path / "p.zip") as z:
        inside = Image.open(z.open("00000/img00000000.png"))
        assert (inside.mode, inside.size) == ("RGB", (16, 16))
        if mode == "I;16": assert np.abs(np.asarray(inside)[..., 0].astype(int).ravel() - np.arange(256)).max() <= 1


def test_skipping_is_a_choice_and_is_said(capsys, pics, tmp_path):
    (pics / "8.png").write_text("no picture")
    cli.gan_pack(str(pics), str(tmp_path / "p.zip"), 16, on_error="skip")
    out = capsys.readouterr().out
    assert "8 pictures" in out and "skipped 8.png: " in out

def test_audit_before_packing_lets_sizes_differ(capsys, pics):
    picture(pics / "7.png", size=(40, 32))
    with pytest.raises(SystemExit): cli.gan_audit(str(pics))
    cli.gan_audit(str(pics), any_size=True)


# ---- bad settings and files

def test_batch_not_divisible(capsys, pics, tmp_path):
    train_refused(capsys, "batch_gpu", "remainder 2", "set batch_gpu to 2 or 4", data=pics, tmp_path=tmp_path, batch_gpu=3)

def test_run_folder_that_cannot_be_made(capsys, pics, tmp_path):
    (tmp_path / "bad").write_text("a file, not a folder")
    train_refused(capsys, "cannot make a run folder", data=pics, tmp_path=tmp_path)

def test_run_folder_without_permission(capsys, pics, tmp_path, monkeypatch):
    def denied(*a, **k): raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(core.tempfile, "NamedTemporaryFile", denied)
    train_refused(capsys, "Permission denied", data=pics, tmp_path=tmp_path)

def test_no_space_is_found_before_the_first_step(capsys, pics, tmp_path, monkeypatch):
    monkeypatch.setattr(core.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10 ** 9, 10 ** 9 - 10 ** 6, 10 ** 6))
    train_refused(capsys, "not enough free space", data=pics, tmp_path=tmp_path)
    assert not list((tmp_path / "bad").rglob("stats.jsonl"))

def test_missing_device(capsys, pics, tmp_path):
    train_refused(capsys, "not available here", data=pics, tmp_path=tmp_path, device="cuda:99")

def test_snapshot_cut_short(capsys, run, pics, tmp_path):
    snapshot = latest_checkpoint(run)
    cut = snapshot.read_bytes()[:-200]
    snapshot.write_bytes(cut)
    train_refused(capsys, snapshot.name, data=pics, tmp_path=tmp_path, resume=str(snapshot))
    refused(capsys, 2, snapshot.name, call=cli.gan_generate, network=str(snapshot), device="cpu")
    assert snapshot.read_bytes() == cut                      # nothing of the user's is touched

def test_cut_snapshot_of_a_run_falls_back_to_the_previous_one(run, pics, tmp_path):
    cli.gan_train(data=str(pics), outdir=str(tmp_path / "more"), kimg=2.0, snap=1, **{**SMALL, "tick": 1.0}, resume=str(run))
    more = tmp_path / "more" / "00000-pics"
    newest = latest_checkpoint(more)
    newest.write_bytes(newest.read_bytes()[:-200])
    before = len(list(more.glob("network-snapshot-*.pt")))
    assert before >= 2
    good = latest_checkpoint(more)
    assert good != newest and load_checkpoint(good)[1]["cur_nimg"] < 2000
    assert len(list(more.glob("*.bad"))) == 1                         # kept aside, not deleted

def test_snapshot_of_another_architecture(capsys, run, pics, tmp_path):
    train_refused(capsys, "snapshot of another architecture", "synthesis.b4.const", "(4, 4, 4)", "(8, 4, 4)", data=pics, tmp_path=tmp_path, resume=str(run), cmax=4)

def test_generate_refuses_bad_seeds(capsys, run):
    refused(capsys, 2, "'x'", call=cli.gan_generate, network=str(run), seeds="0,x", device="cpu")


# ---- what works

def test_run_folder_is_complete(run):
    names = {p.name for p in run.iterdir()}
    assert {"reals.png", "stats.jsonl", "training_options.json", "memory.json", "report.html", "fakes_000000.png"} <= names
    assert any(n.startswith("network-snapshot-") for n in names)

def test_generate_is_deterministic(run, tmp_path):
    for name in "ab": cli.gan_generate(str(run), seeds="0-2", outdir=str(tmp_path / name), device="cpu")
    for p in (tmp_path / "a").iterdir(): assert p.read_bytes() == (tmp_path / "b" / p.name).read_bytes()

def test_the_shipped_network_by_its_name(tmp_path, monkeypatch, capsys):
    "No file, no download: faces64 lies in the package; every path that is printed exists."
    monkeypatch.chdir(tmp_path)
    cli.gan_generate("faces64", seeds="0-1", device="cpu")
    cli.gan_generate("faces64", seeds="0", mix="1-2", device="cpu")
    printed = [Path(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert printed == [Path("generated/grid.png"), Path("generated/mix.png")] and all(p.exists() for p in printed)
    assert (decode_image("generated/seed0000.png") != decode_image("generated/seed0001.png")).any()

def test_conditional_training_and_generation(pics, tmp_path, capsys):
    (pics / "dataset.json").write_text(json.dumps({"labels": [[f"{i}.png", i % 2] for i in range(8)]}))
    cli.gan_train(data=str(pics), outdir=str(tmp_path / "runs"), kimg=0.008, cond=True, **SMALL)
    run = str(tmp_path / "runs" / "00000-pics")
    cli.gan_generate(run, seeds="0-1", class_idx=1, device="cpu")
    refused(capsys, 2, "0 to 1", call=cli.gan_generate, network=run, seeds="0", class_idx=2, device="cpu")

def script(name, *args, **env):
    tool = Path(sys.executable).with_name(Path(name).name)
    return subprocess.run([str(tool), *args], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2", **env})

@pytest.mark.parametrize("name", ["gan_quickstart", "gan_train", "gan_generate", "gan_metrics", "gan_export", "gan_audit", "gan_pack"])
def test_help_of_every_command(name):
    got = script(name, "--help")
    assert got.returncode == 0 and "usage:" in got.stdout and "--help" in got.stdout

def test_the_installed_command_exits_with_2(tmp_path):
    got = script("gan_train", "--data", str(tmp_path / "nowhere"))
    assert got.returncode == 2 and got.stderr.startswith("error: ") and "Traceback" not in got.stderr

def test_quickstart_on_real_photographs(tmp_path):
    "Crops of the photographs in scikit-image's wheel, through the installed command, for a few seconds."
    from skimage import data as photos
    (tmp_path / "photos").mkdir()
    for name in ("astronaut", "chelsea", "coffee"):
        img = getattr(photos, name)()
        for i in range(4): Image.fromarray(img[20 * i:20 * i + 200, 30 * i:30 * i + 150]).save(tmp_path / "photos" / f"{name}{i}.jpg")
    got = script("gan_quickstart", "--data", str(tmp_path / "photos"), "--outdir", str(tmp_path / "runs"), "--device", "cpu", "--minutes", "0.1")
    assert got.returncode == 0, got.stderr
    run = tmp_path / "runs" / "00000-quickstart"
    more = script(*[part for part in got.stdout.splitlines() if "--resume" in part][0].split("#")[0].split()[:5], "--minutes", "0.05",
                  "--outdir", str(tmp_path / "runs"), "--device", "cpu")      # the second of the printed commands, for a shorter time
    assert more.returncode == 0, more.stderr
    images = [json.loads((tmp_path / "runs" / f"0000{i}-quickstart" / "training_options.json").read_text())["cur_nimg"] for i in (0, 1)]
    assert images[0] == 0 < images[1]
    assert "report.html" in got.stdout and len([l for l in got.stdout.splitlines() if l.startswith("  ")]) == 3
    page = (run / "report.html").read_text()
    assert page.count("<img") >= 8 and "http://" not in page and "https://" not in page
    assert np.asarray(Image.open(run / "reals.png")).std() > 20
