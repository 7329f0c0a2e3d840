"""Run notebooks and keep small outputs in them: pictures are reduced to 64 colours, which plots do not show.

    python tests/tools/fill_outputs.py nbs/lessons/L01_gan_in_one_page.ipynb ...
"""
import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

COLOURS = 64


def shrink(png):
    "A PNG (base64 text) with a palette, if that is smaller."
    buffer = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    small = base64.b64encode(buffer.getvalue()).decode()
    return small if len(small) < len(png) else png


def fill(path):
    "Run one notebook in its folder and write it back with outputs; stops at the first error."
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(Path(path).parent)}}).execute()
    outputs = {cell["id"]: cell["outputs"] for cell in notebook.cells if cell.cell_type == "code"}
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    for cell in data["cells"]:
        if cell["cell_type"] != "code":
            continue
        cell["outputs"] = outputs[cell["id"]]
        for out in cell["outputs"]:
            if "image/png" in out.get("data", {}):
                out["data"]["image/png"] = shrink(out["data"]["image/png"])
    Path(path).write_text(json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    subprocess.run([Path(sys.executable).with_name("nbdev_clean"), "--fname", path], check=True)
    return Path(path).stat().st_size


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {fill(name)} bytes")
