"""EQ-T, EQ-T fractional and EQ-R of several generators.

    python benchmarks/equivariance.py --networks faces64,faces32-t,faces32-r --count 400 --out FOLDER
    GAN_COURSE_COMMIT=... where the copy has no git history

FOLDER receives equivariance_faces.json.
"""
import time

import torch
from common import RECORDS, moves, write_record
from fastcore.script import call_parse

from gan_course.core import choose_device
from gan_course.generate import load_generator
from gan_course.samples import weights_digest

MODULES = ["equivariance", "fast_ops", "layers", "networks", "ops", "samples", "stylegan2", "stylegan3"]


def row(name, count, device):
    "What one network reached."
    G, about = load_generator(name, device)
    start = time.perf_counter()
    scores = moves(G, count)
    print(name, scores, flush=True)
    return {"network": type(G).__name__, "resolution": G.img_resolution, "kimg": about.get("kimg"), "weights": weights_digest(G), "pictures": count,
            "scores": scores, "seconds": round(time.perf_counter() - start, 1)}


@call_parse
def main(
    networks:str="faces64,faces32-t,faces32-r", # names or paths, with commas
    count:int=400, # pictures for each score
    out:str=str(RECORDS), # folder for the record
    device:str="auto" # where to compute
):
    "Measure and write the record."
    where = choose_device(device)
    torch.manual_seed(0)
    write_record("equivariance_faces", MODULES, {"rows": {name: row(name, count, str(where)) for name in networks.split(",")}}, out)
