"""The picture on the start page, nbs/images/quickstart.png: how a quickstart run learnt, from its own grids.

    python tests/tools/readme_picture.py runs/00000-quickstart
"""
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
ROWS, ZOOM, GAP, LABEL = 4, 2, 8, 22


def caption(path):
    return "drawn (real)" if path.stem == "reals" else f"generated, {int(path.stem.split('_')[1])} kimg"


def build(run_dir):
    "The top rows of the real grid, and of the generated ones at the start, early, and at the end."
    fakes = sorted(Path(run_dir).glob("fakes_*.png"))
    if len(fakes) < 3:
        raise SystemExit(f"{run_dir}: {len(fakes)} grids, 3 needed. Next: give the folder of a finished gan_quickstart")
    grids = [fakes[0], fakes[2], fakes[-1], Path(run_dir) / "reals.png"]
    pictures = [Image.open(p).convert("RGB") for p in grids]
    side = pictures[0].width // 6
    width, height = pictures[0].width * ZOOM, side * ROWS * ZOOM
    sheet = Image.new("RGB", (2 * width + GAP, 2 * (height + LABEL) + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for i, (path, picture) in enumerate(zip(grids, pictures)):
        x, y = i % 2 * (width + GAP), i // 2 * (height + LABEL + GAP)
        draw.text((x, y), caption(path), fill="black", font=font)
        sheet.paste(picture.crop((0, 0, picture.width, side * ROWS)).resize((width, height), Image.Resampling.NEAREST), (x, y + LABEL))
    return sheet


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    out = ROOT / "nbs/images/quickstart.png"
    out.parent.mkdir(exist_ok=True)
    build(sys.argv[1]).quantize(128, dither=Image.Dither.NONE).save(out, optimize=True)
    print(f"{out.relative_to(ROOT)}: {out.stat().st_size} bytes")
