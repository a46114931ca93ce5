"""The site of the documentation: bash scripts/docs.sh."""

import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]  # for site_extension.py and the package as it is here

project = "prm_jax"
copyright = "The prm_jax authors, Apache-2.0"
version = re.search(r'__version__ = "(.+?)"', (DOCS.parent / "prm_jax/__init__.py").read_text())[1]
release = version
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_extension"]
exclude_patterns = ["_build"]
nitpicky = True
# Types of other packages, and type variables: the site links to itself only and needs no network.
nitpick_ignore_regex = [("py:.*", r"(?!prm_jax\.).*")]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # as a repository browser makes them: page.md#a-heading

highlight_language = "none"  # of blocks that do not say: commands, files and screens
smartquotes = False  # two hyphens are a flag
default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give shapes and types
autodoc_preserve_defaults = True  # as written: np.float32, not its value
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "prm_jax"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
