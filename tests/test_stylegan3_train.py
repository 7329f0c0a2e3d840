"gan_train --cfg stylegan3-t and stylegan3-r: the official settings (train.py of stylegan3), resume, export, metrics, and what is refused."
import json

import pytest
import torch
from test_gan_train import SMALL, options, pics, train  # noqa: F401, pics is a fixture

from gan_course import cli, presets
from gan_course.checkpoint import latest_checkpoint, load_checkpoint, read_meta
from gan_course.core import UserError
from gan_course.generate import load_generator
from gan_course.stylegan3 import StyleGAN3Generator

SG3 = ["stylegan3-t", "stylegan3-r"]


# ---- the settings, value by value

@pytest.mark.parametrize("name", SG3)
@pytest.mark.parametrize("resolution,gamma", [(128, 0.5), (256, 2), (512, 8), (1024, 32)])
def test_settings(name, resolution, gamma):
    s = presets.resolve(name, resolution, train=dict(batch=32))
    t, r = s.train, name == "stylegan3-r"
    assert (t.g_lr, t.d_lr, t.r1_gamma, t.r1_interval, t.pl_weight, t.mixing_prob) == (0.0025, 0.002, gamma, 16, 0, 0)
    assert (t.ema_kimg, t.ema_rampup, t.blur_init_sigma, t.blur_fade_kimg, t.tf32) == (10, 0.05, 10 if r else 0, 200 if r else None, False)
    assert s.G_kwargs["mapping_kwargs"] == dict(num_layers=2) and s.G_kwargs["magnitude_ema_beta"] == 0.5 ** (32 / 20000)
    width = (s.G_kwargs["channel_base"], s.G_kwargs["channel_max"], s.G_kwargs.get("conv_kernel", 3), s.G_kwargs.get("use_radial_filters", False))
    assert width == ((65536, 1024, 1, True) if r else (32768, 512, 3, False))
    assert (s.D_kwargs["channel_base"], s.D_kwargs["channel_max"], s.D_kwargs["architecture"]) == (32768, 512, "resnet")
    assert (s.G_kwargs["num_fp16_res"], s.G_kwargs["conv_clamp"]) == (4, 256)


def test_generator_is_not_lazy_without_path_length():
    from gan_course.training import make_phases
    s = presets.resolve("stylegan3-t", 16, row=dict(channel_base=128, channel_max=8))
    nets = [torch.nn.Linear(1, 1) for _ in range(2)]
    phases = {p.name: p for p in make_phases(*nets, s.train)}
    assert list(phases) == ["Gmain", "Dmain", "Dreg"]
    assert phases["Gmain"].opt.param_groups[0]["lr"] == 0.0025 and phases["Gmain"].opt.param_groups[0]["betas"] == (0.0, 0.99)
    assert phases["Dmain"].opt.param_groups[0]["lr"] == pytest.approx(0.002 * 16 / 17)


# ---- what works

@pytest.mark.parametrize("name", SG3)
def test_train_resume_export_generate(name, pics, tmp_path):  # noqa: F811
    run = train(pics, tmp_path / "runs", cfg=name, kimg=0.016)
    meta = read_meta(latest_checkpoint(run))
    assert meta["config"]["aug"] == "ada" and presets.networks_of(meta["G_kwargs"]) == name
    more = train(pics, tmp_path / "runs", cfg=name, kimg=0.032, resume=str(run), cbase=None, cmax=None, map_depth=None)
    once = train(pics, tmp_path / "once", cfg=name, kimg=0.032)
    a, b = (load_checkpoint(latest_checkpoint(r))[0] for r in (more, once))
    for part in ("G", "D", "G_ema"):
        assert all(torch.equal(v, b[part][k]) for k, v in a[part].items()), part      # stopped and gone on, or never stopped: bit for bit
    cli.gan_export(str(more), str(tmp_path / "weights"), dtype="float16")
    G, about = load_generator(tmp_path / "weights.safetensors", "cpu")
    assert isinstance(G, StyleGAN3Generator) and about["kind"] == "stylegan3.Generator"
    cli.gan_generate(str(tmp_path / "weights.safetensors"), seeds="0-1", translate="0.1,0.2", rotate=30, outdir=str(tmp_path / "out"), device="cpu")
    assert (tmp_path / "out" / "grid.png").exists()


@pytest.mark.parametrize("kw,precision", [(dict(fp32=True), "fp32"), (dict(amp=True), "amp")])
def test_precision(kw, precision, pics, tmp_path):  # noqa: F811
    meta = read_meta(latest_checkpoint(train(pics, tmp_path, cfg="stylegan3-t", aug="noaug", **kw)))
    assert (meta["config"]["precision"], meta["G_kwargs"]["num_fp16_res"], meta["G_kwargs"]["conv_clamp"]) == (precision, 0, None)


def test_every_width_option_reaches_the_networks(pics, tmp_path):  # noqa: F811
    run = train(pics, tmp_path, cfg="stylegan3-r", cbase=256, cmax=12, map_depth=3, mbstd_group=2, glr=0.001, dlr=0.0005)
    meta = read_meta(latest_checkpoint(run))
    G, D, c = meta["G_kwargs"], meta["D_kwargs"], meta["config"]
    assert (G["channel_base"], G["channel_max"], G["mapping_kwargs"], D["channel_base"], D["channel_max"]) == (512, 24, dict(num_layers=3), 256, 12)
    assert (D["epilogue_kwargs"]["mbstd_group_size"], c["g_lr"], c["d_lr"]) == (2, 0.001, 0.0005)


def test_conditional(pics, tmp_path):  # noqa: F811
    from shutil import copytree
    data = copytree(pics, tmp_path / "pics")
    (data / "dataset.json").write_text(json.dumps({"labels": [[f"{i:02d}.png", i % 2] for i in range(16)]}))
    run = train(data, tmp_path / "runs", cfg="stylegan3-t", cond=True, aug="noaug")
    cli.gan_generate(str(run), seeds="0", class_idx=1, device="cpu")


def test_fine_tuning_does_not_blur(pics, tmp_path):  # noqa: F811
    run = train(pics, tmp_path, cfg="stylegan3-r", aug="noaug")
    assert options(run)["config"]["blur_init_sigma"] == 10 and options(run)["config"]["blur_fade_kimg"] == 8 * 200 / 32
    fine = train(pics, tmp_path, cfg="stylegan3-r", aug="noaug", transfer=str(run))
    assert (options(fine)["config"]["blur_init_sigma"], options(fine)["config"]["ema_rampup"]) == (0, None)


def test_equivariance_from_the_command_line(pics, tmp_path, capsys, monkeypatch):  # noqa: F811
    from gan_course import metrics
    small = {k: metrics.Metric("eq", 8, features="none", options=m.options) for k, m in metrics.metric_table().items() if m.kind == "eq"}
    monkeypatch.setattr(metrics, "metric_table", lambda: small)
    run = train(pics, tmp_path, cfg="stylegan3-t", aug="noaug", metrics="eqt1k_int")
    cli.gan_metrics(str(run), metrics="eqt1k_int,eqt1k_frac,eqr1k", device="cpu")
    text = capsys.readouterr().out
    assert "EQ-T (dB)" in text and "EQ-T, fractional (dB)" in text and "EQ-R (dB)" in text
    lines = [json.loads(line) for line in (run / "metric-eqt1k_int.jsonl").read_text().splitlines()]
    assert len(lines) >= 2 and not lines[0]["lower_is_better"] and lines[-1]["results"]["eqt1k_int"] > 20


# ---- what is refused

def refused(pics, tmp_path, *words, **kw):  # noqa: F811
    with pytest.raises(UserError) as e: train(pics, tmp_path, **kw)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_a_snapshot_of_the_other_family(pics, tmp_path):  # noqa: F811
    two = train(pics, tmp_path / "two", aug="noaug")
    three = train(pics, tmp_path / "three", cfg="stylegan3-t", aug="noaug")
    refused(pics, tmp_path / "a", "another family", "--cfg auto", cfg="stylegan3-t", resume=str(two))
    refused(pics, tmp_path / "a", "another family", "--cfg stylegan3-t", resume=str(three))
    refused(pics, tmp_path / "a", "another family", "--cfg stylegan3-t", cfg="stylegan3-r", resume=str(three), cbase=None, cmax=None, map_depth=None)
    refused(pics, tmp_path / "b", "nothing of the blocks fits", cfg="stylegan3-t", transfer=str(two))


def test_too_few_channels(pics, tmp_path):  # noqa: F811
    for name in SG3: refused(pics, tmp_path, "too few channels", cfg=name, cbase=16, cmax=1)


def test_a_data_set_whose_side_is_no_power_of_two(tmp_path):
    from PIL import Image
    for i in range(4): Image.new("RGB", (24, 24)).save(tmp_path / f"{i}.png")
    with pytest.raises(UserError, match="24"): cli.gan_train(data=str(tmp_path), outdir=str(tmp_path / "runs"), cfg="stylegan3-t", **SMALL)


def test_a_transform_without_inverse():
    G = StyleGAN3Generator(8, 0, 8, 16, 3, mapping_kwargs=dict(num_layers=1), channel_base=128, channel_max=8)
    with pytest.raises(UserError, match="no inverse"): G.set_transform(torch.diag(torch.tensor([1., 0., 1.])))
