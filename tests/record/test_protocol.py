from __future__ import annotations

import json
import os
from pathlib import Path

from cudakit.record.protocol import (
    AGENT,
    AgentMessage,
    AgentMessageKind,
    AgentMessages,
    Settings,
    child_environment,
)
from cudakit.stacks import LIBRARY_FILE, TYPED_CODE

SPOOL = Path("/spool")


def test_agent_precedes_the_pythonpath_of_the_user() -> None:
    environment = child_environment({"PYTHONPATH": "/mine:rel"}, Settings(), SPOOL)

    assert environment["PYTHONPATH"] == f"{AGENT}:/mine:rel"


def test_pythonpath_gets_no_empty_entry() -> None:
    for original in ({}, {"PYTHONPATH": ""}):
        # An empty entry would be the working directory.
        assert child_environment(original, Settings(), SPOOL)["PYTHONPATH"] == str(AGENT)


def test_other_variables_are_unchanged() -> None:
    original = {"A": "1", "PATH": "/bin"}

    environment = child_environment(original, Settings(), SPOOL)

    assert environment.items() >= original.items()
    assert environment.keys() - original.keys() == {"PYTHONPATH", "CUDAKIT_AGENT"}


def test_agent_settings_are_passed_in_the_environment(tmp_path: Path) -> None:
    settings = Settings(
        sanitize=True,
        memory=Path("out.pkl"),
        library="/lib.so",
        recorder="/rec.so",
        frames={"cpython-312": "/f.so"},
        patches={"90": "/sm_90.cubin"},
        follow=False,
    )

    environment = child_environment({}, settings, tmp_path)

    assert json.loads(environment["CUDAKIT_AGENT"]) == {
        "spool": str(tmp_path),
        "sanitize": True,
        "memory": str(Path.cwd() / "out.pkl"),
        "profile": None,
        "cupti": "",
        "library": "/lib.so",
        "recorder": "/rec.so",
        "frames": {"cpython-312": "/f.so"},
        "patches": {"90": "/sm_90.cubin"},
        "follow": False,
        "templates": False,
        "program_files": [LIBRARY_FILE, TYPED_CODE],
        "supervisor": os.getpid(),
    }
    assert environment["CUDAKIT_SPOOL"] == str(tmp_path)


def test_nested_supervisor_replaces_the_outer_one() -> None:
    outer_environment = child_environment({"PYTHONPATH": "/mine"}, Settings(sanitize=True), SPOOL)
    outer_environment["CUDAKIT_SPOOL_PROCESS"] = "7"

    environment = child_environment(outer_environment, Settings(), Path("/inner"))

    assert environment["PYTHONPATH"] == f"{AGENT}:/mine"
    assert not any(name.startswith("CUDAKIT_SPOOL") for name in environment)
    assert json.loads(environment["CUDAKIT_AGENT"])["spool"] == "/inner"


def test_only_the_recorder_of_the_outer_program_is_removed_from_nvtx() -> None:
    variable = "NVTX_INJECTION64_PATH"
    by_outer = child_environment({variable: "/a/_recorder.abi3.so"}, Settings(), SPOOL)
    by_user = child_environment({variable: "/opt/tool.so"}, Settings(), SPOOL)

    assert variable not in by_outer
    assert by_user[variable] == "/opt/tool.so"


def test_notices_are_complete_lines_read_once(tmp_path: Path) -> None:
    messages = AgentMessages(tmp_path)
    with (tmp_path / "7.failed").open("w") as file:
        file.write("first\nsec")
        file.flush()
        assert list(messages.read_new()) == [AgentMessage(7, AgentMessageKind.FAILED, "first")]
        file.write("ond\n")
        file.flush()
        assert list(messages.read_new()) == [AgentMessage(7, AgentMessageKind.FAILED, "second")]
    assert list(messages.read_new()) == []


def test_notices_ignore_other_files_of_the_spool(tmp_path: Path) -> None:
    for name in ("7-000000.trace", "taken-rank000", "x.failed", "7.other"):
        (tmp_path / name).write_text("line\n")
    (tmp_path / "8.snapshots").write_bytes(b"/caf\xe9.pkl\n")

    (message,) = AgentMessages(tmp_path).read_new()

    assert message.kind is AgentMessageKind.SNAPSHOTS
    assert message.text == b"/caf\xe9.pkl".decode("utf-8", "surrogateescape")
