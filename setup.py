"""Packaging, read from settings.ini (the one place where names, versions and requirements stand)."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
STATUSES = {"3": "3 - Alpha", "4": "4 - Beta", "5": "5 - Production/Stable"}

parser = ConfigParser(delimiters=["="])
parser.read(Path(__file__).with_name("settings.ini"), encoding="utf-8")
cfg = parser["DEFAULT"]
oldest = PYTHONS.index(cfg["min_python"])

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=cfg["keywords"].split(),
    classifiers=[f"Development Status :: {STATUSES[cfg['status']]}", "Intended Audience :: Developers",
                 *(f"Programming Language :: Python :: {v}" for v in PYTHONS[oldest:])],
    packages=find_packages(include=["gan_course", "gan_course.*"]),
    package_data={"gan_course": ["pretrained/*"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split(),
                    "offline-metrics": cfg["offline_metrics_requirements"].split()},
    entry_points={"console_scripts": [line.strip() for line in cfg["console_scripts"].splitlines() if line.strip()],
                  "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    zip_safe=False,
)
