"""A private RabbitMQ: own node name, port, directory, cookie and epmd; never the system's."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Self

from tests.services.process import ServiceError, accepts, end, free_port, run, signal_tree, wait_until

HOST = "127.0.0.1"


def programs() -> Path:
    """Return where the server's own scripts are; Debian's wrappers in the PATH would change the user."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin"))
    if not found:
        raise ServiceError("RabbitMQ is not installed: run scripts/ensure-packages")
    return found[-1]


class RabbitMQ:
    """One broker: start() makes it, stop() or kill() end it, restart() brings it back with its data."""

    def __init__(self, directory: Path, port: int, epmd_port: int, distribution_port: int) -> None:
        self.directory = directory
        self.port = port
        self.node = f"mn{port}@localhost"
        self.process: subprocess.Popen[bytes] | None = None
        self._epmd_port = epmd_port
        self._distribution_port = distribution_port
        self._epmd: subprocess.Popen[bytes] | None = None
        self._bin = programs()

    @classmethod
    def start(cls, directory: Path | str) -> Self:
        """Make a new broker under the directory, with the user guest and the vhost /."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        broker = cls(directory, free_port(), free_port(), free_port())
        cookie = directory / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        (directory / "enabled_plugins").write_text("[].")
        (directory / "rabbitmq.config").write_text(_settings(broker.port))
        (directory / "ports").write_text(f"{broker.port} {broker._epmd_port} {broker._distribution_port}")
        broker.restart()
        return broker

    @classmethod
    def attach(cls, directory: Path | str) -> Self:
        """Use a broker that another process started under the directory."""
        return cls(Path(directory), *map(int, (Path(directory) / "ports").read_text().split()))

    @property
    def url(self) -> str:
        """The URL of the default vhost, as guest."""
        return f"amqp://guest:guest@{HOST}:{self.port}/"

    def add_vhost(self, name: str) -> str:
        """Create a vhost (milliseconds, unlike rabbitmqctl) that guest may use, and return its URL."""
        self.eval(f'rabbit_vhost:add(<<"{name}">>, <<"tests">>).')
        self._allow(name, "guest")
        return f"{self.url}{name}"

    def delete_vhost(self, name: str) -> None:
        """Delete a vhost with all its queues; its connections are closed."""
        self.eval(f'rabbit_vhost:delete(<<"{name}">>, <<"tests">>).')

    def add_user(self, name: str, password: str, vhost: str = "/") -> str:
        """Create a user with all permissions on the vhost and return the URL to connect with."""
        self.eval(f'rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"{password}">>, <<"tests">>).')
        self._allow(vhost, name)
        return f"amqp://{name}:{password}@{HOST}:{self.port}/{'' if vhost == '/' else vhost}"

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl (about a second) against this node and return its output."""
        rabbitmqctl = str(self._bin / "rabbitmqctl")
        return run(rabbitmqctl, "--quiet", "--node", self.node, *arguments, env=self._environment())

    def eval(self, code: str) -> str:
        """Evaluate Erlang in the broker; fail unless the result is a plain success."""
        done = subprocess.run(
            ["erl_call", "-r", "-address", f"{HOST}:{self._distribution_port}", "-e"],
            input=f"{code}\n".encode(),
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=30,
            check=False,
        )
        output = done.stdout.decode(errors="replace")
        if done.returncode or not output.startswith("{ok, ") or "{error," in output:
            raise ServiceError(f"{code}\n{output}")
        return output.removeprefix("{ok, ").removesuffix("}")

    def restart(self) -> None:
        """Start the process again, after stop() or kill() or over a running one, on the same ports and data."""
        self._end(signal.SIGTERM)
        try:
            self._launch()
        except BaseException:
            self.kill()
            self.stop()
            raise

    def stop(self) -> None:
        """Stop in order, and with it the epmd."""
        self._end(signal.SIGTERM)
        end(self._epmd, signal.SIGTERM)
        self._epmd = None

    def kill(self) -> None:
        """Crash: SIGKILL, nothing is flushed but the names of the quorum queues.

        RabbitMQ 3.10 writes those half a second late. A queue declared within that time before the crash comes
        back without a leader and hangs for ever: a defect of the broker that would blur what our tests find.
        """
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ServiceError, subprocess.TimeoutExpired):
                self.eval("dets:sync(ra_directory_reverse).")
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Let it stand still: connections stay open and nothing answers."""
        signal_tree(self.process, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        signal_tree(self.process, signal.SIGCONT)

    def _launch(self) -> None:
        log = self.directory / "log"
        environment = self._environment()
        with log.open("ab") as out:
            if self._epmd is None:
                # The broker would start a daemon of its own that outlives it; a child of ours ends with us.
                self._epmd = subprocess.Popen(
                    [shutil.which("epmd") or "epmd", "-port", str(self._epmd_port), "-address", HOST],
                    env=environment,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
                wait_until(lambda: accepts(self._epmd_port), self._epmd, log)
            self.process = subprocess.Popen(
                [str(self._bin / "rabbitmq-server")],
                env=environment,
                cwd=self.directory,  # where Erlang would drop a crash dump
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        wait_until(lambda: accepts(self.port), self.process, log)

    def _end(self, how: signal.Signals) -> None:
        end(self.process, how)
        self.process = None

    def _allow(self, vhost: str, user: str) -> None:
        self.eval(
            f'rabbit_auth_backend_internal:set_permissions(<<"{user}">>, <<"{vhost}">>, '
            '<<".*">>, <<".*">>, <<".*">>, <<"tests">>).'
        )

    def _environment(self) -> dict[str, str]:
        directory = str(self.directory)
        return {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "HOME": directory,  # the Erlang cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONF_ENV_FILE": f"{directory}/none",
            "RABBITMQ_CONFIG_FILE": f"{directory}/rabbitmq.config",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{directory}/none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{directory}/enabled_plugins",
            "RABBITMQ_MNESIA_BASE": f"{directory}/mnesia",
            "RABBITMQ_LOG_BASE": f"{directory}/logs",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": f"{directory}/pid",
            # One scheduler is plenty here; and nothing of the node is reachable but on loopback.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "+S 1:1 +SDcpu 1:1 +SDio 2 +A 4 -kernel inet_dist_use_interface {127,0,0,1}"
            ),
            # This pair makes the script become the Erlang machine, so that our child's pid is the broker's.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput +B i",
        }


def _settings(port: int) -> str:
    # Erlang terms, not the newer key = value form: translating that costs the start half a second more.
    return f"""[
  {{rabbit, [
    {{tcp_listeners, [{{"{HOST}", {port}}}]}},
    {{vm_memory_high_watermark, {{absolute, "1GB"}}}},
    {{disk_free_limit, "50MB"}},
    {{log, [{{console, [{{enabled, true}}, {{level, warning}}]}}, {{file, [{{file, false}}]}}]}}
  ]}}
].
"""
