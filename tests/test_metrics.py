"""Metrics: Inception from a file, several processes against one, interrupted measurements, and bad pictures."""
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from gan_course import metrics
from gan_course.core import UserError
from gan_course.faces import FacesDataset
from gan_course.features import EXTRACTORS, FeatureNet
from gan_course.samples import open_pictures


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory):
    "Random weights under the official name and in the official shapes."
    folder = tmp_path_factory.mktemp("weights")
    blank = folder / "blank.pth"
    torch.save({}, blank)
    Blank = type("Blank", (FeatureExtractorInceptionV3,), {"load_state_dict": lambda self, state: None})
    torch.manual_seed(0)
    path = folder / EXTRACTORS["inception"].file
    state = Blank("blank", ["2048"], feature_extractor_weights_path=str(blank)).state_dict()
    torch.save({k: v * 6 ** 0.5 if k.endswith("conv.weight") else v for k, v in state.items()}, path)      # so that signals keep their size
    return path


def test_the_way_of_inception(inception_file, tmp_path):
    score, = metrics.evaluate(["fid1k"], FacesDataset(6, 32, seed=1), FacesDataset(6, 32), weights=inception_file.parent, device="cpu", cache=tmp_path, progress=False)
    assert (score.metric, score.label, score.record["features"]) == ("fid1k", "FID", "inception")
    assert score.value > 0 and "fewer than the 2048 dimensions" in score.warnings[-1]
    net = FeatureNet("inception", ("fid",), inception_file)
    a, b = (net(open_pictures(FacesDataset(6, 32, seed=n)).batch(0, 6))["2048"].double() for n in (1, 0))
    means = float((a.mean(0) - b.mean(0)).square().sum())
    assert means > 1e-3 and score.value > means                                      # the means' part alone, by hand


def test_a_file_of_another_shape_is_named(inception_file, tmp_path):
    state = torch.load(inception_file, weights_only=True)
    state["fc.weight"] = state["fc.weight"][:10].clone()
    other = tmp_path / "other.pth"
    torch.save(state, other)
    with pytest.raises(UserError, match="other.pth.*do not fit inception.*fc.weight"): FeatureNet("inception", ("isc",), other)


def test_an_interrupted_measurement_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 8)
    net, faces, seen = FeatureNet("efficientnet-lite0"), open_pictures(FacesDataset(30, 32)), []

    class Counting:
        "The network, which counts pictures and fails after so many."
        extractor, layers, describe, most = net.extractor, net.layers, net.describe, 20
        def __call__(self, x):
            if sum(seen) + len(x) > self.most: raise KeyboardInterrupt
            seen.append(len(x))
            return net(x)

    counting = Counting()
    with pytest.raises(KeyboardInterrupt): metrics.extract(faces, counting, tmp_path, progress=False)
    assert sum(seen) == 16                                                           # two whole chunks
    counting.most = 100
    whole = metrics.extract(faces, counting, tmp_path, progress=False)["pool"]
    assert sum(seen) == 30 and torch.equal(whole, metrics.extract(faces, net, None, progress=False)["pool"])


JOB = textwrap.dedent('''
    import sys
    import torch
    from gan_course import metrics
    from gan_course.faces import FacesDataset
    from gan_course.features import FeatureNet
    from gan_course.samples import open_pictures
    torch.set_num_threads(1)
    rank, world, meet, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    metrics.CHUNK = 8
    if world > 1: torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    x = metrics.extract(open_pictures(FacesDataset(30, 32)), FeatureNet("efficientnet-lite0"), None, progress=False)["pool"]
    torch.save(x, f"{out}-{rank}-{world}.pt")
''')


def test_two_processes_give_what_one_gives(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    run = lambda rank, world: subprocess.Popen([sys.executable, str(job), str(rank), str(world), str(tmp_path / "meet"), str(tmp_path / "x")])
    for process in (run(0, 1), run(0, 2), run(1, 2)): assert process.wait(timeout=120) == 0
    one, a, b = (torch.load(tmp_path / f"x-{n}.pt") for n in ("0-1", "0-2", "1-2"))
    assert torch.equal(one, a) and torch.equal(one, b) and len(one) == 30


def test_bad_pictures_are_named(tmp_path):
    measure = lambda folder: metrics.evaluate(["fid1k"], folder, FacesDataset(4, 32), features="efficientnet-lite0", device="cpu", cache=tmp_path / "cache", progress=False)
    empty, one, broken = (tmp_path / n for n in ("empty", "one", "broken"))
    for folder in (empty, one, broken): folder.mkdir()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(one / "a.png")
    for n in "ab": Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(broken / f"{n}.png")
    (broken / "b.png").write_bytes((broken / "b.png").read_bytes()[:40])
    with pytest.raises(UserError, match="empty"): measure(empty)
    with pytest.raises(UserError, match="too few pictures"): measure(one)
    with pytest.raises(UserError, match="b.png"): measure(broken)
    with pytest.raises(UserError, match="nowhere"): measure(tmp_path / "nowhere")
