"""`micronova region up`, `restart`, `reload` and `down`: a region on one machine, for a trial.

It has a PostgreSQL and a RabbitMQ of its own. Each process is started as its systemd unit would start it, and says in
the same way when it is ready. Nothing supervises the processes: one that dies is started again by the next `region up`.
"""

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
import msgspec

from micronova.cli.own_command import own_command
from micronova.cli.private_services.postgres import PrivatePostgres
from micronova.cli.private_services.process import accepts, run, tail
from micronova.cli.private_services.rabbitmq import PrivateRabbitMQ
from micronova.cli.region.files import USER
from micronova.cli.region.plan import RegionPlan, read_plan
from micronova.cli.region.shown_certificate import shows
from micronova.cli.service_user import service_user
from micronova.cli.state import new_password
from micronova.conf.settings import load
from micronova.objects.errors import MicronovaError

READY = 300.0  # seconds until a process, or all hosts, must be ready
RELOADED = 60.0  # seconds until a process that was told to reload has to show the present certificate
STOP = 60.0  # seconds after which a process that was told to stop is killed
SERVICES = ("database", "broker")
GROUPS = ("services", "control", "hosts")


class Started(msgspec.Struct, frozen=True):
    """A process that `up` has started; the time of its start, in the kernel's ticks, tells it from later ones."""

    pid: int
    ticks: int


class Trial:
    """The processes of a region on this machine."""

    def __init__(self, plan: RegionPlan) -> None:
        self._plan = plan
        self._private = plan.directory / "private"
        self._records = plan.directory / "run"
        self.database = PrivatePostgres(self._private / "database", plan.port("database"))
        self.broker = PrivateRabbitMQ(
            self._private / "broker", plan.port("broker"), plan.port("epmd"), plan.port("distribution")
        )
        self.environment_file = plan.directory / "trial.env"

    @property
    def hosts(self) -> list[str]:
        """The hosts that have settings, and those of the plan."""
        added = [file.stem for file in sorted(self._plan.hosts_directory.glob("*.toml"))]
        return [*self._plan.hosts, *(name for name in added if name not in self._plan.hosts)]

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Return the processes that names and names of groups stand for, in the order of a start; none: all."""
        groups = {"services": [*SERVICES], "control": [*self._plan.processes], "hosts": self.hosts}
        everything = [name for group in groups.values() for name in group]
        wanted: set[str] = set()
        for name in names:
            if name not in groups and name not in everything:
                raise MicronovaError(f"There is no process {name}: choose from {', '.join((*GROUPS, *everything))}.")
            wanted |= set(groups.get(name, [name]))
        return [name for name in everything if name in wanted or not wanted]

    # --- start -------------------------------------------------------------------------------------------------

    def start(self, names: list[str]) -> None:
        """Start the processes that do not run, each group when the one before it is ready."""
        self._refuse_taken_ports(names)
        self._records.mkdir(exist_ok=True)
        if "database" in names:
            self._start_database()
        if "broker" in names:
            self._start_broker()
        self._write_environment()
        control = [name for name in names if name in self._plan.processes and not self.runs(name)]
        if len(control) > 1:
            # Once, and not by each process, which would wait for the others.
            self._micronova("db", "upgrade", "--config", str(self._plan.settings), "--dir", str(self._tool))
        if control:
            self._start_all({name: self._control_process(name) for name in control})
        hosts = [name for name in names if name in self.hosts and not self.runs(name)]
        for name in hosts:
            if not self._host_settings(name).exists():
                self._add_host(name)
        if hosts:
            _share_settings(self._plan)  # also those of new hosts
            self._start_all({name: self._host_process(name) for name in hosts})

    def _refuse_taken_ports(self, names: list[str]) -> None:
        """Raise an error if another program listens where a process is to: it would be taken for that process."""
        for name in names:
            if self.runs(name):
                continue
            for port, whose in self._ports(name).items():
                if accepts(port):
                    raise MicronovaError(
                        f"Another program listens on 127.0.0.1:{port}, the port of the {whose}: stop it, or make the "
                        "region with other ports (`micronova region init --first-port 20000`)."
                    )

    def _ports(self, name: str) -> dict[int, str]:
        """Return the ports on which a process will listen, and what listens there."""
        if name == "broker":
            found = {self.broker.port: "broker", self._plan.port("distribution"): "distribution of the broker"}
            return found if self.runs("epmd") else {**found, self._plan.port("epmd"): "epmd of the broker"}
        if name == "database":
            return {self.database.port: name}
        if name in self._plan.processes and self._plan.serves_http(name):
            return {self._plan.port(self._plan.processes[name]): name}
        return {}

    @property
    def _tool(self) -> Path:
        return self._plan.state("tool")

    def _host_settings(self, name: str) -> Path:
        return self._plan.hosts_directory / f"{name}.toml"

    def _start_database(self) -> None:
        password_file = self._private / "database.password"
        if self.runs("database"):
            return
        if password_file.exists():
            with _stopped_on_error(self.database):
                self.database.launch()
                self._record("database", self.database.process)
            return
        self._private.mkdir(mode=0o711, exist_ok=True)
        self._private.chmod(0o711)
        shutil.rmtree(self.database.data, ignore_errors=True)  # an earlier start may have been stopped half-way
        pair = (self._plan.certificate, self._plan.certificate_key) if self._plan.tls else None
        password = new_password()
        self.database.create("postgres", password=password, tls=pair)
        with _stopped_on_error(self.database):
            self.database.launch()
            file = str(self._plan.directory / "postgresql.sql")
            login = {**os.environ, **self.database_variables("postgres", password, "postgres")}
            run("psql", "-X", "--quiet", "--set", "ON_ERROR_STOP=1", "--file", file, env=login)
            _write_private(password_file, password)
            self._record("database", self.database.process)

    def _start_broker(self) -> None:
        done = self._private / "broker.done"
        if self.runs("broker"):
            return
        new = not done.exists()
        if new:
            shutil.rmtree(self.broker.directory, ignore_errors=True)
            files = (self._plan.authority, self._plan.certificate, self._plan.certificate_key)
            self.broker.create(files if self._plan.tls else None)
            self._write_broker_tool()
        with _stopped_on_error(self.broker):
            self.broker.launch()
            if new:
                self._shell(self._plan.directory / "broker.sh")
                done.touch()
            self._record("broker", self.broker.process)
            if self.broker.epmd is not None:
                self._record("epmd", self.broker.epmd)

    def _write_broker_tool(self) -> None:
        """Write a rabbitmqctl for this broker: Debian's asks the system's broker only."""
        tools = self._plan.directory / "bin"
        tools.mkdir(exist_ok=True)
        variables = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in self.broker.environment().items() if name != "PATH"
        )
        command = shlex.join(self.broker.control_command())
        (tools / "rabbitmqctl").write_text(f'#!/bin/sh\nexec env {variables} {command} "$@"\n')
        (tools / "rabbitmqctl").chmod(0o700)

    def database_variables(self, user: str, password: str, database: str) -> dict[str, str]:
        """Return how PostgreSQL's own programs log in."""
        found = {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.database.port),
            "PGUSER": user,
            "PGPASSWORD": password,
            "PGDATABASE": database,
        }
        if self._plan.tls:
            found |= {"PGSSLMODE": "verify-full", "PGSSLROOTCERT": str(self._plan.authority)}
        return found

    def _write_environment(self) -> None:
        from sqlalchemy.engine import make_url

        url = make_url(load(self._plan.settings, environ={}).database.connection)
        variables = {
            "OS_CLIENT_CONFIG_FILE": str(self._plan.directory / "clouds.yaml"),
            "OS_CLOUD": "micronova",
            "MICRONOVA_DIR": str(self._tool),
            **self.database_variables(USER, str(url.password), USER),
        }
        text = "# For a shell: . trial.env. The clients of OpenStack, PostgreSQL and RabbitMQ then use this region.\n"
        text += f"export PATH={shlex.quote(str(self._plan.directory / 'bin'))}:$PATH\n"
        text += "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        _write_private(self.environment_file, text)

    def _shell(self, commands: Path) -> None:
        """Run a file of commands that call rabbitmqctl; they have passwords, which arguments would show to all."""
        path = f"{self._plan.directory / 'bin'}:{os.environ.get('PATH', '/usr/bin:/bin')}"
        run("sh", "-e", str(commands), env={**os.environ, "PATH": path})

    def _micronova(self, *arguments: str) -> str:
        return run(*own_command(*arguments), env=_environment({}))

    def _add_host(self, name: str) -> None:
        file, commands = self._host_settings(name), self._records / f"{name}.sh"
        try:
            printed = self._micronova(
                *("host", "add", name, "--driver", self._plan.driver, "--settings", str(file)),
                *("--config", str(self._plan.settings), "--dir", str(self._tool)),
            )
            _write_private(commands, printed)
            self._shell(commands)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        finally:
            commands.unlink(missing_ok=True)

    def _control_process(self, name: str) -> tuple[list[str], dict[str, str]]:
        own = dict(_variables(self._plan.etc / f"{name}.env"))
        roles = own.pop("ROLES").split()
        return self._run_command(name, roles, self._plan.settings), own

    def _host_process(self, name: str) -> tuple[list[str], dict[str, str]]:
        return self._run_command(name, ["compute"], self._host_settings(name)), {}

    def _run_command(self, name: str, roles: list[str], settings: Path) -> list[str]:
        return own_command("run", *roles, "--config", str(settings), "--dir", str(self._plan.state(name)))

    def _start_all(self, commands: dict[str, tuple[list[str], dict[str, str]]]) -> None:
        """Start processes side by side, and wait until all are ready."""
        (self._plan.directory / "log").mkdir(exist_ok=True)
        (self._plan.directory / "state").mkdir(exist_ok=True)
        (self._plan.directory / "state").chmod(0o711)
        with contextlib.ExitStack() as sockets:
            waiting: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}
            for name, (command, own) in commands.items():
                sock = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                address = f"micronova-region-{secrets.token_hex(8)}"
                sock.bind(f"\0{address}")
                sock.settimeout(0.2)
                with self._log(name).open("ab") as log:
                    process = subprocess.Popen(
                        command,
                        env=_environment({**own, "NOTIFY_SOCKET": f"@{address}"}),
                        cwd="/",
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                self._record(name, process)
                waiting[name] = process, sock
            deadline = time.monotonic() + READY
            for name, (process, sock) in waiting.items():
                self._wait_ready(name, process, sock, deadline)

    def _log(self, name: str) -> Path:
        return self._plan.directory / "log" / f"{name}.log"

    def _wait_ready(self, name: str, process: "subprocess.Popen[bytes]", sock: socket.socket, deadline: float) -> None:
        while True:
            try:
                if b"READY=1" in sock.recv(4096):
                    return
            except TimeoutError:
                pass
            if process.poll() is not None:
                raise MicronovaError(f"{name} ended at its start; {self._log(name)} says why:\n{tail(self._log(name))}")
            if time.monotonic() > deadline:
                log = self._log(name)
                raise MicronovaError(f"{name} is not ready after {READY:.0f} s; {log} may say why:\n{tail(log)}")

    # --- stop --------------------------------------------------------------------------------------------------

    def stop(self, names: list[str]) -> list[str]:
        """Stop processes, those that were started last first; return which ran."""
        ran = [name for name in reversed(names) if self.runs(name)]
        roles = [name for name in ran if name not in SERVICES]
        self._end([name for name in roles if name in self.hosts], signal.SIGTERM)
        self._end([name for name in roles if name not in self.hosts], signal.SIGTERM)
        if "broker" in ran:
            self._end(["broker"], signal.SIGTERM)
            self._end(["epmd"], signal.SIGTERM)
        if "database" in ran:
            self._end(["database"], signal.SIGINT)
        return ran

    def _end(self, names: list[str], how: signal.Signals) -> None:
        running = {name: found for name in names if (found := self._running(name)) is not None}
        for started in running.values():
            _signal(started, how)
        for name, started in running.items():
            deadline, killed = time.monotonic() + STOP, False
            while _ticks(started.pid) == started.ticks:
                if not killed and time.monotonic() > deadline:
                    killed = True
                    click.echo(f"{name} did not stop within {STOP:.0f} s and is killed.", err=True)
                    _signal(started, signal.SIGKILL)
                time.sleep(0.05)  # it is no child of this process: the kernel does not tell us
            (self._records / f"{name}.json").unlink(missing_ok=True)

    # --- reload ------------------------------------------------------------------------------------------------

    def reload(self, names: list[str]) -> list[str]:
        """Let processes read again what they can, as `systemctl reload` does; return those that run.

        If the region has a certificate, return when all of them that listen show the present one.
        """
        running = {name: found for name in names if (found := self._running(name)) is not None}
        if self._plan.tls and "database" in running:
            self.database.copy_certificate(self._plan.certificate, self._plan.certificate_key)
        for name, started in running.items():
            if name != "broker":
                _signal(started, signal.SIGHUP)
            elif self._plan.tls:
                run(*self.broker.control_command(), "eval", "ssl:clear_pem_cache().", env=self.broker.environment())
        if self._plan.tls:
            for name in running:
                self._wait_for_certificate(name)
        return list(running)

    def _wait_for_certificate(self, name: str) -> None:
        if name in SERVICES or (name in self._plan.processes and self._plan.serves_http(name)):
            file, port = self._plan.certificate, self._plan.port(self._plan.processes.get(name, name))
            _poll(
                lambda: shows(port, file, self._plan.authority, is_postgres=name == "database"),
                f"{name} does not show the certificate {file}; its log may say why",
                RELOADED,
            )

    # --- records -----------------------------------------------------------------------------------------------

    def runs(self, name: str) -> bool:
        """Return whether a process runs that `up` has started."""
        return self._running(name) is not None

    def _record(self, name: str, process: "subprocess.Popen[bytes] | None") -> None:
        ticks = None if process is None else _ticks(process.pid)
        if process is not None and ticks is not None:
            started = Started(process.pid, ticks)
            (self._records / f"{name}.json").write_bytes(msgspec.json.encode(started))

    def _running(self, name: str) -> Started | None:
        try:
            started = msgspec.json.decode((self._records / f"{name}.json").read_bytes(), type=Started)
        except (FileNotFoundError, msgspec.MsgspecError):  # the machine may have stopped while it was written
            return None
        return started if _ticks(started.pid) == started.ticks else None


def up(directory: Path, names: tuple[str, ...]) -> None:
    """Start the region in DIR, or some of its processes, and return when they are ready."""
    plan = _plan_of_trial(directory)
    trial = Trial(plan)
    chosen = trial.chosen(names)
    before = [name for name in chosen if trial.runs(name)]
    trial.start(chosen)
    hosts = [name for name in chosen if name in trial.hosts]
    if hosts and any(trial.runs(name) for name in plan.processes):
        _wait_for_hosts(plan, hosts)
    started = len(chosen) - len(before)
    click.echo(f"{started} processes started, {len(before)} ran already; logs are in {plan.directory / 'log'}.")
    click.echo(f"\n  . {trial.environment_file}\n")
    click.echo("lets `openstack`, `rabbitmqctl` and `psql` of a shell use the region, as admin; the password is in")
    click.echo(f"{plan.directory / 'clouds.yaml'}. `micronova region down --dir {plan.directory}` stops it.")


def restart(directory: Path, names: tuple[str, ...]) -> None:
    """Restart processes one after the other, each when the one before it is ready; database and broker if named."""
    plan = _plan_of_trial(directory)
    trial = Trial(plan)
    for name in trial.chosen(names):
        if name in SERVICES and not {name, "services"} & set(names):
            continue
        began = time.monotonic()
        trial.stop([name])
        trial.start([name])
        if name in trial.hosts:
            _wait_for_hosts(plan, [name])
        click.echo(f"{name} is ready again after {time.monotonic() - began:.1f} s")


def reload(directory: Path, names: tuple[str, ...]) -> None:
    """Let processes of the region in DIR read again what they can change while they run."""
    plan = _plan_of_trial(directory)
    trial = Trial(plan)
    told = trial.reload(trial.chosen(names))
    click.echo(f"reloaded: {', '.join(told)}" if told else "Nothing runs.")


def down(directory: Path, names: tuple[str, ...]) -> None:
    """Stop the region in DIR, or some of its processes."""
    trial = Trial(read_plan(directory))
    ran = trial.stop(trial.chosen(names))
    click.echo(f"stopped: {', '.join(ran)}" if ran else "Nothing ran.")


def _plan_of_trial(directory: Path) -> RegionPlan:
    """Return the plan of a region that this machine can run, whose files its processes can read."""
    plan = read_plan(directory)
    if not plan.is_for_trial:
        raise MicronovaError(
            "This region is not for a trial: `micronova region up` needs addresses of this machine alone (127.0.0.1) "
            "and simulated guests (`micronova region init --driver fake`). docs/region.md says how to install it."
        )
    os.umask(0o077)
    _share_settings(plan)
    return plan


@contextlib.contextmanager
def _stopped_on_error(service: PrivatePostgres | PrivateRabbitMQ) -> Iterator[None]:
    """Stop a service if what is done with it fails, so that the next `region up` begins anew."""
    try:
        yield
    except BaseException:
        service.stop()
        raise


def _share_settings(plan: RegionPlan) -> None:
    """If root starts the region, let the users that its processes become read what they need."""
    user = service_user(USER)
    if user is None:
        return
    for parent in plan.directory.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            raise MicronovaError(
                f"PostgreSQL and the services do not run as root and cannot pass through {parent}: choose a directory "
                "that all users can reach, such as one in /var/lib."
            )
    for path in (plan.etc, *plan.etc.rglob("*"), plan.hosts_directory, *plan.hosts_directory.iterdir()):
        os.chown(path, 0, user.gid)
        path.chmod(0o750 if path.is_dir() else 0o640)
    if plan.tls:
        plan.etc.chmod(0o751)  # everybody may verify certificates
        plan.authority.parent.chmod(0o751)
        plan.authority.chmod(0o644)


def _wait_for_hosts(plan: RegionPlan, hosts: list[str]) -> None:
    """Wait until conductors have heard of all these hosts."""
    from micronova.cli.hosts import hosts_up

    _poll(lambda: set(hosts) <= hosts_up(plan.state("tool"), plan.settings), f"not all of {', '.join(hosts)} are up")


def _poll(ready: Callable[[], bool], otherwise: str, seconds: float = READY) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise MicronovaError(f"After {seconds:.0f} s {otherwise}.")
        time.sleep(0.2)  # the processes of the region tell us nothing; we have to ask


def _variables(file: Path) -> Iterable[tuple[str, str]]:
    """Yield the variables of an environment file of systemd's, as far as `region init` writes such."""
    for line in file.read_text().splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            yield name, value.strip('"')


def _environment(own: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process: settings of the person's shell are not those of the region."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MICRONOVA_", "OS_", "PG"))}
    return {**kept, **own}


def _write_private(file: Path, text: str) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        stream.write(text)


def _ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine did; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _signal(started: Started, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(started.pid)
        try:
            if _ticks(started.pid) == started.ticks:
                signal.pidfd_send_signal(process, how)
        finally:
            os.close(process)
