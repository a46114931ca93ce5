"""Installs prm_jax.  Why each package is here: CONTRIBUTING.md.

Versions are lower bounds only: the oldest that the tests have been run with.
"""

import pathlib
import re

import setuptools

here = pathlib.Path(__file__).parent
version = re.search(r'__version__ = "(.+?)"', (here / "prm_jax/__init__.py").read_text()).group(1)

# Folders of the checkout that are installed inside of the package.
INSIDE = {"prm_jax.scripts": "scripts", "prm_jax.configs": "configs"}
INSIDE |= {
  f"prm_jax.configs.{path.name}": f"configs/{path.name}" for path in here.glob("configs/[a-z]*/")
}
TRAIN = [
  "flax>=0.12.8",
  "optax>=0.2.8",
  "orbax-checkpoint>=0.12.8",
  "grain>=0.2.18",
  "array_record>=0.8.6",
  "tensorflow-datasets>=4.9.10",
  "importlib_resources>=6.4",
  "sentencepiece>=0.2.3",
  "tokenizers>=0.22",
  "safetensors>=0.8",
  "urllib3>=2.2",
]

setuptools.setup(
  name="prm_jax",
  version=version,
  description="Process reward models on JAX/TPU: training, scoring and exact reranking",
  long_description=(here / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=[*setuptools.find_packages(include=["prm_jax", "prm_jax.*"]), *INSIDE],
  package_dir=INSIDE,
  entry_points={"console_scripts": ["prm-jax=prm_jax.__main__:run"]},
  package_data={
    "prm_jax": ["py.typed"],
    "prm_jax.datasets": ["*.tsv", "*/*.md", "*/*.tsv", "*/*.bib"],
    "prm_jax.evaluation": ["*.html", "page/*.html", "page/*.css", "page/*.js"],
    "prm_jax.experiments": ["*.html"],
  },
  install_requires=[  # what reranking needs: prm_jax/runtime/doctor.py tells what each extra is for
    "jax>=0.10.2",
    "numpy>=2.0",
    "scipy>=1.13",
    "etils[epath]>=1.15",
    "tyro>=1.0.17",
    "tqdm>=4.66",
    "packaging>=24.2",
    "msgspec>=0.22",
    "matplotlib>=3.9",
    "jinja2>=3.1",
    "math-verify>=0.9",
    "pylatexenc>=2.10",
    "latex2mathml>=3.78",
  ],
  extras_require={
    "train": TRAIN,
    "cuda": [*TRAIN, "jax[cuda12]>=0.10.2"],
    "beam": [*TRAIN, "apache-beam>=2.77"],
    "gguf": [*TRAIN, "gguf>=0.17"],  # scripts/fetch_model.py only
    "docs": [*TRAIN, "sphinx>=9.0", "myst-parser>=5.0", "furo>=2025.12"],  # scripts/docs.sh only
    # what public models are compared with, and trainers of the examples, in tests only
    "reference": [*TRAIN, "torch>=2.6", "transformers>=4.57", "trl>=1.16"],
    "serve": [*TRAIN, "aiohttp>=3.14.4"],  # scripts/serve.py only
    "tensorboard": ["tensorboardX>=2.6"],
    "wandb": ["wandb>=0.31"],
    "tpu": [*TRAIN, "jax[tpu]>=0.10.2", "gcsfs>=2026.2"],
    "test": [
      *TRAIN,
      "aiohttp>=3.14.4",
      "pytest>=8",
      "setuptools>=77",  # builds the wheel that is tested
      "pytest-xdist>=3.6",
      "hypothesis>=6.100",
      "jupytext>=1.16",  # notebooks are pairs of files
      "nbformat>=5.10",
      "nbclient>=0.10",
      "ipykernel>=6.29",
      "mypy>=1.19",
      "gguf>=0.17",
      "gcsfs>=2026.2",
      "pyyaml>=6",
      "ruff>=0.9",
      "tensorboardX>=2.6",
      "playwright>=1.50",  # drives an installed Chromium
      "jax[tpu]>=0.10.2",  # its compiler, which needs no TPU
    ],
  },
)
