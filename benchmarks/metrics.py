"""Metrics: seconds per 1,000 pictures, our numbers beside torch-fidelity's, and the scores of the network that comes with the package.

    python benchmarks/metrics.py speed            # metrics_speed_DEVICE.json: random weights in the official shapes take as long as the real ones
    python benchmarks/metrics.py table            # metrics_table.json: the notebooks' ten lines, our evaluate, and torch-fidelity on the same pictures
    python benchmarks/metrics.py faces64          # metrics_faces64.json: 50,000 pictures; an hour on two CPU cores, minutes on a GPU
    python benchmarks/metrics.py tf32             # metrics_tf32.json: one path length in TF32, float32 and float64; needs a GPU
    GAN_COURSE_COMMIT=... where the copy has no git history
"""
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from common import ROOT, write_record
from fastcore.script import call_parse

from gan_course import metrics, path_length
from gan_course.core import UserError, choose_device
from gan_course.faces import FacesDataset
from gan_course.features import EXTRACTORS, FeatureNet, extractor_class
from gan_course.generate import load_generator
from gan_course.path_length import PathDistance, PathPairs, PATHS
from gan_course.samples import FakeImages, RealImages

MODULES = ["features", "metrics", "path_length", "samples", "scores"]
LITE = "efficientnet-lite0"


class RandomPictures(torch.utils.data.Dataset):
    "Random pictures in memory: reading them takes no time."
    label_dim, num_channels = 0, 3

    def __init__(self, size, resolution):
        self.resolution, self.name = resolution, f"random{resolution}"
        self.pictures = torch.randint(0, 256, (size, 3, resolution, resolution), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def __len__(self): return len(self.pictures)
    def __getitem__(self, i): return self.pictures[i], torch.zeros(0)
    def digest(self): return f"random{len(self)}"


def random_weights(name, folder):
    "A file with random weights under the official name and in the official shapes."
    path = Path(folder) / EXTRACTORS[name].file
    if name == "vgg16":
        import torchvision
        torch.save(torchvision.models.vgg16(weights=None).state_dict(), path)
        return path
    base = extractor_class(EXTRACTORS[name])
    torch.save({}, path)
    blank = type("Blank", (base,), {"load_state_dict": lambda self, state: None})("blank", ["2048"], feature_extractor_weights_path=str(path))
    torch.save(blank.state_dict(), path)
    return path


def network(name, folder, device):
    "A feature network, with random weights where the official ones would have to be fetched."
    return FeatureNet(name, ("prc",) if name == "vgg16" else ("fid",), None if name == LITE else random_weights(name, folder), device)


def per_thousand(source, work, runs):
    "Median seconds per 1,000 of `len(source)` items over several runs, after one that warms up."
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available(): torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1000 / len(source))
    return {"median_s": round(statistics.median(times[1:]), 3), "least_s": round(min(times[1:]), 3), "most_s": round(max(times[1:]), 3), "items": len(source), "runs": runs}


def speed(device, out, runs=3):
    "Seconds per 1,000 pictures of each feature network, of generating, and of path lengths."
    gpu, found = device.type == "cuda", {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (LITE, "inception", "vgg16"):
            net = network(name, folder, device)
            for side in (64, 256):
                source = RealImages(RandomPictures(4096 if gpu else 64, side))
                found[f"{name}, {side} px"] = per_thousand(source, lambda: metrics.chunk_features(source, net, 0, len(source)), runs)
    G = load_generator("faces64", device)[0]
    fakes = FakeImages(G, 4096 if gpu else 128)
    found["generate faces64"] = per_thousand(fakes, lambda: fakes.batch(0, len(fakes)), runs)
    pairs = PathPairs(G, 512 if gpu else 112, **PATHS["ppl2_wend"])
    found[f"path length of faces64, {LITE}"] = per_thousand(pairs, lambda: pairs.distances(0, len(pairs), PathDistance(LITE, device=device)), runs)
    write_record(f"metrics_speed_{device.type}", MODULES, {"seconds_per_1000": found}, out)
    for name, row in found.items(): print(f"{name:<40} {row['median_s']:8.3f} s per 1,000", flush=True)


def by_hand():
    "The notebook's own functions: name -> function."
    cells = json.loads((ROOT / "nbs" / "40_scores.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {"np": np, "torch": torch}
    for source in ("".join(c["source"]) for c in cells if c["cell_type"] == "code"):
        if source.startswith("def ") and "_by_hand" in source: exec(source.split("\n\n")[0], names)
    return {k: v for k, v in names.items() if k.endswith("_by_hand")}


def theirs(fake, real):
    "The metrics as torch-fidelity's own entry computes them from the pictures."
    import torch_fidelity

    from gan_course.features import lite_class
    torch_fidelity.register_feature_extractor(LITE, lite_class())
    Pictures = type("Pictures", (torch.utils.data.Dataset,), {"__init__": lambda s, d: setattr(s, "d", d), "__len__": lambda s: len(s.d), "__getitem__": lambda s, i: s.d[i][0]})
    return torch_fidelity.calculate_metrics(input1=Pictures(fake), input2=Pictures(real), fid=True, kid=True, isc=True, prc=True, feature_extractor=LITE, cuda=False, verbose=False, cache=False,
                                            kid_subsets=100, kid_subset_size=500, samples_find_deep=False, save_cpu_ram=True, rng_seed=0)


def table(device, out):
    "Ours, by hand and torch-fidelity, from the same 1,200 and 1,400 drawn faces, the first set with noise."
    real, fake = FacesDataset(1400, 64), NoisyFaces(1200, 64, seed=1)
    net = FeatureNet(LITE, ("fid", "isc", "prc"), device=device)
    x, y = (metrics.extract(RealImages(d), net, progress=False) for d in (fake, real))
    a, b, logits = x["pool"], y["pool"], x["logits"]
    from gan_course.scores import frechet, inception_score, kernel_distance, precision_recall
    hand, pr = by_hand(), precision_recall(a, b)
    small = (a[:500].double(), b[:500].double())
    ours = {"Frechet distance": frechet(a, b)["value"], "kernel distance, 100 subsets of 500": kernel_distance(a, b, subset_size=500)["value"],
            "kernel distance, one subset that is all": kernel_distance(*small, subsets=1, subset_size=500)["value"], "class score, 10 splits": inception_score(logits)["value"],
            "class score, 1 split": inception_score(logits, splits=1)["value"], "precision": pr["precision"], "recall": pr["recall"]}
    t = theirs(fake, real)
    library = {"Frechet distance": t["frechet_inception_distance"], "kernel distance, 100 subsets of 500": t["kernel_inception_distance_mean"], "class score, 10 splits": t["inception_score_mean"],
               "precision": t["precision"], "recall": t["recall"]}
    p, r = hand["precision_recall_by_hand"](a, b)
    manual = {"Frechet distance": hand["frechet_by_hand"](a, b), "kernel distance, one subset that is all": hand["kid_by_hand"](*small), "class score, 1 split": hand["is_by_hand"](logits), "precision": p, "recall": r}
    rows = {k: {"ours": float(v), "by_hand": float(manual[k]) if k in manual else None, "torch_fidelity": float(library[k]) if k in library else None} for k, v in ours.items()}
    write_record("metrics_table", MODULES, {"features": LITE, "pictures": [len(fake), len(real)], "rows": rows}, out)
    for k, row in rows.items(): print(f"{k:<42}", *(f"{n} {'-' if v is None else format(v, '.9g')}" for n, v in row.items()), flush=True)


class NoisyFaces(FacesDataset):
    "Drawn faces with noise of 2 grey levels."
    def __getitem__(self, i):
        picture, label = super().__getitem__(i)
        noise = 2 * torch.randn(picture.shape, generator=torch.Generator().manual_seed(int(i)))
        return (picture.float() + noise).round().clamp(0, 255).byte(), label


def faces64(device, out):
    "The scores of the network that comes with the package, against all drawn faces that it was trained on."
    G, about = load_generator("faces64", device)
    d = about["dataset"]
    real = FacesDataset(d["size"], d["resolution"])
    if real.digest() != d["digest"]: raise UserError("these are not the faces of the training", value=real.digest(), limit=d["digest"], path="faces64", fix="measure with the version that drew them")
    with tempfile.TemporaryDirectory() as cache:
        found = metrics.evaluate(["fid50k_full", "kid50k_full", "is50k", "pr50k3_full", "ppl2_wend"], G, real, LITE, device=str(device), name="faces64", cache=Path(cache))
    write_record("metrics_faces64", MODULES, {"scores": [s.to_dict() for s in found]}, out)
    for s in found: print(s.to_text(), flush=True)


def tf32(device, out, count=2048):
    "What rounding the factors of float32 products to 11 bits does to a path length: the same pairs three times."
    if device.type != "cuda": raise UserError("TF32 is a rounding of CUDA's", value=device, limit="cuda", path="device", fix="run this part on a GPU")
    def value(dtype, context):
        G, distance = load_generator("faces64", device)[0].to(dtype), PathDistance(LITE, device=device)
        distance.module.to(dtype)
        with mock.patch.object(path_length, "exact_float32", context): d = PathPairs(G, count, **PATHS["ppl2_wend"]).distances(0, count, distance)
        return {k: path_length.path_length(d)[k] for k in ("value", "standard_error")}
    found = {"TF32 (PyTorch's default for convolutions)": value(torch.float32, nullcontext), "float32": value(torch.float32, path_length.exact_float32), "float64": value(torch.float64, path_length.exact_float32)}
    write_record("metrics_tf32", MODULES, {"distance": LITE, "pairs": count, "path_length": found}, out)
    for name, row in found.items(): print(f"{name:<44} {row['value']:.4f}", flush=True)


@call_parse
def main(
    part:str, # speed, table, faces64 or tf32
    out:str="", # folder of the record
    device:str="auto" # where
):
    "Measure, and write the record."
    {"speed": speed, "table": table, "faces64": faces64, "tf32": tf32}[part](choose_device(device), out or None)
