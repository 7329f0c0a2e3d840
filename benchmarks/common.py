"""What every record holds: when, on what, with which code, by which command."""
import datetime
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from gan_course.core import save_json
from gan_course.equivariance import EQ_KINDS, Movements, equivariance

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"


def commit():
    "The commit that was measured; GAN_COURSE_COMMIT where the copy has no git history."
    if os.environ.get("GAN_COURSE_COMMIT"):
        return os.environ["GAN_COURSE_COMMIT"]
    run = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit("the commit is unknown here. Next: set GAN_COURSE_COMMIT to it")
    dirty = subprocess.run(["git", "status", "--porcelain", "gan_course"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return run.stdout.strip() + ("+changes" if dirty else "")


def code_digest(modules):
    "SHA-256 over the exported modules that a record depends on: a record is stale when it changes."
    h = hashlib.sha256()
    for name in sorted(modules):
        lines = (ROOT / "gan_course" / f"{name}.py").read_text(encoding="utf-8").splitlines()
        h.update("\n".join(line for line in lines if not line.startswith("# %%")).encode())
    return h.hexdigest()[:16]


def provenance(modules):
    "Date, device, versions, commit, command and the digest of the code measured."
    cuda = torch.cuda.is_available()
    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads, {platform.machine()}",
            "torch": torch.__version__, "commit": commit(), "command": " ".join(["python", *sys.argv]),
            "modules": sorted(modules), "code_digest": code_digest(modules)}


def write_record(name, modules, result, folder=None):
    "Write NAME.json into the folder of records, or another."
    folder = Path(folder or RECORDS)
    folder.mkdir(parents=True, exist_ok=True)
    return save_json(folder / f"{name}.json", {**provenance(modules), **result})


def moves(G, count):
    "EQ-T, EQ-T fractional and EQ-R of a generator: kind -> dB with its interval."
    return {kind: {k: round(v, 3) for k, v in equivariance(Movements(G, count, kind), progress=False).items()} for kind in EQ_KINDS}
