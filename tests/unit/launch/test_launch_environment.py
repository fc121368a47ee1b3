"""Environment variables are set before torch is imported and never override the user's."""

from __future__ import annotations

import socket

from meshwright.launch import environment
from meshwright.launch.environment import describe_place


def test_amx_is_disabled_with_a_note(monkeypatch):
    monkeypatch.setattr(environment, "_advertises_amx", lambda: True)
    variables: dict[str, str] = {}
    (notice,) = environment.prepare_environment(1, environ=variables)
    assert variables["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert "ONEDNN_MAX_CPU_ISA" in notice


def test_nothing_is_set_without_amx(monkeypatch):
    monkeypatch.setattr(environment, "_advertises_amx", lambda: False)
    variables: dict[str, str] = {}
    assert environment.prepare_environment(1, environ=variables) == []
    assert "ONEDNN_MAX_CPU_ISA" not in variables


def test_variables_of_the_user_are_kept(monkeypatch):
    monkeypatch.setattr(environment, "_advertises_amx", lambda: True)
    variables = {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OMP_NUM_THREADS": "7",
        "TORCHINDUCTOR_COMPILE_THREADS": "3",
    }
    assert environment.prepare_environment(1, environ=variables) == []
    assert variables["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert variables["OMP_NUM_THREADS"] == "7"
    assert variables["TORCHINDUCTOR_COMPILE_THREADS"] == "3"


def test_a_rank_with_one_thread_compiles_with_one():
    variables: dict[str, str] = {}
    environment.prepare_environment(1, environ=variables)
    assert (variables["OMP_NUM_THREADS"], variables["TORCHINDUCTOR_COMPILE_THREADS"]) == ("1", "1")


def test_a_rank_knows_its_host_node_and_device():
    found = describe_place({"GROUP_RANK": "1", "LOCAL_RANK": "3"})
    assert found == {"host": socket.gethostname(), "node": 1, "device": 3}
    assert describe_place({"GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "r"})["node"] is None, (
        "as torchrun likes"
    )
    assert describe_place({}) == {"host": socket.gethostname(), "node": None, "device": None}
