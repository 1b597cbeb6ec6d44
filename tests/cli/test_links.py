"""Folders to write to that are links to nothing."""

import pytest

from svdcompress.cli._common import made_folder
from svdcompress.errors import OutputError
from svdcompress.files import make_folder
from svdcompress.pipeline import prepare


@pytest.mark.parametrize("make", [prepare, made_folder, make_folder])
def test_a_link_to_a_place_that_does_not_exist_is_called_so(tmp_path, make):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "absent")
    for folder in (link, link / "below"):
        with pytest.raises(OutputError, match=r"/link is a link to .*/absent, which does not exist; make that folder, "):
            make(folder)
    (tmp_path / "absent").mkdir()
    make(link)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"below: cannot be (created|written) \(Not a directory\); choose another place"):
        make(tmp_path / "file" / "below")
