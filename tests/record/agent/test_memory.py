"""The memory history of torch, with a small package in place of torch."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from record.programs import Outcome, supervised

from cudakit.record.protocol import AgentMessage, AgentMessageKind, Settings

# The functions of torch that the agent calls. As in torch, calls are queued until CUDA is initialized.
TORCH = {
    "torch/__init__.py": """
        from torch import _C, cuda
        print("torch is imported")
    """,
    "torch/cuda/__init__.py": """
        import os
        from torch.cuda import memory
        queued, ready = [], 0
        def _lazy_call(call):
            call() if ready == os.getpid() else queued.append(call)
        def device_count(): return 1
        def get_device_properties(index):
            class properties: total_memory = 1 << 30
            return properties
        def init():
            global ready
            ready = os.getpid()
            for call in queued: call()
    """,
    "torch/cuda/memory.py": """
        import os
        events = []
        def _record_memory_history(enabled="all", *, stacks="all", max_entries=1 << 60):
            assert stacks == "python" and max_entries <= 200_000
            from torch import cuda
            assert cuda.ready == os.getpid(), "CUDA is not initialized"
            events.append("recorded")
        def _snapshot():
            return {"events": ",".join(events)}
        def allocate(name): events.append(name)
    """,
    "torch/_C.py": """
        observers = []
        def _cuda_attach_out_of_memory_observer(observer): observers.append(observer)
        def fail():
            for observer in observers: observer(0, 1, 2, 3)
    """,
}

USES = "import torch\ntorch.cuda.init()\ntorch.cuda.memory.allocate('a')\n"


@pytest.fixture
def snapshot_path(tmp_path: Path) -> Path:
    for name, content in TORCH.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[8:] for line in content.splitlines()))
    return tmp_path


def run(
    snapshot_path: Path,
    code: str,
    *,
    file: str = "out.pkl",
    follow: bool = True,
    **variables: str,
) -> tuple[Outcome, list[AgentMessage]]:
    messages: list[AgentMessage] = []
    (snapshot_path / "s.py").write_text(code)
    completed = supervised(
        ["s.py"],
        cwd=snapshot_path,
        settings=Settings(memory=Path(file), follow=follow),
        on_message=messages.append,
        **{"PYTHONPATH": str(snapshot_path / "lib"), **variables},
    )
    return completed, [
        message for message in messages if message.kind is not AgentMessageKind.MEMORY
    ]


def saved(snapshot_path: Path) -> dict[str, str]:
    return {path.name: read(path)["events"] for path in sorted(snapshot_path.glob("out*"))}


def read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    snapshot: dict[str, Any] = pickle.loads(content)  # noqa: S301
    return snapshot


def test_snapshot_is_saved_at_exit_and_its_path_reported(snapshot_path: Path) -> None:
    completed, messages = run(snapshot_path, USES)

    assert completed == Outcome(0, "torch is imported\n", "")
    assert saved(snapshot_path) == {"out.pkl": "recorded,a"}
    assert [(message.kind, message.text) for message in messages] == [
        (AgentMessageKind.SNAPSHOTS, str(snapshot_path / "out.pkl"))
    ]


def test_snapshot_is_saved_at_the_first_out_of_memory_only(snapshot_path: Path) -> None:
    code = "torch._C.fail(); torch.cuda.memory.allocate('b'); torch._C.fail()"

    _, messages = run(snapshot_path, USES + code)

    assert saved(snapshot_path) == {"out-oom.pkl": "recorded,a", "out.pkl": "recorded,a,b"}
    assert [Path(message.text).name for message in messages] == ["out-oom.pkl", "out.pkl"]


def test_snapshot_with_suffix_gz_is_compressed(snapshot_path: Path) -> None:
    run(snapshot_path, USES + "torch._C.fail()", file="out.pkl.gz", RANK="2")

    names = {"out-rank002.pkl.gz", "out-rank002-oom.pkl.gz"}
    assert saved(snapshot_path) == dict.fromkeys(names, "recorded,a")


def test_older_observer_name_is_supported(snapshot_path: Path) -> None:
    module = snapshot_path / "lib/torch/_C.py"
    name = "_cuda_attachOutOfMemoryObserver"
    module.write_text(module.read_text().replace("_cuda_attach_out_of_memory_observer", name))

    run(snapshot_path, USES + "torch._C.fail()")

    assert "out-oom.pkl" in saved(snapshot_path)


@pytest.mark.parametrize(
    "code", ["pass", "import torch", "import importlib.util as u; print(u.find_spec('torch').name)"]
)
def test_program_without_cuda_has_no_snapshot(snapshot_path: Path, code: str) -> None:
    _, messages = run(snapshot_path, code)

    assert saved(snapshot_path) == {}
    assert messages == []


def test_find_spec_of_torch_before_import_is_harmless(snapshot_path: Path) -> None:
    run(snapshot_path, "import importlib.util as u; u.find_spec('torch')\n" + USES)

    assert saved(snapshot_path) == {"out.pkl": "recorded,a"}


def test_import_hook_removes_itself(snapshot_path: Path) -> None:
    code = (
        "import sys; before = len(sys.meta_path)\nimport torch\n"
        "print(before - len(sys.meta_path), vars(torch.__loader__).keys() - {'name', 'path'},\n"
        "      type(torch.__spec__.loader).__name__)"
    )

    completed, _ = run(snapshot_path, code)

    assert completed.stdout.splitlines()[1:] == ["1 set() SourceFileLoader"]


def test_missing_torch_raises_the_usual_error(snapshot_path: Path) -> None:
    (snapshot_path / "lib/torch/__init__.py").unlink()
    for path in sorted((snapshot_path / "lib/torch").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (snapshot_path / "lib/torch").rmdir()

    completed, messages = run(snapshot_path, "import torch")

    assert completed.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch'"
    assert completed.stderr.count("  File ") == 1
    assert messages == []


def test_child_processes_save_to_files_of_their_own(snapshot_path: Path) -> None:
    code = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {USES!r}])\n"
        + USES
        + "import os\nif not os.fork(): torch.cuda.init(); sys.exit()\nos.wait()"
    )

    _, messages = run(snapshot_path, code)

    assert sorted(saved(snapshot_path)) == sorted(
        [
            "out.pkl",
            *(f"out-{n.process}.pkl" for n in messages if n.text != f"{snapshot_path}/out.pkl"),
        ]
    )
    assert len(messages) == 3


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_rank_is_part_of_the_file_name(snapshot_path: Path, variable: str) -> None:
    run(snapshot_path, USES, **{variable: "3"})

    assert saved(snapshot_path) == {"out-rank003.pkl": "recorded,a"}


def test_two_processes_of_one_rank_do_not_overwrite_each_other(snapshot_path: Path) -> None:
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {USES!r}])\n" + USES

    _, messages = run(snapshot_path, code, RANK="0")

    assert len(saved(snapshot_path)) == len(messages) == 2


def test_failed_snapshot_is_reported_and_leaves_no_file(snapshot_path: Path) -> None:
    completed, (message,) = run(
        snapshot_path, USES + f"import os; os.mkdir({str(snapshot_path / 'out.pkl')!r})"
    )

    assert completed.status == 0
    assert message.kind is AgentMessageKind.FAILED
    assert "out.pkl" in message.text
    assert not list(snapshot_path.glob("*.part"))


def test_snapshot_is_not_written_through_a_symbolic_link(snapshot_path: Path) -> None:
    link_target = snapshot_path / "victim"
    link_target.write_text("unchanged")
    for name in ("out.pkl", "out.pkl.part"):
        (snapshot_path / name).symlink_to(link_target)

    run(snapshot_path, USES)

    assert link_target.read_text() == "unchanged"
    assert read(snapshot_path / "out.pkl")["events"] == "recorded,a"


def test_too_old_torch_is_reported(snapshot_path: Path) -> None:
    (snapshot_path / "lib/torch/cuda/memory.py").write_text("def _snapshot(): pass")

    completed, messages = run(snapshot_path, "import torch; torch.cuda.init()")

    assert completed.status == 0
    assert "_record_memory_history" in messages[0].text


def test_environment_of_the_tests_has_no_rank() -> None:
    assert not {"RANK", "LOCAL_RANK"} & set(os.environ)


def test_snapshot_has_the_memory_of_each_device(snapshot_path: Path) -> None:
    run(snapshot_path, USES)

    settings = read(snapshot_path / "out.pkl")["allocator_settings"]
    assert settings == {"device_total_bytes": [1 << 30]}
