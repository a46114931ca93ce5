"""Installs prm_jax.  Why each package is here: CONTRIBUTING.md.

Versions are lower bounds only: the oldest that the tests have been run with.
"""

import pathlib
import re

import setuptools

here = pathlib.Path(__file__).parent
version = re.search(r'__version__ = "(.+?)"', (here / "prm_jax/__init__.py").read_text()).group(1)

setuptools.setup(
  name="prm_jax",
  version=version,
  description="Process reward models on JAX/TPU: training, scoring and exact reranking",
  long_description=(here / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["prm_jax", "prm_jax.*"]),
  package_data={
    "prm_jax.datasets": ["*/*.md", "*/*.tsv", "*/*.bib"],
    "prm_jax.evaluation": ["*.html", "page/*.html", "page/*.css", "page/*.js"],
    "prm_jax.experiments": ["*.html"],
  },
  install_requires=[
    "jax>=0.10.2",
    "flax>=0.12.8",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "grain>=0.2.18",
    "array_record>=0.8.6",
    "tensorflow-datasets>=4.9.10",
    "etils[epath]>=1.15",
    "importlib_resources",
    "sentencepiece>=0.2.3",
    "tokenizers>=0.22",
    "numpy>=2.0",
    "scipy>=1.13",
    "tyro>=1.0.17",
    "tqdm>=4.66",
    "urllib3>=2.2",
    "msgspec>=0.22",
    "safetensors>=0.8",
    "matplotlib>=3.9",
    "jinja2>=3.1",
    "math-verify>=0.9",
    "pylatexenc>=2.10",
    "latex2mathml>=3.78",
  ],
  extras_require={
    "beam": ["apache-beam>=2.77"],
    "docs": ["sphinx>=9.0", "myst-parser>=5.0", "furo>=2025.12"],  # scripts/docs.sh only
    "gguf": ["gguf>=0.17"],  # scripts/fetch_model.py only
    # what public models are compared with, and trainers of the examples, in tests only
    "reference": ["torch>=2.6", "transformers>=4.57", "trl>=1.16"],
    "serve": ["aiohttp>=3.11"],  # scripts/serve.py only
    "tensorboard": ["tensorboardX>=2.6"],
    "tpu": ["jax[tpu]>=0.10.2", "gcsfs>=2026.2"],
    "test": [
      "aiohttp>=3.11",
      "pytest>=8",
      "pytest-xdist>=3.6",
      "hypothesis>=6.100",
      "gguf>=0.17",
      "gcsfs>=2026.2",
      "ruff>=0.9",
      "tensorboardX>=2.6",
      "playwright>=1.50",  # drives an installed Chromium
      "jax[tpu]>=0.10.2",  # its compiler, which needs no TPU
    ],
  },
)
