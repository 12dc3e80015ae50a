"""Sphinx: the pages of this folder, and the reference from docstrings and from the C++ headers (by Doxygen)."""

import os
import shutil
from pathlib import Path

import fusegrad
from sphinx.application import Sphinx

project = "fusegrad"
author = "The fusegrad authors"
copyright = author
release = fusegrad.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "breathe"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"fusegrad {release}"

autodoc_typehints = "description"
autodoc_member_order = "bysource"
breathe_projects = {"fusegrad": os.environ["DOXYGEN_XML"]}
breathe_default_project = "fusegrad"
# The target checks of pages written for a repository's browser: links to files that are not pages.
suppress_warnings = ["myst.xref_missing"]


def copy_charts(app: Sphinx, error: Exception | None) -> None:
    """Sphinx does not see the pictures of HTML elements, which charts are for readers with a dark screen."""
    if error is None:
        shutil.copytree(Path(app.srcdir) / "charts", Path(app.outdir) / "charts", dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("build-finished", copy_charts)
