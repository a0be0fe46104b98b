# SPDX-License-Identifier: Apache-2.0
"""A server's directory goes with it, however it ends, and only then."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polykv_vllm.metrics import directory as directory_module
from polykv_vllm.metrics.directory import ServerDirectory, default_base

SERVER = """
import os, sys
from pathlib import Path
from polykv_vllm.metrics.directory import ServerDirectory
server = ServerDirectory(Path(sys.argv[1]))
(server.path / "engine0-rank0.metrics").touch()
print(server.path, flush=True)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        sys.exit()
    os.waitpid(child, 0)
    print(server.path.exists(), flush=True)
sys.stdin.readline()
"""


def start(base: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER, str(base), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def path_of(server: subprocess.Popen[str]) -> Path:
    assert server.stdout is not None
    return Path(server.stdout.readline().strip())


def test_goes_at_a_normal_end(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        path = path_of(server)
        assert path.parent == tmp_path and path.is_dir()
        server.communicate("\n")
    assert not path.exists()


def test_after_kill_the_next_start_removes_it(tmp_path: Path) -> None:
    with start(tmp_path) as living, start(tmp_path) as killed:
        kept, left = path_of(living), path_of(killed)
        assert kept != left
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.exists()
        ServerDirectory(tmp_path).remove()
        assert not left.exists()
        assert kept.exists()
        living.communicate("\n")


def test_a_forked_child_does_not_take_it_along(tmp_path: Path) -> None:
    with start(tmp_path, "fork") as server:
        path_of(server)
        assert server.stdout is not None
        assert server.stdout.readline() == "True\n"
        server.communicate("\n")


def test_can_be_removed_twice(tmp_path: Path) -> None:
    server = ServerDirectory(tmp_path)
    server.remove()
    server.remove()
    assert list(tmp_path.glob("server-*")) == []


def test_is_private(tmp_path: Path) -> None:
    base = tmp_path / "base"
    server = ServerDirectory(base)
    assert base.stat().st_mode & 0o777 == 0o700
    assert server.path.stat().st_mode & 0o777 == 0o700
    server.remove()


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.getuid()
    monkeypatch.setattr(directory_module.os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=f"not a directory of user {owner + 1}"):
        ServerDirectory(tmp_path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="not a directory of user"):
        ServerDirectory(tmp_path / "base")


def test_users_do_not_share_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = default_base()
    other = os.getuid() + 1
    monkeypatch.setattr(directory_module.os, "getuid", lambda: other)
    assert default_base() != mine
    monkeypatch.setattr(directory_module, "_MEMORY", Path("/nowhere"))
    assert default_base().parent.is_dir()
