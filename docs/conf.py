"""Sphinx: the pages of this folder, and the reference from docstrings and from the C++ headers (by Doxygen)."""

import os

import fusegrad

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
