"""A private RabbitMQ that tests stop, crash and restart, with vhosts and users that they make."""

import contextlib
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Self

from micronova.cli.private_services.process import ServiceError, end, run
from micronova.cli.private_services.rabbitmq import HOST, PrivateRabbitMQ
from tests.services.process import free_port, signal_tree


class RabbitMQ(PrivateRabbitMQ):
    """One broker: start() makes it, stop() or kill() end it, restart() brings it back with its data."""

    @classmethod
    def start(cls, directory: Path | str) -> Self:
        """Make a new broker under the directory, with the user guest and the vhost /."""
        broker = cls(Path(directory), free_port(), free_port(), free_port())
        broker.create()
        (broker.directory / "ports").write_text(f"{broker.port} {broker._epmd_port} {broker._distribution_port}")
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
        return run(*self.control_command(), *arguments, env=self.environment())

    def do(self, *commands: str) -> None:
        """Run the commands of a shell that operators are given; `rabbitmqctl` in them is that of this node."""
        function = f'rabbitmqctl() {{ {shlex.join(self.control_command())} "$@"; }}'
        run("sh", "-ec", "\n".join((function, *commands)), env=self.environment())

    def eval(self, code: str) -> str:
        """Evaluate Erlang in the broker; fail unless the result is a plain success."""
        done = subprocess.run(
            ["erl_call", "-r", "-address", f"{HOST}:{self._distribution_port}", "-e"],
            input=f"{code}\n".encode(),
            env=self.environment(),
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
            self.launch()
        except BaseException:
            self.kill()
            self.stop()
            raise

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

    def _end(self, how: signal.Signals) -> None:
        end(self.process, how)
        self.process = None

    def _allow(self, vhost: str, user: str) -> None:
        self.eval(
            f'rabbit_auth_backend_internal:set_permissions(<<"{user}">>, <<"{vhost}">>, '
            '<<".*">>, <<".*">>, <<".*">>, <<"tests">>).'
        )
