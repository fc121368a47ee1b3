"""Job files of the API: written, refused, and the nearest legal layouts of one that is refused."""

from __future__ import annotations

import pytest

import meshwright as mw


def test_a_written_job_loads_and_is_not_overwritten_unless_asked(tmp_path):
    path = tmp_path / "job.toml"
    written = mw.write_job(path, model="tiny", devices="2x8xh100-sxm")
    assert mw.load_job(path).spec.model == written.spec.model
    assert (written.spec.cluster.nodes, written.note) == (2, "")
    with pytest.raises(mw.UserError) as caught:
        mw.write_job(path)
    assert caught.value.problems[0].code == "init-exists"
    assert mw.write_job(path, overwrite=True).spec.name == mw.load_job(path).name


def test_a_field_is_chosen_by_the_caller_if_none_is_obviously_the_text(tmp_path):
    (tmp_path / "rows.csv").write_text("left,right\nsome text,more text\n")
    data, path = str(tmp_path / "rows.csv"), tmp_path / "job.toml"
    with pytest.raises(mw.UserError) as caught:
        mw.write_job(path, data=data)
    assert caught.value.problems[0].code == "init-text-field"
    assert not path.exists()
    assert mw.write_job(path, data=data, choose_field=lambda names: names[-1]).text_field == "right"
    assert mw.load_job(path).spec.data.text_field == "right"


def test_an_illegal_layout_has_a_nearest_legal_one():
    with pytest.raises(mw.UserError) as caught:
        mw.load_job("llama3-8b", "layout.tp=3", on="8xh100-sxm")
    (near,) = mw.find_nearest_legal(caught.value)
    mw.load_job("llama3-8b", *near.overrides.split(), on="8xh100-sxm")
    assert mw.find_nearest_legal(mw.UserError(*caught.value.problems)) == []
