"""Sphinx's configuration. `make docs` builds the site."""

import os
from pathlib import Path

from docutils import nodes

import seqwarm_kernels

project = "seqwarm_kernels"
version = release = seqwarm_kernels.__version__
copyright = "seqwarm_kernels contributors"
language = "en"
smartquotes = False

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["figures"]

# MyST
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_timeout = 600  # seconds; a busy machine is slow
nb_execution_raise_on_error = True
nb_execution_show_tb = True

# Docstrings are Google style. A name in single backticks becomes a link where the site documents it.
default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # hooks of a trainer's callback are not for users to call
autodoc_mock_imports = ["composer"]  # Composer is not installed beside the torch that the package needs
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autosummary_generate = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# Warnings are errors. Names of other packages have no page here: the build looks nothing up in the network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", ".*"),  # words in single backticks that are not documented names
    ("py:class", ".*"),  # types in signatures, written as where they are defined
    ("py:exc", ".*"),
]

html_theme = "pydata_sphinx_theme"
html_title = "seqwarm_kernels"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_show_sourcelink = False
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
html_context = {"default_mode": "auto"}
html_sidebars = {"changelog": [], "contributing": []}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

os.environ.setdefault("OMP_NUM_THREADS", "2")  # of the notebook's kernel


def setup(app):
    app.connect("autodoc-process-docstring", _escape_bars)
    app.connect("missing-reference", _link_by_last_name)
    app.connect("doctree-read", _add_dark_pictures, priority=400)  # before Sphinx collects the pictures


def _escape_bars(app, what, name, obj, options, lines):
    """|x| is an absolute value in docstrings, and a substitution in reStructuredText."""
    lines[:] = [line.replace("|", r"\|") for line in lines]


def _link_by_last_name(app, env, node, contnode):
    """Docstrings say `resize_batch`, and signatures name a type by the file that defines it. Both get a link."""
    domain, name = env.get_domain("py"), node["reftarget"].rpartition(".")[2]
    if node["reftype"] not in ("class", "obj"):
        return None
    found = [
        full_name
        for full_name, entry in domain.objects.items()
        if entry.objtype in ("class", "exception", "function") and full_name.rpartition(".")[2] == name
    ]
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, contnode)


def _add_dark_pictures(app, doctree):
    """A picture that has a second file, `<name>_dark.png`, changes with the colors of the page."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for image in list(doctree.findall(nodes.image)):
        light = Path(image["uri"])
        dark = light.with_name(f"{light.stem}_dark{light.suffix}")
        if (folder / dark).exists():
            twin = image.deepcopy()
            twin["uri"] = str(dark)
            image["classes"].append("only-light")
            twin["classes"].append("only-dark")
            image.parent.insert(image.parent.index(image) + 1, twin)
