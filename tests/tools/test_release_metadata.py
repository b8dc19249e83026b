"""What a registry's page shows: links that lead somewhere, and addresses of the project."""

import re
import sys

import pytest

from tests.docs.markdown import ROOT
from tools.release_metadata import RELATIVE_LINK, with_absolute_links, with_urls

REPOSITORY, TAG = "https://example.org/owner/name", "v1.2.3"


def test_links_of_the_readme():
    before = (ROOT / "README.md").read_text()
    after = with_absolute_links(before, REPOSITORY, TAG)
    assert RELATIVE_LINK.search(after) is None
    added = re.findall(rf"{REPOSITORY}/(blob|raw)/{TAG}/([^)\s\"#]+)", after)
    assert ("blob", "docs/start/install.md") in added
    assert ("raw", "docs/figures/demo_validation_loss.png") in added
    assert all((ROOT / file).is_file() for _, file in added)
    # Nothing else changes.
    assert re.sub(rf"{REPOSITORY}/(blob|raw)/{TAG}/", "", after) == before


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_urls():
    import tomllib

    before = (ROOT / "pyproject.toml").read_text()
    changed = tomllib.loads(with_urls(before, REPOSITORY, TAG))
    urls = changed["project"].pop("urls")
    assert urls["Repository"] == REPOSITORY
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    assert changed == tomllib.loads(before)
