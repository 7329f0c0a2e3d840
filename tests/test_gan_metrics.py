"""gan_metrics and gan_train --metrics: conditional and half-precision networks, several processes, interruption, what is refused."""
import copy
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gan_course import cli, measure_run, metrics
from gan_course.core import UserError
from gan_course.faces import FacesDataset
from gan_course.features import FeatureNet
from gan_course.images import save_image
from gan_course.metrics import Metric
from gan_course.path_length import PATHS
from gan_course.report import metrics_section
from gan_course.stylegan2 import Generator

LITE = dict(features="efficientnet-lite0", device="cpu")
TINY = dict(z_dim=8, w_dim=8, img_resolution=16, img_channels=3, mapping_kwargs=dict(num_layers=1), channel_base=128, channel_max=8)


@pytest.fixture(autouse=True)
def small_metrics(monkeypatch, tmp_path):
    "The same names with fewer pictures, and a cache of the test's own."
    monkeypatch.setattr(metrics, "metric_table", lambda: {"fid1k": Metric("fid", 40), "kid1k": Metric("kid", 40), "pr1k3": Metric("prc", 40, features="vgg16"), "is1k": Metric("isc", 40),
                                                         "ppl2_wend": Metric("ppl", 100, "lpips", PATHS["ppl2_wend"])})
    monkeypatch.setenv("GAN_COURSE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    "Twenty-four faces with the style of their hair as label."
    folder, faces = tmp_path_factory.mktemp("labelled"), FacesDataset(24, 16, label="hair_style")
    for i in range(24): save_image(folder / f"{i:02d}.png", faces[i][0].permute(1, 2, 0).numpy())
    (folder / "dataset.json").write_text(json.dumps({"labels": [[f"{i:02d}.png", int(faces[i][1].argmax())] for i in range(24)]}))
    return folder


def train(data, folder, **kw):
    cli.gan_train(data=str(data), outdir=str(folder / "runs"), batch=4, cbase=64, cmax=4, map_depth=1, kimg=0.008, tick=0.004, snap=1, device="cpu", **kw)
    return next((folder / "runs").iterdir())


def lines(folder, name): return [json.loads(l) for l in (folder / f"metric-{name}.jsonl").read_text().splitlines()]


def test_a_conditional_run_is_measured_while_it_trains_and_afterwards(labelled, tmp_path, capsys):
    run = train(labelled, tmp_path, cond=True, metrics="fid1k,pr1k3", features="efficientnet-lite0")
    during = lines(run, "fd1k-efficientnet-lite0")
    assert [l["kimg"] for l in during] == [0.004, 0.008] and len({l["likeness"] for l in during}) == 1
    assert during[0]["record"]["data_digest"] == json.loads((run / "training_options.json").read_text())["dataset"]["digest"]
    cli.gan_metrics(str(run), "fid1k", data=str(labelled), cond=True, **LITE)
    again = lines(run, "fd1k-efficientnet-lite0")[-1]
    assert again["results"] == during[-1]["results"] and again["likeness"] == during[-1]["likeness"]
    assert not list((tmp_path / "cache").glob(f"*/{during[0]['record']['network_digest']}*"))
    best = min(during, key=lambda l: l["results"][l["metric"]])
    page = (run / "report.html").read_text()
    assert f"the best, at {best['kimg']:g} kimg" in page and "best-fd1k-efficientnet-lite0.pt" in {p.name for p in run.iterdir()}
    assert (run / best["snapshot_pkl"]).read_bytes() == (run / "best-fd1k-efficientnet-lite0.pt").read_bytes()
    with pytest.raises(UserError, match="needs labels"): cli.gan_metrics(str(run), "fid1k", data=str(labelled), **LITE)


def test_other_pictures_than_those_of_the_training_are_said(labelled, tmp_path, capsys):
    run = train(labelled, tmp_path)
    assert not list(run.glob("metric-*"))                                            # a CPU measures only when it is asked to
    cli.gan_metrics(str(run), "kid1k", data=str(labelled), mirror=True, **LITE)
    assert "is not what the network was trained on" in capsys.readouterr().out
    cli.gan_metrics(str(run), "kid1k", data=str(labelled), **LITE)
    assert "is not what" not in capsys.readouterr().out
    a, b = lines(run, "kd1k-efficientnet-lite0")
    assert a["likeness"] != b["likeness"] and metrics_section(run).count("Best:") == 2           # two curves, not one


def test_the_shipped_network_needs_no_data_and_truncation_is_recorded(tmp_path):
    for trunc in (1.0, 0.5): cli.gan_metrics("faces64", "is1k,ppl2_wend", trunc=trunc, outdir=str(tmp_path / "out"), **LITE)
    score, = {l["record"]["truncation_psi"] for l in lines(tmp_path / "out", "cs1k-efficientnet-lite0")} - {1.0}
    assert score == 0.5
    a, b = lines(tmp_path / "out", "pl2_wend-efficientnet-lite0")
    assert a["results"] == b["results"] and a["record"]["truncation_psi"] == 1.0 and a["likeness"] == b["likeness"]     # path lengths are measured without


def test_the_drawn_faces_of_a_training_are_drawn_again():
    data, note = measure_run.training_data({"name": "faces64", "size": 50000, "resolution": 64, "digest": "330c5f9ad172b977"})
    assert (len(data), data.resolution, note) == (50000, 64, "")


def test_half_precision_weights(tmp_path):
    torch.manual_seed(0)
    G, o = Generator(c_dim=0, **TINY).eval(), dict(data=FacesDataset(40, 16), cache=tmp_path, progress=False, **LITE)
    single, = metrics.evaluate(["fid1k"], G, **o)
    half, = metrics.evaluate(["fid1k"], copy.deepcopy(G).half(), **o)
    assert abs(half.value / single.value - 1) < 0.01 and half.record["network_digest"] != single.record["network_digest"]
    with pytest.raises(UserError, match="half precision.*G.float"): metrics.evaluate(["ppl2_wend"], copy.deepcopy(G).half(), **o)


def test_identical_sets_have_no_distance(tmp_path):
    data = FacesDataset(40, 32)
    fid, kid, pr = metrics.evaluate(["fid1k", "kid1k", "pr1k3"], data, data, cache=tmp_path, progress=False, **LITE)
    assert abs(fid.value) < 1e-3 and -0.5 < kid.value <= 0                           # unbiased for independent sets; of a set with itself the cross terms hold equal pairs
    assert list(pr.results.values()) == [1.0, 1.0]


def test_interrupted_generation_goes_on_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 16)
    torch.manual_seed(0)
    G, data = Generator(c_dim=0, **TINY).eval(), FacesDataset(40, 16)
    want, = metrics.evaluate(["fid1k"], G, data, cache=tmp_path / "other", progress=False, **LITE)
    real, seen = FeatureNet.__call__, []

    def failing(self, x):
        if len(seen) == 2: raise KeyboardInterrupt
        seen.append(len(x))
        return real(self, x)

    monkeypatch.setattr(FeatureNet, "__call__", failing)
    with pytest.raises(KeyboardInterrupt): metrics.evaluate(["fid1k"], G, data, cache=tmp_path / "c", progress=False, **LITE)
    assert len(list((tmp_path / "c").glob("*/*"))) == 2                              # two chunks of generated pictures stay
    calls = []
    monkeypatch.setattr(FeatureNet, "__call__", lambda self, x: calls.append(len(x)) or real(self, x))
    got, = metrics.evaluate(["fid1k"], G, data, cache=tmp_path / "c", progress=False, **LITE)
    assert got.results == want.results and sum(calls) == 8 + 40                      # what was missing of the generated ones, and the real ones
    assert len(list((tmp_path / "c").iterdir())) == 1                                # only the real pictures' features are kept


def test_refused_before_the_first_step(labelled, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    for kw, text in ((dict(metrics="fid1k"), "weights of inception are not on this machine.*--weights"), (dict(metrics="fid2k"), "fid1k"),
                     (dict(metrics="fid1k", weights=str(tmp_path / "no.pth")), "no such weights")):
        with pytest.raises(UserError, match=text): train(labelled, tmp_path, **kw)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match="real pictures"): metrics.evaluate(["fid1k"], Generator(c_dim=0, **TINY).eval(), **LITE)
    with pytest.raises(UserError, match="measured on a generator"): metrics.evaluate(["ppl2_wend"], FacesDataset(4), **LITE)


JOB = textwrap.dedent('''
    import sys
    import torch
    from gan_course import metrics
    from gan_course.generate import load_generator
    from gan_course.path_length import PATHS, PathDistance, PathPairs
    torch.set_num_threads(1)
    rank, world, meet, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if world > 1: torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    pairs = PathPairs(load_generator("faces64", "cpu")[0], 100, **PATHS["ppl2_wend"])
    torch.save(metrics.path_lengths(pairs, PathDistance("efficientnet-lite0"), progress=False, step=32), f"{out}-{rank}-{world}.pt")
''')


def test_two_processes_share_a_path_length(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    run = lambda rank, world: subprocess.Popen([sys.executable, str(tmp_path / "job.py"), str(rank), str(world), str(tmp_path / "meet"), str(tmp_path / "x")])
    for process in (run(0, 1), run(0, 2), run(1, 2)): assert process.wait(timeout=120) == 0
    one, a, b = (torch.load(tmp_path / f"x-{n}.pt") for n in ("0-1", "0-2", "1-2"))
    assert len(one) == 100 and torch.equal(one, a) and torch.equal(one, b)


def test_torchrun_gives_what_one_process_gives(labelled, tmp_path):
    command = [str(Path(sys.executable).with_name("gan_metrics")), str(train(labelled, tmp_path)), "--metrics", "is1k", "--features", "efficientnet-lite0", "--device", "cpu", "--outdir"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    for start, out in (([], "one"), (torchrun, "two")):
        done = subprocess.run([*start, *command, str(tmp_path / out)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("class score") == 1                                 # the first process alone speaks
    one, two = (lines(tmp_path / n, "cs1k-efficientnet-lite0") for n in ("one", "two"))
    assert len(one) == len(two) == 1 and (one[0]["num_gpus"], two[0]["num_gpus"]) == (1, 2)
    assert two[0]["results"] == pytest.approx(one[0]["results"], rel=1e-5)           # float32 features: two processes have other thread counts, and sums another order
